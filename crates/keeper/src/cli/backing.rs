//! Backing: whether an image has the backing images that libvirt's definition names. QEMU under libvirt uses those of the
//! definition. Hearth uses those that the images themselves name.

use std::fs;
use std::path::Path;

use hearth_disk::image::{self, backing_images};
use hearth_libvirt::definition::{Disk, Format};

const REMEDY: &str = "correct <backingStore> in the definition, or remove it";

/// Why the images are not those of the definition.
pub fn check(disk: &Disk) -> Result<(), String> {
    let (named, ends) = (&disk.backing.images, disk.backing.ends);
    if named.is_empty() && !ends {
        return Ok(());
    }
    let own = match disk.format {
        Format::Raw => Vec::new(),
        Format::Qcow2 => backing_images(&disk.path).map_err(|error| {
            format!("the definition names its backing images, and they cannot be checked: {}", crate::chain(&error))
        })?,
    };
    let mut above = &disk.path;
    for (number, (path, format)) in named.iter().enumerate() {
        let names = match own.get(number) {
            None => "names none".to_owned(),
            Some((own, _)) if !is_same_file(own, path) => format!("names {}", own.display()),
            Some((_, own)) if format.is_some_and(|format| is_other(format, *own)) => "names another format".to_owned(),
            Some(_) => {
                above = path;
                continue;
            }
        };
        let (path, above) = (path.display(), above.display());
        return Err(format!("the definition names the backing image {path}, but {above} {names}; {REMEDY}"));
    }
    match own.get(named.len()).filter(|_| ends) {
        None => Ok(()),
        Some((own, _)) => {
            let (above, own) = (above.display(), own.display());
            Err(format!("the definition says that {above} has no backing image, but it names {own}; {REMEDY}"))
        }
    }
}

fn is_other(format: Format, own: image::Format) -> bool {
    let same = match format {
        Format::Raw => image::Format::Raw,
        Format::Qcow2 => image::Format::Qcow2,
    };
    own != same
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    matches!((fs::canonicalize(one), fs::canonicalize(other)), (Ok(one), Ok(other)) if one == other)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use hearth_libvirt::definition::Backing;

    use super::*;

    #[test]
    fn images_must_be_those_of_the_definition() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("base"), [0; 65536]).unwrap();
        fs::write(at("other"), [0; 65536]).unwrap();
        for (over, format, name) in [("base", "raw", "middle"), ("middle", "qcow2", "top")] {
            let create = ["create", "-q", "-f", "qcow2", "-F", format, "-b", over, name];
            assert!(Command::new("qemu-img").args(create).current_dir(folder.path()).status().unwrap().success());
        }
        std::os::unix::fs::symlink(at("base"), at("link")).unwrap();
        let disk = |name: &str, format, backing| Disk {
            name: "vda".to_owned(),
            path: at(name),
            format,
            read_only: false,
            direct: true,
            serial: String::new(),
            queues: 1,
            mib_per_second: None,
            iops: None,
            backing,
        };
        let of = |names: &[(&str, Option<Format>)], ends| Backing {
            images: names.iter().map(|(name, format)| (at(name), *format)).collect(),
            ends,
        };
        let check_of = |name: &str, backing| match name {
            "base" => check(&disk(name, Format::Raw, backing)),
            _ => check(&disk(name, Format::Qcow2, backing)),
        };
        let (raw, qcow2) = (Some(Format::Raw), Some(Format::Qcow2));
        for (name, backing) in [
            ("missing", of(&[], false)),
            ("top", of(&[("middle", qcow2)], false)),
            ("top", of(&[("middle", None), ("link", raw)], true)),
            ("middle", of(&[("base", raw)], true)),
            ("base", of(&[], true)),
        ] {
            assert_eq!(check_of(name, backing), Ok(()), "{name}");
        }
        for (name, backing, why) in [
            ("top", of(&[], true), "says that DIR/top has no backing image, but it names DIR/middle"),
            ("top", of(&[("middle", qcow2)], true), "says that DIR/middle has no backing image, but it names DIR/base"),
            ("top", of(&[("other", qcow2)], false), "the backing image DIR/other, but DIR/top names DIR/middle"),
            ("top", of(&[("middle", raw)], false), "the backing image DIR/middle, but DIR/top names another format"),
            ("top", of(&[("middle", qcow2), ("other", raw)], true), "DIR/other, but DIR/middle names DIR/base"),
            ("middle", of(&[("base", raw), ("other", raw)], false), "DIR/other, but DIR/base names none"),
            ("base", of(&[("other", raw)], true), "DIR/other, but DIR/base names none"),
            ("missing", of(&[], true), "cannot be checked: disk image DIR/missing does not exist"),
        ] {
            let said = check_of(name, backing).unwrap_err().replace(folder.path().to_str().unwrap(), "DIR");
            assert!(said.contains(why), "{name}: {said}");
        }
    }
}
