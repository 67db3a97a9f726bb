//! libvirt, as far as Hearth uses it.
//!
//! - `definition`: the XML of a domain: what Hearth changes in it, and how that is undone.
//! - `identity`: what a domain keeps when it is renamed.
//! - `import`: the XML of a domain as a machine of Hearth's own.
//! - `known`: the settings of an element that are understood; all others are found.
//! - `edit`: XML that is changed piece by piece.
//! - `virsh`: libvirt's command line.

#![warn(missing_docs)]

pub mod definition;
mod edit;
#[cfg(test)]
mod fixture;
pub mod identity;
pub mod import;
mod known;
pub mod virsh;
