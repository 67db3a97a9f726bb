//! Said: QEMU's own text, made fit for events and errors.
//!
//! QEMU is not trusted, because a guest may have taken it over: what it says may be as long as its log, and control a terminal.

use plain_text::{beginning, printable};

/// Longer than any message of a stock QEMU.
const CHARS_MAX: usize = 1000;

/// The beginning of a text of QEMU's, in one printable line.
pub fn said(text: &str) -> String {
    let shown = beginning(text, CHARS_MAX);
    let more = if shown.len() < text.len() { "..." } else { "" };
    printable(shown) + more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_is_cut_and_printable() {
        assert_eq!(said("no such file"), "no such file");
        assert_eq!(said("\x1b]0;x\x07a\nb\u{9b}"), " ]0;x a b ");
        assert_eq!(said(&"ö".repeat(70_000)), format!("{}...", "ö".repeat(CHARS_MAX)));
    }
}
