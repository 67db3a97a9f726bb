//! The API's server: HTTP/1.1 on a unix socket.
//!
//! accept -> one thread per connection -> read one request -> answer -> close
//!
//! This uses no server library: the small ones have no timeouts and do not limit heads and threads, and a client that
//! hangs must not harm a keeper. One request per connection keeps that simple: every read and write has a deadline, and
//! the number of connections is bounded (`slots`).

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_api::{ApiError, ErrorWord};

use crate::control::Control;
use crate::event_log::EventLog;
use crate::peer;
use crate::unix_socket::{ListenError, listen};

mod answer;
mod request;
mod slots;
mod stream;
#[cfg(test)]
mod tests;

pub use request::{ReadError, Request};
pub use slots::{CLIENTS_MAX, Slot, Slots};
pub use stream::Stream;

/// Time for a client to send its request, and to read each piece of the answer.
const CLIENT_PATIENCE: Duration = Duration::from_secs(10);
/// Interval of heartbeats, so that a follower can tell a quiet machine from a dead keeper.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// Time within which a disconnected follower is noticed.
const HANGUP_PATIENCE: Duration = Duration::from_secs(1);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The keeper's parts that the server needs to answer requests.
pub struct Context {
    pub control: Control,
    pub events: EventLog,
    /// The resolved configuration of the current guest.
    pub config: Arc<Mutex<serde_json::Value>>,
}

/// The running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    listener: Arc<UnixListener>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    context: Context,
    slots: Arc<Slots>,
    client_patience: Duration,
    heartbeat: Duration,
}

impl Server {
    pub fn start(socket: &Path, context: Context) -> Result<Self, ListenError> {
        Self::start_with(socket, context, CLIENT_PATIENCE, HEARTBEAT)
    }

    fn start_with(
        socket: &Path,
        context: Context,
        client_patience: Duration,
        heartbeat: Duration,
    ) -> Result<Self, ListenError> {
        let listener = Arc::new(listen(socket)?);
        let shared = Arc::new(Shared { context, slots: Arc::default(), client_patience, heartbeat });
        let thread = std::thread::Builder::new()
            .name("api".to_owned())
            .spawn({
                let (shared, listener) = (shared.clone(), listener.clone());
                move || accept_all(&shared, &listener)
            })
            .map_err(|source| ListenError::Unusable { path: socket.to_owned(), source })?;
        Ok(Self { shared, listener, socket: socket.to_owned(), thread: Some(thread) })
    }

    /// Accepts no more clients, and waits up to `patience` until the connected ones have their answers. Followers end
    /// when the event log is closed, so close it first.
    pub fn finish(mut self, patience: Duration) {
        self.stop_accepting();
        // Clients that remain lose their connection when the process ends.
        self.shared.slots.wait_until_free(patience);
    }

    /// Accepts no more clients, and removes the socket.
    pub fn stop_accepting(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // Wakes `accept`; fails only if the socket is not listening.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if thread.join().is_err() {
            tracing::error!("the API thread panicked");
        }
        // It may already have been removed.
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_accepting();
    }
}

fn accept_all(shared: &Arc<Shared>, listener: &UnixListener) {
    loop {
        match listener.accept() {
            Ok((stream, _)) => serve(shared, stream),
            Err(error) if is_final(&error) => return,
            Err(error) => {
                tracing::warn!(%error, "an API client disconnected while connecting");
                // Most likely too many open files; retrying at once would only use up a processor.
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

/// A listener that was shut down returns "invalid argument".
fn is_final(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::InvalidInput
}

fn admit(shared: &Shared, stream: &UnixStream) -> Result<Slot, ApiError> {
    if peer::is_qemu(stream) {
        tracing::warn!("a QEMU connected to the API and was refused");
        let message = "this client is a QEMU, or a program that may gain no privileges and hides what it is";
        return Err(ApiError::new(ErrorWord::Forbidden, message).hint("connect from another program"));
    }
    shared.slots.take().ok_or_else(|| {
        ApiError::new(ErrorWord::TooManyClients, format!("too many clients: {CLIENTS_MAX} are connected"))
            .hint("close some of them, or try again")
    })
}

/// Serves the client in its own thread, or refuses it. The descriptors that a client which is refused may have sent are closed
/// without waiting for them.
fn serve(shared: &Arc<Shared>, mut stream: UnixStream) {
    let slot = match admit(shared, &stream) {
        Ok(slot) => slot,
        Err(error) => {
            // The answer fits into the socket's buffer, and a client that is gone does not need it.
            let _ = answer::refuse(&mut stream, &error);
            return drop(hearth_qemu::Stream::from(stream));
        }
    };
    let shared = shared.clone();
    let spawned = std::thread::Builder::new().name("api-client".to_owned()).spawn(move || {
        if let Err(error) = answer::serve(&shared, &slot, &mut stream) {
            tracing::debug!(%error, "an API client disconnected");
        }
        stream.close();
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "cannot start a thread for an API client");
    }
}
