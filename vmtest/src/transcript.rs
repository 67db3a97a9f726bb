//! Parser of a serial console's bytes.
//!
//! bytes -> [kernel messages cut out] -> lines -> readiness, answers
//!
//! The kernel may write its messages between any two bytes of other output. Each begins with a time stamp in brackets and ends
//! with a newline. Neither the agent's lines nor base64 contain a bracket, so a message is recognised wherever it begins, and the
//! text before and after it belongs together.

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

/// A readiness line of the guest's agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// A random number drawn at boot and kept only in the guest's memory: it tells a restored guest from a rebooted one.
    pub nonce: String,
    pub at: SystemTime,
}

/// Status and output of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: i32,
    pub output: Vec<u8>,
}

/// Everything parsed from the console so far.
#[derive(Debug, Default)]
pub struct Transcript {
    ready: Vec<Ready>,
    answers: BTreeMap<u64, Answer>,
    kernel: Vec<String>,
    /// Lines that are neither readiness nor part of an answer.
    other: Vec<String>,
    /// The time at which each of these lines was complete.
    other_at: Vec<Instant>,
    /// The last bytes, unfiltered, for error messages.
    tail: Vec<u8>,
    cut: Cut,
    line: Vec<u8>,
    open: Option<(u64, String)>,
    /// The times at which bytes came, once recording has begun.
    arrivals: Option<Vec<Instant>>,
}

const TAIL_BYTES: usize = 64 << 10;

impl Transcript {
    pub fn push(&mut self, bytes: &[u8]) {
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.push(Instant::now());
        }
        self.tail.extend_from_slice(bytes);
        if self.tail.len() > 2 * TAIL_BYTES {
            self.tail.drain(..self.tail.len() - TAIL_BYTES);
        }
        for &byte in bytes {
            match self.cut.push(byte) {
                Piece::Pending => {}
                Piece::Text(text) => text.iter().for_each(|&byte| self.push_text(byte)),
                Piece::Kernel(message) => self.kernel.push(message),
            }
        }
    }

    /// Drops half-received output after the connection was lost: its end will not come.
    pub fn interrupted(&mut self) {
        self.cut = Cut::default();
        self.line.clear();
        self.open = None;
    }

    /// Readiness lines in order. A new connection repeats recent output; a repeated line counts once.
    pub fn ready(&self) -> &[Ready] {
        &self.ready
    }

    pub fn take_answer(&mut self, id: u64) -> Option<Answer> {
        self.answers.remove(&id)
    }

    /// Begins to record the times at which bytes come.
    pub fn watch_arrivals(&mut self) {
        self.arrivals = Some(Vec::new());
    }

    pub fn arrivals(&self) -> &[Instant] {
        self.arrivals.as_deref().unwrap_or_default()
    }

    pub fn kernel(&self) -> &[String] {
        &self.kernel
    }

    pub fn lines(&self) -> &[String] {
        &self.other
    }

    /// Other lines from number `first` on, each with the time at which it came.
    pub fn heard_from(&self, first: usize) -> Vec<(Instant, String)> {
        self.other_at.iter().copied().zip(self.other.iter().cloned()).skip(first).collect()
    }

    /// The last lines, unfiltered.
    pub fn tail(&self, lines: usize) -> String {
        let text = String::from_utf8_lossy(&self.tail);
        let all: Vec<_> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    fn push_text(&mut self, byte: u8) {
        if byte != b'\n' {
            self.line.push(byte);
            return;
        }
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        self.take_line(line.trim());
    }

    fn take_line(&mut self, line: &str) {
        if let Some(fields) = line.strip_prefix("HEARTH-GUEST-READY ") {
            self.open = None;
            self.add_ready(fields);
        } else if let Some(id) = line.strip_prefix("<<<BEGIN ") {
            self.open = id.parse().ok().map(|id| (id, String::new()));
        } else if let Some(end) = line.strip_prefix(">>>END ") {
            self.close(end);
        } else if let Some((_, encoded)) = &mut self.open {
            encoded.push_str(line);
        } else if !line.is_empty() {
            self.other.push(line.to_owned());
            self.other_at.push(Instant::now());
        }
    }

    fn add_ready(&mut self, fields: &str) {
        let nonce = fields.split(' ').find_map(|field| field.strip_prefix("nonce="));
        let Some(nonce) = nonce.filter(|nonce| nonce.len() == 32) else { return };
        if self.ready.iter().all(|ready| ready.nonce != nonce) {
            self.ready.push(Ready { nonce: nonce.to_owned(), at: SystemTime::now() });
        }
    }

    fn close(&mut self, end: &str) {
        let Some((id, encoded)) = self.open.take() else { return };
        let mut words = end.split(' ').map(str::parse::<i64>);
        let (Some(Ok(end_id)), Some(Ok(status))) = (words.next(), words.next()) else { return };
        if end_id != id as i64 {
            return;
        }
        // Output that does not decode was damaged on the way; the waiting test times out and shows the console.
        if let Ok(output) = BASE64.decode(encoded) {
            self.answers.insert(id, Answer { status: status as i32, output });
        }
    }
}

/// Cuts kernel messages out of a stream, byte by byte.
#[derive(Debug, Default)]
struct Cut {
    held: Vec<u8>,
    in_kernel: bool,
}

enum Piece {
    Pending,
    Text(Vec<u8>),
    Kernel(String),
}

impl Cut {
    fn push(&mut self, byte: u8) -> Piece {
        if self.held.is_empty() && byte != b'[' {
            return Piece::Text(vec![byte]);
        }
        self.held.push(byte);
        if self.in_kernel {
            if byte != b'\n' {
                return Piece::Pending;
            }
            self.in_kernel = false;
            let message = std::mem::take(&mut self.held);
            return Piece::Kernel(String::from_utf8_lossy(&message).trim_end().to_owned());
        }
        match stamp(&self.held) {
            Stamp::Whole => self.in_kernel = true,
            Stamp::Part => {}
            Stamp::Not => return Piece::Text(std::mem::take(&mut self.held)),
        }
        Piece::Pending
    }
}

#[derive(Debug, PartialEq)]
enum Stamp {
    Whole,
    Part,
    Not,
}

/// `[    1.234567]`: a bracket, spaces, seconds, a point, six digits, a bracket.
fn stamp(bytes: &[u8]) -> Stamp {
    let text = &bytes[1..];
    let spaces = text.iter().take_while(|&&byte| byte == b' ').count();
    let seconds = text[spaces..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let fraction = match text.get(spaces + seconds) {
        None => return Stamp::Part,
        Some(b'.') if seconds > 0 => &text[spaces + seconds + 1..],
        Some(_) => return Stamp::Not,
    };
    let digits = fraction.iter().take_while(|byte| byte.is_ascii_digit()).count();
    match fraction.get(digits) {
        None if digits <= 6 => Stamp::Part,
        Some(b']') if digits == 6 => Stamp::Whole,
        _ => Stamp::Not,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONCE: &str = "0123456789abcdef0123456789abcdef";

    fn heard(stream: &[u8]) -> Transcript {
        let mut transcript = Transcript::default();
        transcript.push(stream);
        transcript
    }

    fn answer(status: i32, output: &[u8]) -> Option<Answer> {
        Some(Answer { status, output: output.to_vec() })
    }

    #[test]
    fn answer_carries_any_bytes_and_status() {
        let mut transcript = heard(b"\n<<<BEGIN 4\nAP8KWyAgMS4w\nMDAwMDBd\n>>>END 4 3\n");
        assert_eq!(transcript.take_answer(4), answer(3, b"\x00\xff\n[  1.000000]"));
    }

    #[test]
    fn kernel_messages_are_cut_out_anywhere() {
        let whole = b"<<<BEGIN 12\naGVsbG8gd29ybGQK\n>>>END 12 0\n";
        let message = b"[   11.234567] EXT4-fs error (device vda): [bad] block\r\n";
        for place in 0..=whole.len() {
            let stream = [&whole[..place], message, &whole[place..]].concat();
            let mut transcript = heard(&stream);
            assert_eq!(transcript.take_answer(12), answer(0, b"hello world\n"), "message at byte {place}");
            assert_eq!(transcript.kernel(), ["[   11.234567] EXT4-fs error (device vda): [bad] block"]);
        }
    }

    #[test]
    fn single_bytes_parse_like_one_piece() {
        let stream = b"[    0.000001] a\n<<<BEGIN 1\nYQ==\n>>>END 1 0\n[  OK  ] Started\n";
        let mut transcript = Transcript::default();
        stream.iter().for_each(|&byte| transcript.push(&[byte]));
        assert_eq!(transcript.take_answer(1), answer(0, b"a"));
        assert_eq!((transcript.kernel().len(), transcript.lines()), (1, &["[  OK  ] Started".to_owned()][..]));
    }

    #[test]
    fn repeated_readiness_counts_once() {
        let line = format!("HEARTH-GUEST-READY nonce={NONCE} boot=1.9\n");
        let other = line.replace('0', "f");
        let transcript = heard([line.as_str(), &line, &other].concat().as_bytes());
        assert_eq!(transcript.ready().len(), 2);
        assert_eq!(transcript.ready()[0].nonce, NONCE);
    }

    #[test]
    fn half_an_answer_is_dropped_on_reconnect() {
        let mut transcript = heard(b"<<<BEGIN 1\nYWFh\n");
        transcript.interrupted();
        transcript.push(b"YmJi\n>>>END 1 0\n<<<BEGIN 2\nYg==\n>>>END 2 0\n");
        assert_eq!((transcript.take_answer(1), transcript.take_answer(2)), (None, answer(0, b"b")));
    }

    #[test]
    fn answer_cut_off_by_crash_is_dropped() {
        let stream = format!("<<<BEGIN 1\nYWFh\nHEARTH-GUEST-READY nonce={NONCE} boot=2\n>>>END 1 0\n");
        assert_eq!(heard(stream.as_bytes()).take_answer(1), None);
    }
}
