//! Edit: changes pieces of an XML text and leaves the rest as it is, so that a diff shows only what is meant.

use std::ops::Range;

use roxmltree::Node;

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
        assert_eq!(first, "<a>\n  <b>\n    <x/>\n  </b>\n  <c>\n    <d/>\n  </c>\n</a>\n");
    }
}
