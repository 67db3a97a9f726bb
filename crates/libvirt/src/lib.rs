//! libvirt, as far as Hearth uses it.
//!
//! - `definition`: the XML of a domain: what Hearth changes in it, and how that is undone.
//! - `edit`: XML that is changed piece by piece.
//! - `virsh`: libvirt's command line.

#![warn(missing_docs)]

pub mod definition;
mod edit;
pub mod virsh;
