//! The connection to a guest's serial console: a thread that reads it into a transcript, and a way to write to it.
//!
//! There are two ways to connect. For a plain machine, QEMU connects to a listening socket. For a machine under Hearth, the
//! thread connects to the keeper's console socket, and again whenever the connection is lost (a keeper dies and another takes
//! over).

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::transcript::Transcript;
use crate::wait::Watched;

/// Pause between two attempts to connect. Nothing announces a new socket, so the thread polls.
const REDIAL: Duration = Duration::from_millis(20);

/// How to connect to the console.
pub enum Line {
    Listen(UnixListener),
    Call(PathBuf),
}

/// State that the listening thread and the test share.
#[derive(Default)]
struct Shared {
    transcript: Watched<Transcript>,
    stream: Watched<Option<UnixStream>>,
    over: AtomicBool,
}

pub struct Console {
    shared: Arc<Shared>,
    listener: Option<JoinHandle<()>>,
}

impl Console {
    pub fn open(name: &str, line: Line) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let ours = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(format!("console-{name}"));
        let listener = thread.spawn(move || listen(&ours, line))?;
        Ok(Self { shared, listener: Some(listener) })
    }

    pub fn transcript(&self) -> &Watched<Transcript> {
        &self.shared.transcript
    }

    /// Writes to the console, waiting at most `limit` for a connection.
    pub fn write(&self, bytes: &[u8], limit: Duration) -> io::Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let stream = self.shared.stream.wait(left, |stream| stream.as_ref().map(UnixStream::try_clone));
            match stream.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))?.write_all(bytes) {
                // The other side has just ended, and the listening thread has not noticed yet.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::thread::sleep(REDIAL),
                written => return written,
            }
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some(stream) = self.shared.stream.lock().as_ref() {
            // Fails only if the other side is gone already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        if let Some(listener) = self.listener.take() {
            // A panic of that thread was printed when it happened.
            let _ = listener.join();
        }
    }
}

fn listen(shared: &Shared, line: Line) {
    while let Some(mut stream) = connect(shared, &line) {
        let Ok(writer) = stream.try_clone() else { continue };
        shared.stream.change(|stream| *stream = Some(writer));
        let mut buffer = [0; 16 << 10];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            shared.transcript.change(|transcript| transcript.push(&buffer[..length]));
        }
        shared.stream.change(|stream| *stream = None);
        shared.transcript.change(Transcript::interrupted);
    }
}

/// The next connection, or `None` when the console was dropped.
fn connect(shared: &Shared, line: &Line) -> Option<UnixStream> {
    if let Line::Listen(listener) = line {
        // It must not block for ever: a machine may end before it connects, and the caller's own wait notices that.
        listener.set_nonblocking(true).ok()?;
    }
    while !shared.over.load(Ordering::Acquire) {
        let stream = match line {
            Line::Listen(listener) => listener.accept().map(|(stream, _)| stream),
            Line::Call(path) => UnixStream::connect(path),
        };
        if let Ok(stream) = stream.and_then(|stream| stream.set_nonblocking(false).map(|()| stream)) {
            return Some(stream);
        }
        std::thread::sleep(REDIAL);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::patience;

    #[test]
    fn lost_connection_is_reopened_without_duplicates() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("console.sock");
        let console = Console::open("test", Line::Call(path.clone())).unwrap();
        let ready = b"HEARTH-GUEST-READY nonce=00000000000000000000000000000001 boot=1\n";
        for _ in 0..2 {
            let server = UnixListener::bind(&path).unwrap();
            let (mut guest, _) = server.accept().unwrap();
            guest.write_all(ready).unwrap();
            guest.write_all(b"<<<BEGIN 1\nYQ==\n").unwrap();
            drop((guest, server));
            std::fs::remove_file(&path).unwrap();
        }
        let server = UnixListener::bind(&path).unwrap();
        let (mut guest, _) = server.accept().unwrap();
        guest.write_all(b"<<<BEGIN 2\nYg==\n>>>END 2 0\n").unwrap();
        let answer = console.transcript().wait(patience(1), |transcript| transcript.take_answer(2));
        assert_eq!(answer.unwrap().output, b"b");
        assert_eq!(console.transcript().lock().ready().len(), 1);
    }

    #[test]
    fn written_bytes_reach_the_guest() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("serial.sock");
        let console = Console::open("test", Line::Listen(UnixListener::bind(&path).unwrap())).unwrap();
        let mut guest = UnixStream::connect(&path).unwrap();
        console.write(b"1 bHM=\n", patience(1)).unwrap();
        let mut line = [0; 7];
        guest.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"1 bHM=\n");
    }
}
