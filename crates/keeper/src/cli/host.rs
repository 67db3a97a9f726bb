//! `host`: follows libvirt's events, and tells the keepers of attached domains what they cannot see: that a guest was reset.
//!
//! Nothing depends on it: without it a reset guest's blocks are copied as far as the budget allows, and with it they are moved.

use std::time::Duration;

use hearth_api::DomainReset;
use hearth_libvirt::virsh::{Virsh, VirshError};

use super::{CliError, Exit};
use crate::attachment::Attachment;
use crate::client::{Client, ClientError};
use crate::runtime_root::RuntimeRoot;

/// Pause before virsh is started again. It ends when libvirt's daemon does.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs until it is killed.
pub fn follow(root: &RuntimeRoot) -> Result<Exit, CliError> {
    loop {
        match Virsh::system().follow_resets(|domain| tell(root, domain)) {
            Err(error @ VirshError::Missing) => return Err(error.into()),
            Err(error) => tracing::warn!(%error, "cannot follow libvirt's events; trying again"),
            Ok(()) => tracing::info!("libvirt's events have ended; trying again"),
        }
        std::thread::sleep(PAUSE);
    }
}

fn tell(root: &RuntimeRoot, domain: &str) {
    if !Attachment::of(domain).file().exists() {
        return;
    }
    let (client, domain) = (Client::new(root.api_socket(domain)), domain.to_owned());
    // The keeper answers when the guest goes on.
    std::thread::spawn(move || match client.send(&DomainReset {}) {
        Ok(_) | Err(ClientError::NotRunning { .. }) => {}
        Err(error) => tracing::warn!(domain, error = crate::chain(&error), "cannot tell the keeper of a reset"),
    });
}
