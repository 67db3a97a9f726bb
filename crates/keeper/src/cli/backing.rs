//! Backing: whether Hearth can open a disk's image, and whether that has the backing images that libvirt's definition names.
//! QEMU under libvirt uses those of the definition. Hearth uses those that the images themselves name.
//!
//! Nothing is locked, because a QEMU may use the images.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use hearth_disk::arrival::Arrival;
use hearth_disk::image::{self, add_backing_images};
use hearth_libvirt::definition::{Disk, Format};

const REMEDY: &str = "correct <backingStore> in the definition, or remove it";

/// Why Hearth cannot serve this disk: an image that it cannot open, or that is not the one of the definition.
pub fn check(disk: &Disk) -> Result<(), String> {
    let own = backing_of(disk).map_err(|why| format!("its image cannot be opened: {why}"))?;
    let (named, ends) = (&disk.backing.images, disk.backing.ends);
    let mut above = &disk.path;
    for (number, (path, format)) in named.iter().enumerate() {
        let names = match own.get(number) {
            None => "names none".to_owned(),
            Some((own, _)) if !is_same_file(own, path) => format!("names {}", own.display()),
            Some((_, own)) if format.is_some_and(|format| image_format(format) != *own) => {
                "names another format".to_owned()
            }
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

/// The backing images that the images themselves name, from the disk's own one down; or why one cannot be opened.
fn backing_of(disk: &Disk) -> Result<Vec<(PathBuf, image::Format)>, String> {
    let mut own = Vec::new();
    let read = match disk.format {
        Format::Raw => Ok(()),
        Format::Qcow2 => add_backing_images(&disk.path, &mut own),
    };
    let last = own.last().map_or(&disk.path, |(path, _)| path);
    let may_be_empty = disk.format == Format::Qcow2;
    match read {
        // What it names may not have been fetched yet.
        Err(_) if matches!(Arrival::open(last), Ok(Some(_))) => {}
        Err(error) => return Err(crate::chain(&error)),
        Ok(()) => can_be_read(last, may_be_empty).map_err(|error| format!("{}: {error}", last.display()))?,
    }
    Ok(own)
}

/// Checks that this is a file or a block device that can be opened.
fn can_be_read(path: &Path, may_be_empty: bool) -> io::Result<()> {
    let found = fs::metadata(path)?;
    if !found.is_file() && !found.file_type().is_block_device() {
        return Err(io::Error::other("is neither a file nor a block device"));
    }
    if found.is_file() && found.len() == 0 && !may_be_empty {
        return Err(io::Error::other("is empty"));
    }
    File::open(path).map(drop)
}

/// The format in the words of the disks' server.
pub fn image_format(format: Format) -> image::Format {
    match format {
        Format::Raw => image::Format::Raw,
        Format::Qcow2 => image::Format::Qcow2,
    }
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    matches!((fs::canonicalize(one), fs::canonicalize(other)), (Ok(one), Ok(other)) if one == other)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use hearth_libvirt::definition::Backing;

    use super::*;

    fn qemu_img(folder: &Path, arguments: &[&str]) {
        let status = Command::new("qemu-img").args(arguments).current_dir(folder).status().unwrap();
        assert!(status.success(), "{arguments:?}");
    }

    fn disk(path: PathBuf, format: Format, backing: Backing) -> Disk {
        Disk {
            name: "vda".to_owned(),
            path,
            format,
            read_only: false,
            direct: true,
            serial: String::new(),
            queues: 1,
            mib_per_second: None,
            iops: None,
            backing,
        }
    }

    #[test]
    fn images_must_be_those_of_the_definition() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("base"), [0; 65536]).unwrap();
        fs::write(at("other"), [0; 65536]).unwrap();
        for (over, format, name) in [("base", "raw", "middle"), ("middle", "qcow2", "top")] {
            qemu_img(folder.path(), &["create", "-q", "-f", "qcow2", "-F", format, "-b", over, name]);
        }
        std::os::unix::fs::symlink(at("base"), at("link")).unwrap();
        let of = |names: &[(&str, Option<Format>)], ends| Backing {
            images: names.iter().map(|(name, format)| (at(name), *format)).collect(),
            ends,
        };
        let check_of = |name: &str, backing| match name {
            "base" => check(&disk(at(name), Format::Raw, backing)),
            _ => check(&disk(at(name), Format::Qcow2, backing)),
        };
        let (raw, qcow2) = (Some(Format::Raw), Some(Format::Qcow2));
        for (name, backing) in [
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
            ("missing", of(&[], true), "cannot be opened: disk image DIR/missing does not exist"),
        ] {
            let said = check_of(name, backing).unwrap_err().replace(folder.path().to_str().unwrap(), "DIR");
            assert!(said.contains(why), "{name}: {said}");
        }
    }

    #[test]
    fn image_that_hearth_cannot_open_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let create = |name: &str, more: &[&str]| {
            qemu_img(folder.path(), &[&["create", "-q", "-f", "qcow2"], more, &[name, "1M"]].concat());
        };
        create("sound", &[]);
        create("zstd", &["-o", "compression_type=zstd"]);
        create("extended", &["-o", "extended_l2=on"]);
        create("data", &["-o", "data_file=beside,data_file_raw=on"]);
        for (name, feature) in [("dirty", 1), ("corrupt", 2)] {
            let mut image = fs::read(at("sound")).unwrap();
            image[79] |= feature;
            fs::write(at(name), image).unwrap();
        }
        for (name, base) in [("orphan", "base"), ("whole", "lower")] {
            fs::write(at(base), [0; 512]).unwrap();
            create(name, &["-F", "raw", "-b", base]);
        }
        fs::remove_file(at("base")).unwrap();
        fs::write(at("empty"), "").unwrap();
        let check_of = |name: &str, format| check(&disk(at(name), format, Backing::default()));
        for (name, format) in [
            ("sound", Format::Qcow2),
            ("dirty", Format::Qcow2),
            ("whole", Format::Qcow2),
            ("zstd", Format::Raw),
            ("lower", Format::Raw),
        ] {
            assert_eq!(check_of(name, format), Ok(()), "{name}");
        }
        for (name, format, why) in [
            ("zstd", Format::Qcow2, "qcow2 image DIR/zstd is compressed with zstd; rewrite it with qemu-img convert"),
            ("extended", Format::Qcow2, "has extended L2 entries"),
            ("data", Format::Qcow2, "keeps its data in an external file"),
            ("corrupt", Format::Qcow2, "is marked corrupt"),
            ("lower", Format::Qcow2, "is not a qcow2 image"),
            ("orphan", Format::Qcow2, "DIR/base: No such file"),
            ("empty", Format::Raw, "DIR/empty: is empty"),
            ("missing", Format::Qcow2, "disk image DIR/missing does not exist"),
            ("missing", Format::Raw, "its image cannot be opened: DIR/missing: No such file"),
            ("", Format::Raw, "is neither a file nor a block device"),
        ] {
            let said = check_of(name, format).unwrap_err().replace(folder.path().to_str().unwrap(), "DIR");
            assert!(said.contains(why), "{name}: {said}");
        }
    }
}
