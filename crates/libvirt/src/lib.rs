//! libvirt, as far as Hearth uses it.
//!
//! - `definition`: the XML of a domain: what Hearth changes in it, and how that is undone.
//! - `import`: the XML of a domain as a machine of Hearth's own.
//! - `edit`: XML that is changed piece by piece.
//! - `virsh`: libvirt's command line.

#![warn(missing_docs)]

pub mod definition;
mod edit;
pub mod import;
pub mod virsh;
