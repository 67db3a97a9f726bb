//! `host`: follows libvirt's events for the keepers of attached domains, and does with libvirt what a keeper cannot.
//!
//! - A guest was reset: its keeper is told. Without that, blocks are copied as far as the budget allows, and with it they are moved.
//! - A guest has crashed, and libvirt keeps its QEMU: `recovery`. Without that, it stands still until somebody ends it.
//!
//! What it missed while it did not run it finds at its start, and whenever libvirt's daemon has been started again.

mod pipe;
mod recovery;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_api::DomainReset;
use hearth_libvirt::virsh::{DomainEvent, Virsh, VirshError};

use super::{CliError, Exit};
use crate::attachment::Attachment;
use crate::client::{Client, ClientError};
use crate::runtime_root::RuntimeRoot;
use recovery::Recovery;

/// Pause before virsh is started again. It ends when libvirt's daemon does.
const PAUSE: Duration = Duration::from_secs(1);

/// What the daemon's threads share.
struct Host {
    root: RuntimeRoot,
    /// Domains that a thread is looking after, and whether it is to look again.
    busy: Mutex<HashMap<String, bool>>,
}

/// Runs until it is killed.
pub fn follow(root: &RuntimeRoot) -> Result<Exit, CliError> {
    let host = Arc::new(Host { root: root.clone(), busy: Mutex::default() });
    loop {
        let has_ended = Arc::new(AtomicBool::new(false));
        host.look_at_all_unless(&has_ended);
        match Virsh::system().follow(|domain, event| host.handle(domain, event)) {
            Err(error @ VirshError::Missing) => return Err(error.into()),
            Err(error) => tracing::warn!(%error, "cannot follow libvirt's events; trying again"),
            Ok(()) => tracing::info!("libvirt's events have ended; trying again"),
        }
        has_ended.store(true, Relaxed);
        std::thread::sleep(PAUSE);
    }
}

impl Host {
    fn handle(self: &Arc<Self>, domain: &str, event: DomainEvent) {
        if !Attachment::of(domain).file().exists() {
            return;
        }
        match event {
            DomainEvent::Reset => self.tell_reset(domain),
            DomainEvent::Crashed => self.look_after(domain),
        }
    }

    fn tell_reset(&self, domain: &str) {
        let (client, domain) = (Client::new(self.root.api_socket(domain)), domain.to_owned());
        // The keeper answers when the guest goes on.
        std::thread::spawn(move || match client.send(&DomainReset {}) {
            Ok(_) | Err(ClientError::NotRunning { .. }) => {}
            Err(error) => tracing::warn!(domain, error = crate::chain(&error), "cannot tell the keeper of a reset"),
        });
    }

    /// Looks after all domains, once virsh has had time to follow their events, and if it still does.
    fn look_at_all_unless(self: &Arc<Self>, has_ended: &Arc<AtomicBool>) {
        let (host, has_ended) = (self.clone(), has_ended.clone());
        std::thread::spawn(move || {
            std::thread::sleep(PAUSE);
            if has_ended.load(Relaxed) {
                return;
            }
            for domain in Attachment::names() {
                pipe::let_go(&host.root.machine(&domain));
                host.look_after(&domain);
            }
        });
    }

    /// Brings the domain back if its guest has crashed. On a thread of its own, because any step may take long.
    fn look_after(self: &Arc<Self>, domain: &str) {
        let mut busy = self.busy();
        if let Some(again) = busy.get_mut(domain) {
            *again = true;
            return;
        }
        busy.insert(domain.to_owned(), false);
        drop(busy);
        let (host, domain) = (self.clone(), domain.to_owned());
        std::thread::spawn(move || {
            loop {
                if let Err(error) = Recovery::of(&host.root, &domain).run() {
                    tracing::warn!(domain, error = crate::chain(&error), "cannot bring the domain back");
                }
                if !host.is_needed_again(&domain) {
                    return;
                }
            }
        });
    }

    /// Whether a domain's guest has crashed once more since its thread has begun. If not, the thread ends.
    fn is_needed_again(&self, domain: &str) -> bool {
        let mut busy = self.busy();
        let again = busy.get_mut(domain).is_some_and(std::mem::take);
        if !again {
            busy.remove(domain);
        }
        again
    }

    fn busy(&self) -> MutexGuard<'_, HashMap<String, bool>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
