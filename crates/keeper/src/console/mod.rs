//! The guest's serial console for any number of people, over the lives of many QEMUs.
//!
//! QEMU's serial socket <-> hub (one thread, `poll`) <-> clients of NAME/console.sock
//!
//! QEMU serves one client of its serial socket and would make the guest wait if that client did not read. The hub is
//! that client: it always reads, keeps the last output for those who come later, and passes it on. What a guest says while
//! no keeper lives the next one finds in QEMU's transcript. Everything is bounded: a client that does not read is dropped,
//! and what is typed while there is no QEMU is forgotten.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_qemu::{Endpoint, Transcript};

use crate::unix_socket::{ListenError, listen};

mod recall;
mod relay;
#[cfg(test)]
mod tests;
mod typed;

/// Output that a new client sees first: some 800 lines, a Linux boot.
const SCROLLBACK_BYTES: usize = 64 << 10;
/// Output that may wait for one client. One that is so far behind does not read at all.
const CLIENT_BYTES_MAX: usize = 256 << 10;
/// Typed bytes that may wait for QEMU; beyond this, clients are not read.
const TYPED_BYTES_MAX: usize = 16 << 10;
/// The thread is at most one round away.
const SETTLE_PATIENCE: Duration = Duration::from_secs(2);
const CLIENTS_MAX: usize = 16;

/// The hub of one machine. Dropping it ends its thread and disconnects everybody.
pub struct Hub {
    orders: Option<Sender<Order>>,
    wake: UnixStream,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

/// What the thread is told.
enum Order {
    /// A QEMU listens here, or soon will.
    Attach(Place),
    /// There is no QEMU.
    Detach,
    /// Another QEMU is going to take over from the one that is there. Answered when it is reached, and all that was typed
    /// has been taken by the old one; what is typed from now on waits.
    Expect(Place, Sender<()>),
    /// It has taken over (answered when it is the one that is read), or has not.
    Settle { taken_over: bool, done: Sender<()> },
}

/// Where a QEMU's serial console is found.
pub struct Place {
    pub qemu: Endpoint,
    /// None: what it says before it is reached is lost.
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

    /// Goes on with the QEMU whose serial console this is; waits for it if it does not listen yet.
    pub fn attach(&self, qemu: Place) {
        self.order(Order::Attach(qemu));
    }

    /// Lets go of QEMU and does not look for it any more. What it had said is passed on first.
    pub fn detach(&self) {
        self.order(Order::Detach);
    }

    /// Reaches the QEMU that is going to take over, and holds back what is typed. Returns when all that was typed before was
    /// taken, or after `patience`: then the other QEMU is given the rest.
    pub fn expect(&self, qemu: Place, patience: Duration) {
        let (ready, answer) = channel();
        self.order(Order::Expect(qemu, ready));
        // A guest that does not read its console.
        let _ = answer.recv_timeout(patience);
    }

    /// Goes on with the QEMU that was expected, or with the one from before. Returns when it is so.
    pub fn settle(&self, taken_over: bool) {
        let (done, answer) = channel();
        self.order(Order::Settle { taken_over, done });
        // Fails only if the thread has ended, which was said.
        let _ = answer.recv_timeout(SETTLE_PATIENCE);
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
        // A full buffer means that enough wake-ups wait already.
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
        // Gone already if somebody cleaned up behind us.
        let _ = std::fs::remove_file(&self.socket);
    }
}
