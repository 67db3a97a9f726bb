//! Reads QEMU's messages on QMP, within bounds.
//!
//! line -> too long or too frequent? -> JSON? -> an answer: queued for the caller | an event: reported
//!
//! A stock QEMU stays far below all bounds: it limits the rate of events that a guest can cause, and sends only answers
//! to commands.

use std::io::{self, BufRead, BufReader, Read};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use plain_text::{beginning, printable};
use serde_json::Value;

use super::{QmpEvent, TimedEvent, event, now};
use crate::Stream;

/// Maximum length of a line. The longest answer to Hearth's commands has about 50 KiB.
const LINE_BYTES_MAX: usize = 256 << 10;
/// Maximum number of queued answers, which belong to commands that timed out. A parsed answer takes up to 16 times the
/// memory of its line (`[0,0,...]`), so the queue takes at most 64 MiB.
pub(super) const ANSWERS_MAX: usize = 16;
const _: () = assert!(ANSWERS_MAX * LINE_BYTES_MAX * 16 <= 64 << 20);
/// Limits of messages and bytes: a burst, and a rate after that.
const MESSAGES: Allowance = Allowance { at_once: 10_000, per_second: 1000 };
const BYTES: Allowance = Allowance { at_once: 8 << 20, per_second: 1 << 20 };
/// Maximum difference between an event's time and now. A larger one means a slow reader or a wrong clock.
const TIME_OFF_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// Maximum number of lines that are not JSON, per session.
const NONSENSE_MAX: u32 = 8;
/// Maximum length of such a line in the log.
const QUOTED_CHARS: usize = 200;

#[derive(Clone, Copy)]
struct Allowance {
    at_once: u64,
    per_second: u64,
}

/// The rest of an allowance, in millionths.
struct Budget {
    allowance: Allowance,
    left: u128,
    counted: Instant,
}

const MILLION: u128 = 1_000_000;

impl Budget {
    fn new(allowance: Allowance, now: Instant) -> Self {
        Self { allowance, left: u128::from(allowance.at_once) * MILLION, counted: now }
    }

    /// Spends a part of the budget. Returns false if that is more than is left.
    fn spend(&mut self, amount: u64, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.counted).as_micros();
        self.counted = now;
        let most = u128::from(self.allowance.at_once) * MILLION;
        self.left = (self.left + passed * u128::from(self.allowance.per_second)).min(most);
        let spent = self.left.checked_sub(u128::from(amount) * MILLION);
        self.left = spent.unwrap_or(0);
        spent.is_some()
    }
}

/// Why QEMU's messages are no longer read.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("its QMP sent a line of more than {LINE_BYTES_MAX} bytes")]
    Line,
    #[error("its QMP sent too much: more than {} messages or {} bytes a second", MESSAGES.per_second, BYTES.per_second)]
    Flood,
    #[error("its QMP answered a command that was not sent")]
    Unasked,
    #[error("its QMP sent a line that is not QMP: {0}")]
    Nonsense(String),
    #[error("its QMP sent file descriptors")]
    Descriptors,
}

/// Reads until QEMU closes the connection or exceeds a bound, which is reported.
pub(super) fn read_all(mut lines: BufReader<Stream>, answered: &SyncSender<Value>, hears: &dyn Fn(TimedEvent)) {
    let Err(fault) = read_within_bounds(&mut lines, answered, hears) else { return };
    // QEMU may be blocked in a write; this ends it.
    let _ = lines.get_ref().shutdown(std::net::Shutdown::Both);
    hears(TimedEvent { event: QmpEvent::Misbehaves(fault.to_string()), at: now() });
}

fn read_within_bounds(
    lines: &mut BufReader<Stream>,
    answered: &SyncSender<Value>,
    hears: &dyn Fn(TimedEvent),
) -> Result<(), Fault> {
    let begun = Instant::now();
    let (mut messages, mut bytes) = (Budget::new(MESSAGES, begun), Budget::new(BYTES, begun));
    let (mut line, mut nonsense) = (Vec::new(), 0);
    loop {
        match next_line(lines, &mut line) {
            Ok(true) => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(Fault::Descriptors),
            Ok(false) | Err(_) => return Ok(()),
        }
        if line.len() > LINE_BYTES_MAX {
            return Err(Fault::Line);
        }
        let now = Instant::now();
        if !messages.spend(1, now) || !bytes.spend(line.len() as u64, now) {
            return Err(Fault::Flood);
        }
        let Ok(message) = serde_json::from_slice::<Value>(&line) else {
            let said = printable(beginning(String::from_utf8_lossy(&line).trim_end(), QUOTED_CHARS));
            nonsense += 1;
            if nonsense > NONSENSE_MAX {
                return Err(Fault::Nonsense(said));
            }
            tracing::warn!(line = said, "QEMU said what is not QMP");
            continue;
        };
        match event(&message) {
            Some(event) => hears(TimedEvent { event, at: time(&message) }),
            None => match answered.try_send(message) {
                Err(TrySendError::Full(_)) => return Err(Fault::Unasked),
                // Nobody waits once the session is dropped.
                Ok(()) | Err(TrySendError::Disconnected(_)) => {}
            },
        }
    }
}

/// Reads a line. Returns false if QEMU has closed the connection. A line is cut off behind the bound.
fn next_line(lines: &mut BufReader<Stream>, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    line.shrink_to(LINE_BYTES_MAX / 16);
    lines.by_ref().take(LINE_BYTES_MAX as u64 + 1).read_until(b'\n', line)?;
    Ok(!line.is_empty())
}

/// Time of an event by QEMU's clock, which is the host's. An invalid time, or one far from now, counts as now.
fn time(message: &Value) -> Duration {
    let part = |key: &str| message["timestamp"][key].as_u64();
    let told = part("seconds").zip(part("microseconds"));
    let told = told.and_then(|(seconds, microseconds)| {
        Duration::from_secs(seconds).checked_add(Duration::from_micros(microseconds))
    });
    told.filter(|told| told.abs_diff(now()) < TIME_OFF_MAX).unwrap_or_else(now)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;
    use std::sync::mpsc::sync_channel;

    use super::*;

    /// The events and the number of queued answers after QEMU has sent these bytes and closed the connection.
    fn hear(say: impl FnOnce(&mut UnixStream) + Send + 'static) -> (Vec<QmpEvent>, usize) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let speaker = std::thread::spawn(move || say(&mut theirs));
        let (answered, answers) = sync_channel(ANSWERS_MAX);
        let heard = Mutex::new(Vec::new());
        read_all(BufReader::new(ours.into()), &answered, &|said| heard.lock().unwrap().push(said.event));
        speaker.join().unwrap();
        (heard.into_inner().unwrap(), answers.try_iter().count())
    }

    #[track_caller]
    fn check_ended(say: impl FnOnce(&mut UnixStream) + Send + 'static, expect: &str) {
        let (heard, _) = hear(say);
        let last = heard.last().unwrap();
        assert!(matches!(last, QmpEvent::Misbehaves(why) if why.contains(expect)), "{last:?}");
    }

    /// Sends the same bytes until the connection breaks.
    fn endlessly(bytes: &'static [u8]) -> impl FnOnce(&mut UnixStream) + Send {
        move |theirs| while theirs.write_all(bytes).is_ok() {}
    }

    #[test]
    fn endless_lines_and_floods_end_the_session() {
        check_ended(endlessly(&[b'A'; 65536]), "a line of more than");
        check_ended(endlessly(b"{\"event\": \"NEWS\"}\n"), "too much");
        check_ended(endlessly(b"{\"return\": {}, \"id\": 7}\n"), "that was not sent");
        check_ended(endlessly(b"Hello!\n"), "not QMP: Hello!");
        check_ended(endlessly(b"\n"), "not QMP");
        check_ended(endlessly(&[0xff, b'\n']), "not QMP");
        check_ended(endlessly(b"[[[[[[[[[[[[[[[[[[[[[[[[[[\n"), "not QMP");
    }

    #[test]
    fn long_names_are_truncated() {
        let line = format!("{{\"event\": \"{}\"}}\n", "N".repeat(200_000));
        let (heard, _) = hear(move |theirs| theirs.write_all(line.as_bytes()).unwrap());
        assert_eq!(heard, [QmpEvent::Other("N".repeat(100))]);
    }

    #[test]
    fn invalid_time_counts_as_now() {
        let check = |seconds: &str, microseconds: &str| {
            let text = format!(r#"{{"timestamp": {{"seconds": {seconds}, "microseconds": {microseconds}}}}}"#);
            let told = time(&serde_json::from_str(&text).unwrap());
            assert!(now().abs_diff(told) < Duration::from_secs(60), "{text}: {told:?}");
        };
        for odd in ["18446744073709551615", "-1", "1e300", "\"5\"", "null", "253402300800"] {
            check(odd, "0");
            check(odd, "18446744073709551615");
        }
        let told = Duration::new(now().as_secs() - 60, 5000);
        assert_eq!(time(&serde_json::json!({"timestamp": {"seconds": told.as_secs(), "microseconds": 5}})), told);
    }

    /// Random sequences of valid and invalid messages, by seed: each ends, and within bounds.
    #[test]
    fn any_message_sequence_is_read_within_bounds() {
        const SAID: [&[u8]; 12] = [
            b"{\"QMP\": {}}\n",
            b"{\"return\": {}, \"id\": 1}\n",
            b"{\"return\": [[[]]], \"id\": {\"id\": []}}\n",
            b"{\"error\": 5, \"id\": 2}\n",
            b"{\"event\": 5}\n",
            b"{\"event\": \"SHUTDOWN\", \"data\": []}\n",
            b"{\"event\": \"WATCHDOG\", \"data\": {\"action\": {}}}\n",
            b"{\"event\": \"STOP\", \"timestamp\": {\"seconds\": -1, \"microseconds\": 1e99}}\n",
            b"5\n",
            b"null\r\n",
            b"{\"event\": \"\xff\"}\n",
            b"\"half a line",
        ];
        for seed in 1..200_u64 {
            let (heard, kept) = hear(move |theirs| {
                let mut random = seed;
                for _ in 0..400 {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    if theirs.write_all(SAID[(random % 12) as usize]).is_err() {
                        break;
                    }
                }
            });
            assert!(heard.len() <= 401 && kept <= ANSWERS_MAX, "seed {seed}: {} events, {kept} answers", heard.len());
        }
    }
}
