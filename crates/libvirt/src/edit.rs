//! Edit: changes pieces of an XML text and leaves the rest as it is, so that a diff shows only what is meant.

use std::ops::Range;

use roxmltree::{Attribute, Node};

/// Changes to one text. They must not overlap.
pub struct Edits<'a> {
    text: &'a str,
    changes: Vec<(Range<usize>, String)>,
}

impl<'a> Edits<'a> {
    pub fn new(text: &'a str) -> Self {
        Self { text, changes: Vec::new() }
    }

    /// Puts `with` in place of an element. Its further lines are indented like the element.
    pub fn replace(&mut self, element: Node<'_, '_>, with: &str) {
        let indent = self.indent(element.range().start);
        self.changes.push((element.range(), with.replace('\n', &format!("\n{indent}"))));
    }

    /// Removes an element, with its line if nothing else is on it.
    pub fn remove(&mut self, element: Node<'_, '_>) {
        let Range { mut start, end } = element.range();
        let before = self.text[..start].trim_end_matches([' ', '\t']);
        if before.ends_with('\n') && self.text[end..].starts_with(['\n', '\r']) {
            start = before.len() - 1;
        }
        self.changes.push((start..end, String::new()));
    }

    /// Gives an attribute this name and value.
    pub fn replace_attribute(&mut self, attribute: Attribute<'_, '_>, name: &str, value: &str) {
        self.changes.push((attribute.range(), format!("{name}='{}'", escaped(value))));
    }

    /// Gives an element an attribute, or another value to the one that it has.
    pub fn set_attribute(&mut self, element: Node<'_, '_>, name: &str, value: &str) {
        if let Some(attribute) = element.attribute_node(name) {
            return self.replace_attribute(attribute, name, value);
        }
        let at = element.range().start + 1 + element.tag_name().name().len();
        self.changes.push((at..at, format!(" {name}='{}'", escaped(value))));
    }

    /// Adds an element before another one, on a line of its own.
    pub fn add_before(&mut self, element: Node<'_, '_>, new: &str) {
        let start = element.range().start;
        let line_end = format!("\n{}", self.indent(start));
        self.changes.push((start..start, format!("{}{line_end}", new.replace('\n', &line_end))));
    }

    /// Adds an element as the last child of another one.
    pub fn add_last(&mut self, parent: Node<'_, '_>, new: &str) {
        let Range { start, end } = parent.range();
        let line_end = format!("\n{}", self.indent(start));
        let new = format!("  {}", new.replace('\n', &format!("{line_end}  ")));
        let name = parent.tag_name().name();
        let is_open = self.text[start..end].ends_with('>') && !self.text[start..end].ends_with("/>");
        if is_open {
            let close = start + self.text[start..end].rfind("</").expect("an element that is not empty has an end");
            let after = self.text[..close].trim_end().len();
            self.changes.push((after..close, format!("{line_end}{new}{line_end}")));
        } else {
            let open = self.text[start..end].trim_end_matches("/>").trim_end();
            self.changes.push((start..end, format!("{open}>{line_end}{new}{line_end}</{name}>")));
        }
    }

    /// The changed text.
    pub fn apply(mut self) -> String {
        self.changes.sort_by_key(|(range, _)| (range.start, range.end));
        let mut result = String::with_capacity(self.text.len());
        let mut at = 0;
        for (range, with) in self.changes {
            result.push_str(&self.text[at..range.start]);
            result.push_str(&with);
            at = range.end;
        }
        result.push_str(&self.text[at..]);
        result
    }

    fn indent(&self, at: usize) -> &'a str {
        let line = &self.text[self.text[..at].rfind('\n').map_or(0, |end| end + 1)..at];
        &line[..line.len() - line.trim_start_matches([' ', '\t']).len()]
    }
}

/// A text as XML has it between single quotes.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use roxmltree::Document;

    use super::*;

    const TEXT: &str = "<a>\n  <b/>\n  <c>\n    <d/>\n  </c>\n</a>\n";

    fn edited(change: impl Fn(&mut Edits<'_>, Node<'_, '_>)) -> String {
        let document = Document::parse(TEXT).unwrap();
        let mut edits = Edits::new(TEXT);
        change(&mut edits, document.root_element());
        let text = edits.apply();
        Document::parse(&text).unwrap();
        text
    }

    fn named<'a, 'i>(root: Node<'a, 'i>, name: &str) -> Node<'a, 'i> {
        root.descendants().find(|node| node.has_tag_name(name)).unwrap()
    }

    #[test]
    fn pieces_are_changed_and_the_rest_stays() {
        assert_eq!(edited(|_, _| ()), TEXT);
        let replaced = edited(|edits, root| edits.replace(named(root, "d"), "<e>\n  <f/>\n</e>"));
        assert_eq!(replaced, "<a>\n  <b/>\n  <c>\n    <e>\n      <f/>\n    </e>\n  </c>\n</a>\n");
        assert_eq!(edited(|edits, root| edits.remove(named(root, "b"))), "<a>\n  <c>\n    <d/>\n  </c>\n</a>\n");
        let added = edited(|edits, root| edits.add_before(named(root, "c"), "<x>\n  <y/>\n</x>"));
        assert_eq!(added, "<a>\n  <b/>\n  <x>\n    <y/>\n  </x>\n  <c>\n    <d/>\n  </c>\n</a>\n");
        let last = edited(|edits, root| edits.add_last(named(root, "c"), "<x/>"));
        assert_eq!(last, "<a>\n  <b/>\n  <c>\n    <d/>\n    <x/>\n  </c>\n</a>\n");
        let first = edited(|edits, root| edits.add_last(named(root, "b"), "<x/>"));
        let set = |name, value| {
            let text = "<a>\n  <b c=\"1\" d='2'/>\n</a>";
            let document = Document::parse(text).unwrap();
            let mut edits = Edits::new(text);
            edits.set_attribute(named(document.root_element(), "b"), name, value);
            edits.apply()
        };
        assert_eq!(set("c", "it's"), "<a>\n  <b c='it&apos;s' d='2'/>\n</a>");
        assert_eq!(set("e", "<3"), "<a>\n  <b e='&lt;3' c=\"1\" d='2'/>\n</a>");
        assert_eq!(first, "<a>\n  <b>\n    <x/>\n  </b>\n  <c>\n    <d/>\n  </c>\n</a>\n");
    }
}
