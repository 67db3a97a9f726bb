//! Peers: the QEMUs at one disk. Usually one; during a hand-over two, of which one serves the guest.
//!
//! ```text
//! old serves --> new connects, negotiates, waits --> old stops its queues (drained) --> new starts its: they change places
//!                                                                                  \-> old starts them again: nothing happened
//! ```
//!
//! The QEMU that starts queues serves the guest. A QEMU in waiting may do so only while the other has no queues and no request
//! is in flight: two QEMUs would otherwise answer one guest. A QEMU that tries is cut off.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::connection::Connection;

pub struct Peers {
    serving: Option<Connection>,
    waiting: Option<Connection>,
    /// A second one may connect.
    pub handover: bool,
    /// The guest has switched its write cache off. This is the guest's state: its QEMUs do not tell it to each other.
    write_through: Arc<AtomicBool>,
}

impl Peers {
    /// `write_through`: whether the guest has switched its write cache off, from now on kept current here.
    pub fn new(write_through: Arc<AtomicBool>) -> Self {
        Self { serving: None, waiting: None, handover: false, write_through }
    }

    pub fn serving(&mut self) -> Option<&mut Connection> {
        self.serving.as_mut()
    }

    pub fn is_empty(&self) -> bool {
        self.serving.is_none()
    }

    pub fn has_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Whether one more may connect. The first may only when nothing of an earlier one is in flight to the image.
    pub fn has_room(&self, idle: bool) -> bool {
        match self.serving {
            None => idle,
            Some(_) => self.handover && self.waiting.is_none(),
        }
    }

    pub fn get(&mut self, id: u32) -> Option<&mut Connection> {
        self.iter_mut().find(|connection| connection.id == id)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.serving.iter_mut().chain(self.waiting.iter_mut())
    }

    /// Whether this one may start queues now. `idle`: no request is in flight.
    pub fn may_start(&self, id: u32, idle: bool) -> bool {
        match &self.serving {
            Some(serving) if serving.id != id => idle && !serving.is_started(),
            _ => true,
        }
    }

    /// A QEMU has connected.
    pub fn add(&mut self, mut connection: Connection) {
        connection.write_through = Arc::clone(&self.write_through);
        match self.serving {
            None => self.serving = Some(connection),
            Some(_) => self.waiting = Some(connection),
        }
    }

    /// After a message: one that has started queues serves.
    pub fn settle(&mut self) {
        if self.waiting.as_ref().is_some_and(Connection::is_started) {
            std::mem::swap(&mut self.serving, &mut self.waiting);
        }
    }

    /// A QEMU is gone; the other one, if there is one, goes on alone.
    pub fn remove(&mut self, id: u32) -> Option<Connection> {
        if self.waiting.as_ref().is_some_and(|waiting| waiting.id == id) {
            return self.waiting.take();
        }
        let gone = self.serving.take_if(|serving| serving.id == id);
        if gone.is_some() {
            self.serving = self.waiting.take();
        }
        gone
    }

    /// The one in waiting.
    pub fn waiting_id(&self) -> Option<u32> {
        self.waiting.as_ref().map(|waiting| waiting.id)
    }

    pub fn ids(&self) -> Vec<u32> {
        self.serving.iter().chain(&self.waiting).map(|connection| connection.id).collect()
    }
}
