//! Reads what QEMU says on QMP, within bounds.
//!
//! line -> too long, or too much of late? -> JSON? -> an answer, kept for whoever asked | an event, told
//!
//! A stock QEMU stays far below all of these bounds: it limits the rate of the events that a guest can cause, and answers only
//! what it was asked.

use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{QmpEvent, Said, event, now};

/// The longest answer to anything that is asked here has some 50 KiB.
const LINE_BYTES_MAX: usize = 256 << 10;
/// Answers that nobody has taken: those to commands that were no longer waited for. Parsed, one takes up to 16 times as much
/// memory as its line (`[0,0,...]`), so that these take 64 MiB at most.
pub(super) const ANSWERS_MAX: usize = 16;
const _: () = assert!(ANSWERS_MAX * LINE_BYTES_MAX * 16 <= 64 << 20);
/// What may come at once, and what may come in each second after that.
const MESSAGES: Allowance = Allowance { at_once: 10_000, per_second: 1000 };
const BYTES: Allowance = Allowance { at_once: 8 << 20, per_second: 1 << 20 };
/// An event that is older has waited for a reader that long, or has another date than the host.
const TIME_OFF_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// Lines that are not JSON, in all.
const NONSENSE_MAX: u32 = 8;
/// Of such a line, in the log.
const QUOTED_CHARS: usize = 200;

#[derive(Clone, Copy)]
struct Allowance {
    at_once: u64,
    per_second: u64,
}

/// What is left of an allowance, in millionths.
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

    /// False: more than is allowed.
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

/// Why a QEMU is no longer listened to.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("its QMP says a line of more than {LINE_BYTES_MAX} bytes")]
    Line,
    #[error("its QMP says too much: more than {} messages or {} bytes a second", MESSAGES.per_second, BYTES.per_second)]
    Flood,
    #[error("its QMP answers what it was not asked")]
    Unasked,
    #[error("its QMP says what is not QMP: {0}")]
    Nonsense(String),
}

/// Until QEMU hangs up, or passes a bound, which is told.
pub(super) fn read_all(mut lines: BufReader<UnixStream>, answered: &SyncSender<Value>, hears: &dyn Fn(Said)) {
    let Err(fault) = read_within_bounds(&mut lines, answered, hears) else { return };
    // It may wait until all of its words are taken, and hears now that they are not.
    let _ = lines.get_ref().shutdown(std::net::Shutdown::Both);
    hears(Said { event: QmpEvent::Misbehaves(fault.to_string()), at: now() });
}

fn read_within_bounds(
    lines: &mut BufReader<UnixStream>,
    answered: &SyncSender<Value>,
    hears: &dyn Fn(Said),
) -> Result<(), Fault> {
    let begun = Instant::now();
    let (mut messages, mut bytes) = (Budget::new(MESSAGES, begun), Budget::new(BYTES, begun));
    let (mut line, mut nonsense) = (Vec::new(), 0);
    while let Ok(true) = next_line(lines, &mut line) {
        if line.len() > LINE_BYTES_MAX {
            return Err(Fault::Line);
        }
        let now = Instant::now();
        if !messages.spend(1, now) || !bytes.spend(line.len() as u64, now) {
            return Err(Fault::Flood);
        }
        let Ok(message) = serde_json::from_slice::<Value>(&line) else {
            let said: String = String::from_utf8_lossy(&line).chars().take(QUOTED_CHARS).collect();
            nonsense += 1;
            if nonsense > NONSENSE_MAX {
                return Err(Fault::Nonsense(said.trim_end().to_owned()));
            }
            tracing::warn!(line = said.trim_end(), "QEMU said what is not QMP");
            continue;
        };
        match event(&message) {
            Some(event) => hears(Said { event, at: time(&message) }),
            None => match answered.try_send(message) {
                Err(TrySendError::Full(_)) => return Err(Fault::Unasked),
                // Nobody waits once the session is dropped.
                Ok(()) | Err(TrySendError::Disconnected(_)) => {}
            },
        }
    }
    Ok(())
}

/// False: it has hung up. A line that is too long is cut off behind the bound.
fn next_line(lines: &mut BufReader<UnixStream>, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    line.shrink_to(LINE_BYTES_MAX / 16);
    lines.by_ref().take(LINE_BYTES_MAX as u64 + 1).read_until(b'\n', line)?;
    Ok(!line.is_empty())
}

/// When an event was, by QEMU's own clock, which is the host's. A time that is none, or far from now, is now.
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
    use std::sync::Mutex;
    use std::sync::mpsc::sync_channel;

    use super::*;

    /// What is heard of a QEMU that says this and then nothing: events, and how many answers are kept.
    fn hear(say: impl FnOnce(&mut UnixStream) + Send + 'static) -> (Vec<QmpEvent>, usize) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let speaker = std::thread::spawn(move || say(&mut theirs));
        let (answered, answers) = sync_channel(ANSWERS_MAX);
        let heard = Mutex::new(Vec::new());
        read_all(BufReader::new(ours), &answered, &|said| heard.lock().unwrap().push(said.event));
        speaker.join().unwrap();
        (heard.into_inner().unwrap(), answers.try_iter().count())
    }

    #[track_caller]
    fn check_ended(say: impl FnOnce(&mut UnixStream) + Send + 'static, expect: &str) {
        let (heard, _) = hear(say);
        let last = heard.last().unwrap();
        assert!(matches!(last, QmpEvent::Misbehaves(why) if why.contains(expect)), "{last:?}");
    }

    /// As much as is taken.
    fn endlessly(bytes: &'static [u8]) -> impl FnOnce(&mut UnixStream) + Send {
        move |theirs| while theirs.write_all(bytes).is_ok() {}
    }

    #[test]
    fn endless_lines_and_floods_end_the_session() {
        check_ended(endlessly(&[b'A'; 65536]), "a line of more than");
        check_ended(endlessly(b"{\"event\": \"NEWS\"}\n"), "too much");
        check_ended(endlessly(b"{\"return\": {}, \"id\": 7}\n"), "was not asked");
        check_ended(endlessly(b"Hello!\n"), "not QMP: Hello!");
        check_ended(endlessly(b"\n"), "not QMP");
        check_ended(endlessly(&[0xff, b'\n']), "not QMP");
        check_ended(endlessly(b"[[[[[[[[[[[[[[[[[[[[[[[[[[\n"), "not QMP");
    }

    #[test]
    fn words_are_kept_to_their_length() {
        let line = format!("{{\"event\": \"{}\"}}\n", "N".repeat(200_000));
        let (heard, _) = hear(move |theirs| theirs.write_all(line.as_bytes()).unwrap());
        assert_eq!(heard, [QmpEvent::Other("N".repeat(100))]);
    }

    #[test]
    fn a_time_that_is_none_is_now() {
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

    /// Sequences of what a QEMU may say and of what it must not, by a seed: each ends, and within bounds.
    #[test]
    fn any_sequence_of_messages_is_heard_within_bounds() {
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
