//! Typed: input for QEMU, and how much of it QEMU has not read yet, so that the next QEMU can get it.
//!
//! The kernel reports how much memory a socket's unread data uses, not how many bytes it has. So each byte is sent
//! separately, and all use the same amount. Typing is slow, and pasted text is bounded: 16 KiB take 10 ms.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;

/// More bytes than a socket takes one by one without a reader: a socket's buffer of 208 KiB holds some 300.
const SENT_BYTES_MAX: usize = 4096;

pub struct Typed {
    /// Not yet sent.
    waiting: VecDeque<u8>,
    /// The last bytes sent to the current QEMU.
    sent: VecDeque<u8>,
    /// Memory that one unread byte uses; none if unknown.
    byte_cost: Option<usize>,
}

impl Typed {
    pub fn new() -> Self {
        Self { waiting: VecDeque::new(), sent: VecDeque::new(), byte_cost: byte_cost() }
    }

    pub fn extend(&mut self, bytes: &[u8]) {
        self.waiting.extend(bytes);
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Discards the input, because there is no QEMU.
    pub fn forget(&mut self) {
        self.waiting.clear();
        self.sent.clear();
    }

    /// Sends as much as possible without waiting. False if the other side is gone.
    pub fn send(&mut self, qemu: &mut impl Write) -> bool {
        while let Some(&byte) = self.waiting.front() {
            match qemu.write(&[byte]) {
                Ok(_) => {
                    self.waiting.pop_front();
                    self.sent.push_back(byte);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
            if self.sent.len() > SENT_BYTES_MAX {
                self.sent.pop_front();
            }
        }
        true
    }

    /// Takes back what `old` has not read, to send it to the next QEMU.
    pub fn take_back(&mut self, old: &impl AsFd) {
        let unread = self.byte_cost.map_or(0, |cost| unread_cost(old) / cost).min(self.sent.len());
        for byte in self.sent.drain(..).rev().take(unread) {
            self.waiting.push_front(byte);
        }
    }
}

/// Memory that sent and unread bytes use; 0 if unknown.
pub fn unread_cost(stream: &impl AsFd) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: TIOCOUTQ writes one int, and the descriptor is open.
    let asked = unsafe { libc::ioctl(stream.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if asked == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}

fn byte_cost() -> Option<usize> {
    let (mut sender, _reader) = UnixStream::pair().ok()?;
    sender.write_all(b"x").ok()?;
    Some(unread_cost(&sender)).filter(|&cost| cost > 0)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn unread_input_is_sent_again() {
        let (mut old, mut reads) = UnixStream::pair().unwrap();
        let mut typed = Typed::new();
        typed.extend(b"one two three");
        assert!(typed.send(&mut old) && typed.is_empty());
        reads.read_exact(&mut [0; 6]).unwrap();
        typed.extend(b" four");
        typed.take_back(&old);
        assert_eq!(typed.waiting.iter().copied().collect::<Vec<_>>(), b"o three four");
        let (mut new, mut reads) = UnixStream::pair().unwrap();
        assert!(typed.send(&mut new));
        drop(new);
        let mut heard = String::new();
        reads.read_to_string(&mut heard).unwrap();
        assert_eq!(heard, "o three four");
    }

    #[test]
    fn a_full_socket_keeps_the_rest_waiting() {
        let (mut old, _reads) = UnixStream::pair().unwrap();
        old.set_nonblocking(true).unwrap();
        let mut typed = Typed::new();
        let bytes: Vec<u8> = (0..16_384u32).map(|number| number as u8).collect();
        typed.extend(&bytes);
        assert!(typed.send(&mut old));
        assert!(!typed.is_empty() && typed.sent.len() < SENT_BYTES_MAX, "{} were taken", typed.sent.len());
        typed.take_back(&old);
        assert!(typed.waiting.iter().eq(&bytes));
    }
}
