//! Slots for a server's clients. Some are reserved for clients that do not follow events, so that requests always get through.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Maximum number of clients.
pub const CLIENTS_MAX: usize = 32;
/// Maximum number of clients that follow events.
pub const FOLLOWERS_MAX: usize = 24;

#[derive(Default)]
pub struct Slots {
    clients: Mutex<Clients>,
    fewer: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Clients {
    all: usize,
    followers: usize,
}

/// A client's slot, until it is dropped.
pub struct Slot {
    slots: Arc<Slots>,
    follows: Cell<bool>,
}

impl Slots {
    /// None if all slots are taken.
    pub fn take(self: &Arc<Self>) -> Option<Slot> {
        let mut clients = self.clients();
        if clients.all == CLIENTS_MAX {
            return None;
        }
        clients.all += 1;
        Some(Slot { slots: self.clone(), follows: Cell::new(false) })
    }

    /// Waits until all clients are gone, at most this long.
    pub fn wait_until_free(&self, patience: Duration) {
        let waited = self.fewer.wait_timeout_while(self.clients(), patience, |clients| clients.all > 0);
        let _ = waited.expect("holders of this lock do not panic");
    }

    #[cfg(test)]
    pub fn taken(&self) -> usize {
        self.clients().all
    }

    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().expect("holders of this lock do not panic")
    }
}

impl Slot {
    /// Counts this client as a follower. False if there are too many.
    pub fn follow(&self) -> bool {
        let mut clients = self.slots.clients();
        let has_space = clients.followers < FOLLOWERS_MAX;
        clients.followers += usize::from(has_space);
        self.follows.set(has_space);
        has_space
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut clients = self.slots.clients();
        clients.all -= 1;
        clients.followers -= usize::from(self.follows.get());
        self.slots.fewer.notify_all();
    }
}
