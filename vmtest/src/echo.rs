//! A TCP connection into the guest that sends one word after another and expects each back, so that the longest silence is known.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::guest::Drives;
use crate::wait::patience;

/// The guest's port that echoes.
pub const PORT: u16 = 7;
/// Pause between an answer and the next word.
const EVERY: Duration = Duration::from_millis(2);

/// Starts an echo server in the guest, on `PORT`.
pub fn serve(vm: &impl Drives) -> Result<()> {
    vm.sh(&format!("nc -ll -p {PORT} -e cat </dev/null >/dev/null 2>&1 &"))?;
    vm.sh(&format!("while ! netstat -ltn | grep -q ':{PORT} '; do usleep 20000; done")).map(drop)
}

/// A connection that is made again whenever it is lost.
pub struct Echo {
    told: Arc<Mutex<Told>>,
    speaker: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Told {
    answers: Vec<Instant>,
    lost: Vec<String>,
    over: bool,
}

impl Echo {
    /// Connects, and returns when the first word has come back.
    pub fn begin(address: SocketAddr) -> Self {
        let told = Arc::new(Mutex::new(Told::default()));
        let tells = Arc::clone(&told);
        let speaker = std::thread::spawn(move || {
            while !lock(&tells).over {
                if let Err(error) = talk(address, &tells) {
                    lock(&tells).lost.push(error.to_string());
                    std::thread::sleep(EVERY);
                }
            }
        });
        let echo = Self { told, speaker: Some(speaker) };
        echo.goes_on();
        echo
    }

    /// Waits until a word comes back after this call.
    pub fn goes_on(&self) {
        self.wait_after(Instant::now());
    }

    /// The reason of each lost connection.
    pub fn lost(&self) -> Vec<String> {
        lock(&self.told).lost.clone()
    }

    /// The longest time between two answers that overlaps the time from `from` to `to`.
    pub fn longest(&self, from: Instant, to: Instant) -> Duration {
        self.wait_after(to);
        let told = lock(&self.told);
        let touching = told.answers.windows(2).filter(|pair| pair[1] >= from && pair[0] <= to);
        touching.map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
    }

    fn wait_after(&self, moment: Instant) {
        let deadline = Instant::now() + patience(20);
        while lock(&self.told).answers.last().is_none_or(|&last| last <= moment) {
            assert!(Instant::now() < deadline, "no word comes back; lost connections: {:?}", self.lost());
            std::thread::sleep(EVERY);
        }
    }
}

fn talk(address: SocketAddr, tells: &Mutex<Told>) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(patience(20)))?;
    for word in 0u64.. {
        if lock(tells).over {
            break;
        }
        stream.write_all(&word.to_be_bytes())?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        if u64::from_be_bytes(answer) != word {
            return Err(io::Error::other(format!("{word} came back as {answer:?}")));
        }
        lock(tells).answers.push(Instant::now());
        std::thread::sleep(EVERY);
    }
    Ok(())
}

fn lock(told: &Mutex<Told>) -> MutexGuard<'_, Told> {
    told.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Echo {
    fn drop(&mut self) {
        lock(&self.told).over = true;
        if let Some(speaker) = self.speaker.take() {
            // It does not panic, and ends within the time limit of its last word.
            let _ = speaker.join();
        }
    }
}
