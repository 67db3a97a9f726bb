//! Checks that disk images exist, have the right format and are not in use.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use hearth_disk::image::{Format, Image, ImageError, ImageOptions};

use super::{Life, Purpose};
use crate::config::{Config, DiskConfig};
use crate::folders::lock_owner;
use crate::machine::{LOCK_PATIENCE, image_options};
use crate::problem::Problem;

pub fn check(config: &Config, life: Life, purpose: Purpose, problems: &mut Vec<Problem>) {
    shared_images(config, problems);
    // A living keeper keeps its images, so a second keeper is refused at once.
    let waits = purpose == Purpose::Run && life != Life::Kept;
    let lock_patience = if waits { LOCK_PATIENCE } else { Duration::ZERO };
    let owner = lock_owner(&config.folders.runtime).map(|owner| owner.with_living_qemu(life == Life::Orphaned));
    for disk in &config.devices.disks {
        let options = ImageOptions { lock_patience, owner, ..image_options(disk) };
        let mut opened = Image::open(&options).map(drop);
        // A qcow2 image whose format was forgotten is noticed, but not after a guest has used it and may have written what looks like
        // one.
        if opened.is_ok() && !disk.is_format_named && life != Life::Orphaned {
            opened = Image::open(&ImageOptions { format: Format::Auto, ..options }).map(drop);
        }
        match opened {
            Ok(()) => {}
            Err(ImageError::InUse { .. }) if life == Life::Kept => {}
            Err(error) => problems.push(problem(disk, &error)),
        }
    }
}

fn problem(disk: &DiskConfig, error: &ImageError) -> Problem {
    let hint = match error {
        ImageError::Missing { .. } => "correct its path, or make the image with qemu-img create",
        ImageError::InUse { .. } => "stop the program that uses it, or set read_only = true on both sides",
        // The other errors include a hint.
        _ => "",
    };
    let make = match error {
        ImageError::WrongKind { .. } | ImageError::FormatNotNamed { .. } | ImageError::NotQcow2 { .. } => {
            Problem::error
        }
        ImageError::InUse { .. } => Problem::for_now,
        _ => Problem::missing,
    };
    make(format!("disk {}", disk.name), crate::chain(error), hint.to_owned())
}

/// Two disks on one image destroy each other's file systems. Images are compared by identity, because paths may differ.
fn shared_images(config: &Config, problems: &mut Vec<Problem>) {
    let mut owners = HashMap::new();
    for disk in &config.devices.disks {
        // Another check reports a missing image.
        let Ok(metadata) = fs::metadata(&disk.path) else { continue };
        let Some(other) = owners.insert((metadata.dev(), metadata.ino()), disk) else { continue };
        if !(disk.read_only && other.read_only) {
            let message = format!("uses the same image as disk {}", other.name);
            problems.push(Problem::error(format!("disk {}", disk.name), message, "give each disk an image of its own"));
        }
    }
}
