//! Transcript reader: passes on console output from a time without a reader, taken from the transcript.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hearth_qemu::Transcript;

/// QEMU writes to the transcript right after the socket.
const WRITE_TIME: Duration = Duration::from_millis(1);
/// Attempts to join both streams of a guest that prints all the time.
const JOIN_ATTEMPTS: u32 = 50;

/// One QEMU's transcript, and how much of it was passed on.
pub struct TranscriptReader {
    transcript: Arc<Transcript>,
    /// Bytes of the transcript that were passed on.
    known: usize,
    joined: bool,
}

impl TranscriptReader {
    /// For a QEMU that is connected only now and may have printed something before.
    pub fn new(transcript: Arc<Transcript>) -> Self {
        Self { transcript, known: 0, joined: false }
    }

    /// For a QEMU that printed nothing before it was connected.
    pub fn from_start(transcript: Arc<Transcript>) -> Self {
        Self { transcript, known: 0, joined: true }
    }

    pub fn is_joined(&self) -> bool {
        self.joined
    }

    /// Output that was not passed on yet.
    pub fn news(&mut self) -> Vec<u8> {
        let said = self.said();
        let news = said.get(self.known..).unwrap_or_default().to_vec();
        self.known = self.known.max(said.len());
        news
    }

    /// Joins the first output from the socket with all earlier output. `more` reads what else has arrived.
    pub fn join(&mut self, mut came: Vec<u8>, mut more: impl FnMut(&mut Vec<u8>)) -> Vec<u8> {
        self.joined = true;
        for _ in 0..JOIN_ATTEMPTS {
            more(&mut came);
            let said = self.said();
            if said.ends_with(&came) && said.len() >= self.known {
                return said[self.known..].to_vec();
            }
            std::thread::sleep(WRITE_TIME);
        }
        // More was printed than the transcript holds.
        let mut all = self.news();
        all.append(&mut came);
        all
    }

    /// Starts the transcript with output from before it, so that the next keeper knows as much as this one.
    pub fn begin_with(&mut self, last_said: &[u8]) {
        told(self.transcript.begin_with(last_said));
        self.known = last_said.len();
    }

    /// Whether the transcript must start anew before it is full.
    pub fn needs_room(&self) -> bool {
        told(self.transcript.is_half_full())
    }

    fn said(&self) -> Vec<u8> {
        told(self.transcript.said())
    }
}

/// The transcript is memory, so an error here has no cause that anyone could fix.
fn told<T: Default>(result: io::Result<T>) -> T {
    result.unwrap_or_else(|error| {
        tracing::warn!(%error, "the console's transcript is lost");
        T::default()
    })
}
