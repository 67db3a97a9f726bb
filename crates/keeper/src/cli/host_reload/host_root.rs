//! Host root: whether a parked guest's memory, and the files that its next QEMU needs, outlive the host's kernel.
//!
//! path -> its mount (/proc/self/mountinfo) -> kind of file system -> block device (/sys/dev/block) -> bus of persistent memory
//!
//! This is looked up, not tried. A file system knows whether it maps files directly (DAX), but not what device is below
//! it; the device does not know how it is mounted. A wrong answer would only show once the memory is lost.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Component, Path, PathBuf};

use hearth_memory::room::maps_directly;

/// File systems whose content ends with the kernel.
const FLEETING: [&str; 5] = ["tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"];
/// Names in /proc/iomem for reserved memory and for what the kernel makes of it.
const RESERVED: [&str; 3] = ["Persistent Memory", "CXL Window", "namespace"];
const UNIT: &str = "hearth-host-reload.service";
/// Where units are enabled for longer than a boot.
const UNIT_FOLDERS: [&str; 3] = ["etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"];
/// Maximum depth of stacked block devices.
const DEPTH_MAX: u32 = 8;

/// This host, or in tests a folder that looks like one.
pub struct HostRoot {
    root: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    /// `major:minor`
    device: String,
    point: PathBuf,
    kind: String,
    source: String,
}

impl HostRoot {
    pub fn host() -> Self {
        Self { root: PathBuf::from("/") }
    }

    /// Why a folder of guest memory would not outlive the kernel. `maps_directly`: whether its file system uses DAX.
    pub fn memory_problem(&self, folder: &Path, maps_directly: bool) -> Option<String> {
        let lost = |why: String| {
            let advice = "the guest's memory would be lost with this kernel; set memory_folder to a folder on a DAX file system \
                 on reserved memory (memmap=, NVDIMM, CXL)";
            Some(format!("{}: {why}: {advice}", folder.display()))
        };
        let Some(mount) = self.mount_of(folder) else { return lost("its mount point cannot be found".to_owned()) };
        let Mount { device, point, kind, source } = &mount;
        if mount.is_fleeting() {
            return lost(format!("is on {kind} (mounted at {})", point.display()));
        }
        if !self.is_persistent_memory(device, DEPTH_MAX) {
            return lost(format!("is on {kind} of {source}, which is not reserved or persistent memory"));
        }
        let reserved = fs::read_to_string(self.at("proc/iomem")).unwrap_or_default();
        if !RESERVED.iter().any(|name| reserved.contains(name)) {
            return lost(format!("is on {source}, but /proc/iomem lists no persistent memory"));
        }
        (!maps_directly).then(|| {
            format!(
                "{} is on {source}, but not mapped directly (DAX), so the guest's writes may be only in this kernel's \
                 cache; unmount {}, mount it with `-o dax=always`, and start the machine again",
                folder.display(),
                point.display()
            )
        })
    }

    /// Why a file that is needed after the reload would be missing.
    pub fn file_problem(&self, what: &str, path: &Path) -> Option<String> {
        let mount = self.mount_of(path).filter(Mount::is_fleeting)?;
        let (path, point) = (path.display(), mount.point.display());
        let kind = mount.kind;
        Some(format!("{what} {path} is on {kind} (mounted at {point}), which ends with this kernel: put it on a disk"))
    }

    /// Why nothing would resume the guests. Hosts without systemd use their own means.
    pub fn resume_problem(&self) -> Option<String> {
        let has_systemd = self.at("run/systemd/system").exists();
        (has_systemd && !self.is_enabled(UNIT)).then(|| {
            let nobody = "nothing would resume the guests under the next kernel";
            format!("{UNIT} is not enabled, so {nobody}: run `systemctl enable {UNIT}`")
        })
    }

    fn is_enabled(&self, unit: &str) -> bool {
        let asks_for_units = |folder: &Path| {
            let ending = folder.extension().and_then(OsStr::to_str);
            matches!(ending, Some("wants" | "requires"))
        };
        let folders = UNIT_FOLDERS.iter().filter_map(|folder| fs::read_dir(self.at(folder)).ok());
        let folders = folders.flat_map(|folder| folder.flatten().map(|entry| entry.path()));
        // Not `exists`, because the link's target is relative to the host's root.
        folders.filter(|folder| asks_for_units(folder)).any(|folder| folder.join(unit).symlink_metadata().is_ok())
    }

    /// Works for paths that do not exist yet.
    fn mount_of(&self, path: &Path) -> Option<Mount> {
        let (path, mounts) = (self.real(path)?, fs::read_to_string(self.at("proc/self/mountinfo")).ok()?);
        // Of two mounts at one place the later one is visible.
        let mounts = mounts.lines().filter_map(Mount::parse).filter(|mount| path.starts_with(&mount.point));
        mounts.max_by_key(|mount| mount.point.components().count())
    }

    /// Resolves links, as far as the path exists.
    fn real(&self, path: &Path) -> Option<PathBuf> {
        let path = std::path::absolute(path).ok()?;
        let path = self.root.join(path.strip_prefix("/").ok()?);
        let part = path.ancestors().find(|part| part.exists())?;
        let real = fs::canonicalize(part).ok()?.join(path.strip_prefix(part).ok()?);
        Some(Path::new("/").join(real.strip_prefix(fs::canonicalize(&self.root).ok()?).ok()?))
    }

    /// Whether a block device, or every device that it consists of, is on the bus of persistent memory. Devices are on
    /// it however their memory was reserved.
    fn is_persistent_memory(&self, device: &str, depth: u32) -> bool {
        let Ok(place) = fs::canonicalize(self.at("sys/dev/block").join(device)) else { return false };
        let is_bus = |part: Component<'_>| part.as_os_str().to_str().is_some_and(|part| part.starts_with("ndbus"));
        if place.components().any(is_bus) {
            return true;
        }
        let below: Vec<_> = fs::read_dir(place.join("slaves")).into_iter().flatten().flatten().collect();
        let numbers = below.iter().map(|below| fs::read_to_string(below.path().join("dev")).unwrap_or_default());
        depth > 0
            && !below.is_empty()
            && numbers.into_iter().all(|number| self.is_persistent_memory(number.trim(), depth - 1))
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
}

impl Mount {
    fn is_fleeting(&self) -> bool {
        FLEETING.contains(&self.kind.as_str())
    }

    /// A line of mountinfo: `36 35 259:0 / /pmem rw,noatime shared:1 - ext4 /dev/pmem0 rw,dax=always`.
    fn parse(line: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let (mut place, mut kind) = (place.split(' ').skip(2), kind.split(' '));
        let device = place.next()?.to_owned();
        let point = PathBuf::from(unescaped(place.nth(1)?));
        Some(Self { device, point, kind: kind.next()?.to_owned(), source: unescaped(kind.next()?) })
    }
}

/// Blanks and the like are written as three octal digits: `\040`.
fn unescaped(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => plain.extend([char::from(byte)].into_iter().chain(part[3..].chars())),
            None => plain.extend(['\\'].into_iter().chain(part.chars())),
        }
    }
    plain
}

/// Memory files of guests that started before their file system was mounted with DAX.
pub fn files_through_cache(folder: &Path) -> Vec<String> {
    let is_ram = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("ram-"));
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).filter(is_ram);
    let through_cache = files.filter(|path| File::open(path).is_ok_and(|file| !maps_directly(&file)));
    let advice = "is not mapped directly, but new files there are: run `hearth reboot` to get a new one";
    through_cache.map(|path| format!("{}: {advice}", path.display())).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const MOUNTS: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /dev/shm rw,nosuid shared:2 - tmpfs tmpfs rw,size=9%
24 22 259:0 / /pmem rw shared:3 - ext4 /dev/pmem0 rw,dax=always
25 22 254:0 / /striped rw - xfs /dev/mapper/stripe rw
26 22 254:1 / /mixed rw - xfs /dev/mapper/mixed rw
27 22 0:40 / /with\\040blank rw - ramfs none rw
28 22 0:41 / /over rw - ext4 /dev/sda2 rw
29 22 0:42 / /over rw - tmpfs tmpfs rw
";
    const PMEM: &str = "sys/devices/platform/e820_pmem/ndbus0/region0/namespace0.0/block/pmem0";

    /// A host with a disk, reserved memory and two volumes: one on that memory alone, one on both.
    fn host() -> (tempfile::TempDir, HostRoot) {
        let folder = tempfile::tempdir().unwrap();
        let host_root = HostRoot { root: folder.path().to_owned() };
        let device = |number: &str, path: &str, below: &[&str]| {
            let place = host_root.at(path);
            fs::create_dir_all(place.join("slaves")).unwrap();
            fs::write(place.join("dev"), format!("{number}\n")).unwrap();
            symlink(&place, host_root.at("sys/dev/block").join(number)).unwrap();
            for below in below {
                let name = Path::new(below).file_name().unwrap();
                symlink(host_root.at(below), place.join("slaves").join(name)).unwrap();
            }
        };
        fs::create_dir_all(host_root.at("sys/dev/block")).unwrap();
        fs::create_dir_all(host_root.at("proc/self")).unwrap();
        fs::write(host_root.at("proc/self/mountinfo"), MOUNTS).unwrap();
        fs::write(host_root.at("proc/iomem"), "00000000-00000000 : Persistent Memory (legacy)\n").unwrap();
        device("8:1", "sys/devices/pci0000:00/ata1/block/sda/sda1", &[]);
        device("259:0", PMEM, &[]);
        device("254:0", "sys/devices/virtual/block/dm-0", &[PMEM]);
        device("254:1", "sys/devices/virtual/block/dm-1", &[PMEM, "sys/devices/pci0000:00/ata1/block/sda/sda1"]);
        (folder, host_root)
    }

    #[test]
    fn memory_must_be_reserved_and_mapped_directly() {
        let (_folder, host_root) = host();
        let check = |folder: &str, maps_directly: bool, expect: Option<&str>| {
            let problem = host_root.memory_problem(Path::new(folder), maps_directly);
            match (&problem, expect) {
                (None, None) => {}
                (Some(problem), Some(expect)) if problem.contains(expect) => {}
                _ => panic!("{folder}: {problem:?}"),
            }
        };
        check("/pmem/web", true, None);
        check("/striped/web", true, None);
        check("/pmem/web", false, Some("/pmem/web is on /dev/pmem0, but not mapped directly (DAX)"));
        check(
            "/dev/shm/x",
            true,
            Some("/dev/shm/x: is on tmpfs (mounted at /dev/shm): the guest's memory would be lost"),
        );
        check("/srv/web", false, Some("is on ext4 of /dev/sda1, which is not reserved or persistent memory"));
        check("/mixed/web", true, Some("is on xfs of /dev/mapper/mixed, which is not reserved"));
        fs::write(host_root.at("proc/iomem"), "00100000-3fffffff : System RAM\n").unwrap();
        check("/pmem/web", true, Some("/proc/iomem lists no persistent memory"));
        fs::remove_file(host_root.at("proc/self/mountinfo")).unwrap();
        check("/pmem/web", true, Some("its mount point cannot be found"));
    }

    #[test]
    fn files_for_the_next_qemu_outlive_the_kernel() {
        let (_folder, host_root) = host();
        let check = |path: &str, expect: Option<&str>| {
            let expect = expect.map(|expect| format!("{expect}, which ends with this kernel: put it on a disk"));
            assert_eq!(host_root.file_problem("disk root:", Path::new(path)), expect, "{path}");
        };
        check("/srv/no-such-folder/web.img", None);
        check("/dev/shm/web.img", Some("disk root: /dev/shm/web.img is on tmpfs (mounted at /dev/shm)"));
        check("/with blank/x", Some("disk root: /with blank/x is on ramfs (mounted at /with blank)"));
        check("/over/x", Some("disk root: /over/x is on tmpfs (mounted at /over)"));
        fs::create_dir_all(host_root.at("dev/shm")).unwrap();
        symlink(host_root.at("dev/shm"), host_root.at("elsewhere")).unwrap();
        check("/elsewhere/x", Some("disk root: /elsewhere/x is on tmpfs (mounted at /dev/shm)"));
    }

    #[test]
    fn somebody_must_let_the_guests_go_on() {
        let (_folder, host_root) = host();
        assert_eq!(host_root.resume_problem(), None, "without systemd");
        fs::create_dir_all(host_root.at("run/systemd/system")).unwrap();
        let problem = host_root.resume_problem().unwrap();
        assert!(problem.ends_with("`systemctl enable hearth-host-reload.service`"), "{problem}");
        let wants = host_root.at("etc/systemd/system/multi-user.target.wants");
        fs::create_dir_all(&wants).unwrap();
        // The unit exists, but is not enabled.
        fs::write(host_root.at("etc/systemd/system").join(UNIT), "").unwrap();
        assert!(host_root.resume_problem().is_some());
        symlink(Path::new("/etc/systemd/system").join(UNIT), wants.join(UNIT)).unwrap();
        assert_eq!(host_root.resume_problem(), None);
    }

    #[test]
    fn memory_in_a_cache_is_named() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        for name in ["ram-3", "ledger-3"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let told = files_through_cache(folder.path());
        assert!(told.len() == 1 && told[0].contains("/ram-3: is not mapped directly"), "{told:?}");
        assert!(files_through_cache(Path::new("/nowhere")).is_empty());
    }

    #[test]
    fn blanks_in_mounts_are_read() {
        let check = |text: &str, expect: &str| assert_eq!(unescaped(text), expect);
        check("/plain", "/plain");
        check("/a\\040b\\134c", "/a b\\c");
        check("\\9", "\\9");
    }
}
