//! Recall: what a guest said on its console while nobody listened is passed on from its transcript.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hearth_qemu::Transcript;

/// QEMU writes to the transcript right after it has written to the socket.
const WRITE_TIME: Duration = Duration::from_millis(1);
/// A guest that talks all the time is caught between two words.
const JOIN_ATTEMPTS: u32 = 50;

/// One QEMU's transcript, and how much of it is known.
pub struct Recall {
    transcript: Arc<Transcript>,
    /// Bytes of the transcript that were passed on.
    known: usize,
    joined: bool,
}

impl Recall {
    /// Of a QEMU that is reached only now, which may have said something before.
    pub fn new(transcript: Arc<Transcript>) -> Self {
        Self { transcript, known: 0, joined: false }
    }

    /// Of one that has said nothing before it was reached.
    pub fn from_its_first_word(transcript: Arc<Transcript>) -> Self {
        Self { transcript, known: 0, joined: true }
    }

    pub fn is_joined(&self) -> bool {
        self.joined
    }

    /// What was said, and is not known yet.
    pub fn news(&mut self) -> Vec<u8> {
        let said = self.said();
        let news = said.get(self.known..).unwrap_or_default().to_vec();
        self.known = self.known.max(said.len());
        news
    }

    /// The first that came over the socket: all that came before it, and itself. `more` reads what else has come.
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
        // More was said than it holds.
        let mut all = self.news();
        all.append(&mut came);
        all
    }

    /// The next keeper is to know as much as this one, whose guest has said something before it had this transcript.
    pub fn begin_with(&mut self, last_said: &[u8]) {
        told(self.transcript.begin_with(last_said));
        self.known = last_said.len();
    }

    /// It is to begin anew before it is full.
    pub fn needs_room(&self) -> bool {
        told(self.transcript.is_half_full())
    }

    fn said(&self) -> Vec<u8> {
        told(self.transcript.said())
    }
}

/// It is memory: what fails here has no cause that anybody could mend.
fn told<T: Default>(result: io::Result<T>) -> T {
    result.unwrap_or_else(|error| {
        tracing::warn!(%error, "the console's transcript is lost");
        T::default()
    })
}
