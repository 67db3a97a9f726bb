//! The text of LVM's metadata: `name = number`, `name = "text"`, `name = [item, ...]` and `name { ... }`, with comments from `#` to the
//! end of a line.

/// Sections and lists in each other. Recursion ends here, whatever a guest writes.
const DEPTH_MAX: usize = 8;

pub enum Item {
    Number(u64),
    Text(String),
    List(Vec<Item>),
    Section(Section),
}

#[derive(Default)]
pub struct Section(Vec<(String, Item)>);

impl Section {
    fn get(&self, name: &str) -> Option<&Item> {
        self.0.iter().find_map(|(own, item)| (own == name).then_some(item))
    }

    pub fn number(&self, name: &str) -> Option<u64> {
        if let Item::Number(number) = self.get(name)? { Some(*number) } else { None }
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        if let Item::Text(text) = self.get(name)? { Some(text) } else { None }
    }

    pub fn list(&self, name: &str) -> Option<&[Item]> {
        if let Item::List(list) = self.get(name)? { Some(list) } else { None }
    }

    pub fn section(&self, name: &str) -> Option<&Self> {
        if let Item::Section(section) = self.get(name)? { Some(section) } else { None }
    }

    pub fn sections(&self) -> impl Iterator<Item = (&str, &Self)> {
        self.0.iter().filter_map(|(name, item)| match item {
            Item::Section(section) => Some((name.as_str(), section)),
            _ => None,
        })
    }
}

/// All of it; none if it is anything else.
pub fn parse(text: &[u8]) -> Option<Section> {
    let mut reader = Reader { rest: text };
    let root = reader.section(0)?;
    reader.rest.is_empty().then_some(root)
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    /// Up to the brace that ends it, or to the end of all.
    fn section(&mut self, depth: usize) -> Option<Section> {
        let mut section = Section::default();
        while self.peek().is_some_and(|next| next != b'}') {
            let name = self.word().filter(|_| depth < DEPTH_MAX)?;
            let item = match self.peek()? {
                b'{' => {
                    self.step();
                    let inner = self.section(depth + 1)?;
                    self.expect(b'}')?;
                    Item::Section(inner)
                }
                _ => {
                    self.expect(b'=')?;
                    self.value(depth)?
                }
            };
            section.0.push((name, item));
        }
        Some(section)
    }

    fn value(&mut self, depth: usize) -> Option<Item> {
        match self.peek()? {
            b'"' => self.quoted().map(Item::Text),
            b'[' if depth < DEPTH_MAX => {
                self.step();
                let mut list = Vec::new();
                while self.peek()? != b']' {
                    list.push(self.value(depth + 1)?);
                    if self.peek()? != b']' {
                        self.expect(b',')?;
                    }
                }
                self.step();
                Some(Item::List(list))
            }
            _ => self.word()?.parse().ok().map(Item::Number),
        }
    }

    fn word(&mut self) -> Option<String> {
        let bytes = self.rest.iter().take_while(|&&byte| is_word(byte)).count();
        let (word, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        Some(String::from_utf8_lossy(word).into_owned()).filter(|word| !word.is_empty())
    }

    /// A backslash is before what would end it, and before itself.
    fn quoted(&mut self) -> Option<String> {
        let mut text = Vec::new();
        let mut bytes = self.rest.iter().enumerate().skip(1);
        loop {
            match bytes.next()? {
                (_, b'\\') => text.push(*bytes.next()?.1),
                (end, b'"') => {
                    self.rest = &self.rest[end + 1..];
                    return Some(String::from_utf8_lossy(&text).into_owned());
                }
                (_, &byte) => text.push(byte),
            }
        }
    }

    /// What comes next that means something.
    fn peek(&mut self) -> Option<u8> {
        loop {
            match self.rest.first()? {
                b'#' => self.rest = &self.rest[self.rest.iter().take_while(|&&byte| byte != b'\n').count()..],
                byte if byte.is_ascii_whitespace() || *byte == 0 => self.step(),
                byte => return Some(*byte),
            }
        }
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.step())
    }

    fn step(&mut self) {
        self.rest = &self.rest[1..];
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte >= 0x80 || b"_-.+/:!*&%@".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_makes_no_sense_is_none() {
        let is_some = |text: &str| parse(text.as_bytes()).is_some();
        assert!(is_some("a { b = [\"x\\\"}\", 1] # }\n c { } }\n"));
        for text in ["a", "a {", "a = ", "a = x", "a = [1", "a = [1 2]", "a = \"x", "}", "= 1", "a = -1", "a = 1 {"] {
            assert!(!is_some(text), "{text}");
        }
        assert!(!is_some(&"a {".repeat(100_000)) && !is_some(&format!("a = {}", "[".repeat(100_000))));
    }
}
