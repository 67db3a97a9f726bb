//! Known: the settings of an element that Hearth understands. All others are found, also those that a later libvirt adds, so that
//! nothing is left out in silence.
//!
//! Paths name them: `driver@cache` an attribute, `driver@discard=unmap` one value of it, `readonly` an element, `address/*` an element
//! with everything in it.

use roxmltree::Node;

/// A setting that is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// Its path, without a value.
    pub path: String,
    /// The value of an attribute.
    pub value: Option<String>,
}

impl Unknown {
    /// As its owner wrote it: `driver iothread='1'`.
    pub fn shown(&self) -> String {
        let Some(value) = &self.value else { return self.path.clone() };
        let (element, attribute) = self.path.rsplit_once('@').unwrap_or(("", &self.path));
        format!("{element} {attribute}='{value}'").trim_start().to_owned()
    }
}

/// What an element has that none of these lists knows, in the order of the definition.
pub fn unknown(element: Node<'_, '_>, known: &[&[&str]]) -> Vec<Unknown> {
    let mut found = Vec::new();
    look(element, "", known, &mut found);
    found
}

fn look(element: Node<'_, '_>, path: &str, known: &[&[&str]], found: &mut Vec<Unknown>) {
    let is_known = |path: &str| known.iter().any(|list| list.contains(&path));
    for attribute in element.attributes() {
        let (path, value) = (format!("{path}@{}", attribute.name()), attribute.value());
        if !is_known(&path) && !is_known(&format!("{path}={value}")) {
            found.push(Unknown { path, value: Some(value.to_owned()) });
        }
    }
    for child in element.children().filter(Node::is_element) {
        let name = child.tag_name().name();
        let path = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
        if is_known(&format!("{path}/*")) {
            continue;
        }
        let is_inside = |known: &&str| known.strip_prefix(&path).is_some_and(|rest| rest.starts_with(['@', '/']));
        if is_known(&path) || known.iter().copied().flatten().any(is_inside) {
            look(child, &path, known, found);
        } else {
            found.push(Unknown { path, value: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use roxmltree::Document;

    use super::*;

    #[track_caller]
    fn check(xml: &str, known: &[&str], expect: &[&str]) {
        let document = Document::parse(xml).unwrap();
        let found: Vec<_> = unknown(document.root_element(), &[&["@id"], known]).iter().map(Unknown::shown).collect();
        assert_eq!(found, expect, "{xml}");
    }

    #[test]
    fn settings_that_nobody_names_are_found() {
        let xml = "<a id='1' x='2'><b c='on' d='3'>text</b><e><f g='4'/><h/></e></a>";
        check(xml, &[], &["x='2'", "b", "e"]);
        check(xml, &["@x", "b", "e/*"], &["b c='on'", "b d='3'"]);
        check(xml, &["@x", "b@c=on", "e"], &["b d='3'", "e/f", "e/h"]);
        check(xml, &["@x", "b@c=off", "b@d", "e/f"], &["b c='on'", "e/f g='4'", "e/h"]);
        check(xml, &["@x", "b/*", "e/f@g", "e/h"], &[]);
    }
}
