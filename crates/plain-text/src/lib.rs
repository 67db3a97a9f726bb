//! Plain text: what guests and QEMUs say, made fit for events, errors and terminals. It is not trusted.
//!
//! Several crates take such text in, and ground crates know nothing of each other.

#![warn(missing_docs)]

/// The text in one line, without characters that control a terminal or turn the text around them: each becomes a space.
pub fn printable(text: &str) -> String {
    text.chars().map(printable_letter).collect()
}

/// A space for a character that controls a terminal, also with a newline, or that turns the text around it; else itself.
pub fn printable_letter(letter: char) -> char {
    let turns = matches!(letter, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if letter.is_control() || turns { ' ' } else { letter }
}

/// The first characters of a text, at most this many.
pub fn beginning(text: &str, chars_max: usize) -> &str {
    text.char_indices().nth(chars_max).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printable_text_controls_no_terminal() {
        assert_eq!(printable("a\x1b[2Jb\nc\u{9b}d\u{202e}e\u{7f}"), "a [2Jb c d e ");
        assert_eq!(printable("plain, größer, 日本"), "plain, größer, 日本");
    }

    #[test]
    fn beginning_ends_between_characters() {
        assert_eq!([0, 1, 2, 3, 4].map(|chars| beginning("aöb", chars)), ["", "a", "aö", "aöb", "aöb"]);
    }
}
