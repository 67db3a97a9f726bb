//! Persistent memory: NVRAM in the guest's address space, which the guest reads and writes without requests (virtio-pmem).
//!
//! QEMU maps its file, and answers the guest's flushes itself, with an fsync (QEMU's `hw/virtio/virtio-pmem.c`). Without a mirror
//! that is the file in host memory, and a flush is nothing. With one it is the mirror itself: the guest has the host's page
//! cache of it, and a flush returns when all is durable there. So there is nothing in between: no asynchronous mirror.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::fs::FallocateFlags;

use super::{NvramError, NvramOptions, Origin, failed, memory_or, open_mirror};
use crate::image::{LockOwner, inheritable_lock};

/// The guest's kernel maps it in steps of this (Linux's `memremap_compat_align`).
pub const ALIGN_BYTES: u64 = 2 << 20;

/// The file of one device.
pub struct Pmem {
    /// Where its content came from.
    pub origin: Origin,
    /// Locked, so that no other machine has it.
    mirror: Option<File>,
    owner: Option<LockOwner>,
}

impl NvramOptions {
    /// The file that QEMU maps if the device is persistent memory.
    pub fn pmem_file(&self) -> PathBuf {
        self.mirror.as_ref().map_or_else(|| self.memory_file(), |(mirror, _)| mirror.clone())
    }
}

impl Pmem {
    /// Opens a device. All of its space is allocated, because a store where the file system has none would end QEMU.
    pub fn open(options: &NvramOptions) -> Result<Self, NvramError> {
        let Some((path, _)) = &options.mirror else {
            return Ok(Self { origin: memory_or(options, None)?, mirror: None, owner: None });
        };
        // As a disk it was written there first.
        let memory = options.memory_file();
        if memory.exists() {
            return Err(NvramError::Unmirrored { name: options.name.clone(), path: memory });
        }
        let mirror = open_mirror(options, path)?;
        let unusable = |source| failed(options, path, "allocate the space of", source);
        let origin = if mirror.metadata().map_err(unusable)?.len() == 0 { Origin::Zeroes } else { Origin::Mirror };
        rustix::fs::fallocate(&mirror, FallocateFlags::empty(), 0, options.bytes)
            .map_err(std::io::Error::from)
            .and_then(|()| mirror.sync_all())
            .map_err(unusable)?;
        Ok(Self { origin, mirror: Some(mirror), owner: options.owner })
    }

    /// A lock on the mirror for the owner's QEMU to inherit, as `Nvram::inheritable_lock`.
    pub fn inheritable_lock(&self) -> io::Result<Option<OwnedFd>> {
        let Some((mirror, owner)) = self.mirror.as_ref().zip(self.owner) else { return Ok(None) };
        inheritable_lock(mirror, false, owner).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::nvram::{MirrorPolicy, Nvram};

    fn options(folder: &tempfile::TempDir, mirrored: bool) -> NvramOptions {
        let mirror = mirrored.then(|| (folder.path().join("mirror"), MirrorPolicy::Sync));
        NvramOptions { name: "log".into(), folder: folder.path().to_owned(), bytes: ALIGN_BYTES, mirror, owner: None }
    }

    #[test]
    fn pmem_file_is_in_memory_or_mirror() {
        for (mirrored, name, again) in [(false, "nvram-log", Origin::Memory), (true, "mirror", Origin::Mirror)] {
            let folder = tempfile::tempdir().unwrap();
            let options = options(&folder, mirrored);
            assert_eq!(Pmem::open(&options).unwrap().origin, Origin::Zeroes);
            let file = folder.path().join(name);
            assert_eq!(options.pmem_file(), file);
            assert_eq!(fs::metadata(&file).unwrap().blocks() * 512, ALIGN_BYTES, "all of its space is allocated");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "there is no other file");
            fs::write(&file, vec![7; ALIGN_BYTES as usize]).unwrap();
            assert_eq!(Pmem::open(&options).unwrap().origin, again);
            assert_eq!(fs::read(&file).unwrap()[4096], 7);
            fs::write(&file, [7; 4096]).unwrap();
            let refused = Pmem::open(&options).err().unwrap().to_string();
            assert!(refused.contains("has 4096 bytes instead of 2097152"), "{refused}");
        }
    }

    #[test]
    fn memory_left_by_a_disk_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let options = options(&folder, true);
        let (disk, _) = Nvram::open(&options).unwrap();
        let refused = Pmem::open(&options).err().unwrap().to_string();
        assert!(refused.contains("nvram-log may be newer than its mirror"), "{refused}");
        assert!(disk.give_back().unwrap());
        assert!(Pmem::open(&options).is_ok());
    }

    /// QEMU has the guest, and goes on writing to the mirror.
    #[test]
    fn a_mirror_stays_its_machines_without_a_keeper() {
        let folder = tempfile::tempdir().unwrap();
        let (own, others) = (folder.path().join("own"), folder.path().join("others"));
        let owner = |path: &PathBuf| {
            fs::create_dir_all(path).unwrap();
            LockOwner::with_folder(path).unwrap()
        };
        let options = |owner| NvramOptions { owner: Some(owner), ..options(&folder, true) };
        let keeper = Pmem::open(&options(owner(&own))).unwrap();
        let inherited = keeper.inheritable_lock().unwrap().unwrap();
        drop(keeper);
        let refused = Pmem::open(&options(owner(&others).with_living_qemu(true))).err().unwrap().to_string();
        assert!(refused.contains("another process mirrors to"), "{refused}");
        let next = Pmem::open(&options(owner(&own).with_living_qemu(true))).unwrap();
        drop((inherited, next));
        let disk = NvramOptions { folder: others.clone(), ..options(owner(&others)) };
        let (disk, backing) = Nvram::open(&disk).unwrap();
        let inherited = disk.inheritable_lock().unwrap().unwrap();
        drop((disk, backing));
        assert!(Pmem::open(&options(owner(&own))).is_err(), "a disk's mirror stays locked, too");
        drop(inherited);
        assert!(Pmem::open(&options(owner(&own))).is_ok());
    }

    #[test]
    fn a_mirror_has_one_machine() {
        let folder = tempfile::tempdir().unwrap();
        let first = Pmem::open(&options(&folder, true)).unwrap();
        let second = Pmem::open(&options(&folder, true)).err().unwrap().to_string();
        assert!(second.contains("another process mirrors to"), "{second}");
        drop(first);
        assert!(Pmem::open(&options(&folder, true)).is_ok());
    }
}
