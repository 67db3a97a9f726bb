//! The guest's serial console for any number of clients, across many QEMUs.
//!
//! QEMU's serial socket <-> hub (one thread, `poll`) <-> clients of NAME/console.sock
//!
//! QEMU serves one client of its serial socket, and the guest would wait if that client did not read. The hub is that
//! client: it always reads, keeps recent output for later clients, and passes output on. Output from a time without a
//! keeper is in QEMU's transcript. Everything is bounded: a client that does not read is dropped, and input without a
//! QEMU is discarded.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_qemu::{Endpoint, Transcript};

use crate::unix_socket::{ListenError, listen};

mod relay;
#[cfg(test)]
mod tests;
mod transcript_reader;
mod typed;

/// Output that a new client sees first: some 800 lines, a Linux boot.
const SCROLLBACK_BYTES: usize = 64 << 10;
/// Maximum output that waits for one client. A client that is further behind does not read at all.
const CLIENT_BYTES_MAX: usize = 256 << 10;
/// Maximum input that waits for QEMU; beyond this, clients are not read.
const TYPED_BYTES_MAX: usize = 16 << 10;
/// The thread needs at most one round to respond.
const SWITCH_PATIENCE: Duration = Duration::from_secs(2);
const CLIENTS_MAX: usize = 16;

/// The hub of one machine. Dropping it ends its thread and disconnects all clients.
pub struct Hub {
    orders: Option<Sender<Order>>,
    wake: UnixStream,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

/// Requests to the thread.
enum Order {
    /// A QEMU listens here, or soon will.
    Attach(Place),
    /// There is no QEMU.
    Detach,
    /// Another QEMU is about to take over. Answered when it is connected and the old QEMU has taken all earlier input;
    /// later input waits.
    Expect(Place, Sender<()>),
    /// The other QEMU has taken over (answered once its output is read), or has not.
    EndSwitch { taken_over: bool, done: Sender<()> },
}

/// Address of a QEMU's serial console.
pub struct Place {
    /// The socket of the console.
    pub qemu: Endpoint,
    /// QEMU's copy of the output. None: output from before the connection is lost.
    pub transcript: Option<Arc<Transcript>>,
}

impl Hub {
    /// Serves clients at `socket` (0600) from now on, with or without a QEMU.
    pub fn start(socket: &Path) -> Result<Self, ListenError> {
        let listener = listen(socket)?;
        Self::spawn(listener, socket).map_err(|source| ListenError::Unusable { path: socket.to_owned(), source })
    }

    fn spawn(listener: UnixListener, socket: &Path) -> io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        let (orders, received) = channel();
        listener.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        wake.set_nonblocking(true)?;
        let relay = relay::Relay::new(listener, woken, received);
        let thread = std::thread::Builder::new().name("console".to_owned()).spawn(move || relay.run())?;
        Ok(Self { orders: Some(orders), wake, socket: socket.to_owned(), thread: Some(thread) })
    }

    /// Connects to this QEMU; waits if it does not listen yet.
    pub fn attach(&self, qemu: Place) {
        self.order(Order::Attach(qemu));
    }

    /// Disconnects from QEMU, after passing on its last output.
    pub fn detach(&self) {
        self.order(Order::Detach);
    }

    /// Connects to the QEMU that is about to take over, and holds back new input. Returns when the old QEMU has taken
    /// all earlier input, or after `patience`; then the other QEMU gets the rest.
    pub fn expect(&self, qemu: Place, patience: Duration) {
        let (ready, answer) = channel();
        self.order(Order::Expect(qemu, ready));
        // A guest that does not read its console is not waited for.
        let _ = answer.recv_timeout(patience);
    }

    /// Continues with the expected QEMU or with the old one. Returns when that is done.
    pub(crate) fn end_switch(&self, taken_over: bool) {
        let (done, answer) = channel();
        self.order(Order::EndSwitch { taken_over, done });
        // Fails only if the thread has ended, which it reports itself.
        let _ = answer.recv_timeout(SWITCH_PATIENCE);
    }

    fn order(&self, order: Order) {
        if let Some(orders) = &self.orders
            && orders.send(order).is_err()
        {
            tracing::error!("the console's thread has ended");
        }
        self.wake();
    }

    fn wake(&self) {
        // A full buffer already holds enough wake-ups.
        let _ = io::Write::write(&mut &self.wake, &[0]);
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.orders = None;
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the console's thread panicked");
        }
        // It may already have been removed.
        let _ = std::fs::remove_file(&self.socket);
    }
}
