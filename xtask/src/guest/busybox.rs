//! The busybox guest: an initramfs that boots to the agent in about two seconds under TCG.
//!
//! Four archives: `initrd` with busybox, probe and file-system tools (about 10 MiB); `initrd-fio`, the same followed by fio and
//! the 80 MiB of libraries that Debian's fio is linked with; `initrd-agent`, the same followed by qemu-guest-agent; and
//! `initrd-btrfs`, the same followed by driver and tool of btrfs. The kernel unpacks archives that stand one after the other, so
//! these are plain concatenations, for the few tests that need them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::modules::{Module, Modules};
use super::{GuestError, probe, qemu_ga, refill};
use crate::cache::{self, CacheError, at};
use crate::guest::kernel::Kernel;
use crate::{paths, shell};

const INIT: &str = include_str!("../../../guest/initramfs/init");
const DHCP: &str = include_str!("../../../guest/initramfs/dhcp");
const NET_UP: &str = include_str!("../../../guest/initramfs/net-up");
const POWER_BUTTON: &str = include_str!("../../../guest/initramfs/power-button");
const AGENT: &str = include_str!("../../../guest/agent/agent");
const MODPROBE: &str = include_str!("../../../guest/initramfs/modprobe");
const MODULES: &str = include_str!("../../../guest/initramfs/modules");

/// A file system that is loaded when one is mounted for the first time: 4 MiB of code, half a second of each boot under TCG.
const LOADED_BY_MOUNT: &str = "xfs";

/// Real tools where busybox has none or a lesser one.
const TOOLS: [&str; 5] = ["mke2fs", "e2fsck", "debugfs", "mkfs.xfs", "xfs_repair"];

/// Makes `busybox{suffix}/` with `vmlinuz`, `initrd`, `initrd-fio`, `initrd-agent` and `initrd-btrfs`.
pub fn ensure(kernel: Kernel) -> Result<(), GuestError> {
    let folder = paths::guest().join(format!("busybox{}", kernel.suffix));
    let own = [
        INIT,
        DHCP,
        NET_UP,
        POWER_BUTTON,
        AGENT,
        MODPROBE,
        MODULES,
        probe::SOURCE,
        include_str!("busybox.rs"),
        include_str!("modules.rs"),
        include_str!("qemu_ga.rs"),
    ];
    cache::ensure(&folder, &[&own[..], &refill::SOURCES].concat(), |new| make(kernel, new))
}

fn make(kernel: Kernel, new: &Path) -> Result<(), GuestError> {
    let kernel = kernel.ensure()?;
    let (tree, initrd) = (new.join("tree"), new.join("initrd"));
    for folder in ["bin", "modules", "etc", "usr/sbin"] {
        create(&tree.join(folder))?;
    }
    put_programs(&tree)?;
    put_modules(MODULES, &kernel, &tree)?;
    pack(&tree, &initrd)?;
    at("remove", &tree, fs::remove_dir_all(&tree))?;

    put_with_libraries("fio", &tree)?;
    append(&tree, &initrd, &new.join("initrd-fio"))?;
    let agent = qemu_ga::ensure()?;
    copy(&agent, &tree.join("usr/sbin/qemu-ga"))?;
    put_libraries(&agent, &tree)?;
    append(&tree, &initrd, &new.join("initrd-agent"))?;
    put_driver("btrfs", &kernel, &tree)?;
    put_with_libraries("btrfs", &tree)?;
    append(&tree, &initrd, &new.join("initrd-btrfs"))?;

    let vmlinuz = kernel.join("vmlinuz");
    at("copy", &vmlinuz, fs::copy(&vmlinuz, new.join("vmlinuz")))?;
    Ok(())
}

/// What `tree` holds behind `initrd`, as `whole`; the tree is used up.
fn append(tree: &Path, initrd: &Path, whole: &Path) -> Result<(), GuestError> {
    let rest = whole.with_extension("rest");
    pack(tree, &rest)?;
    at("remove", tree, fs::remove_dir_all(tree))?;
    concatenate(&[initrd, &rest], whole)?;
    Ok(at("remove", &rest, fs::remove_file(&rest))?)
}

fn put_programs(tree: &Path) -> Result<(), GuestError> {
    copy(&static_busybox()?, &tree.join("bin/busybox"))?;
    at("link", tree, std::os::unix::fs::symlink("busybox", tree.join("bin/sh")))?;
    copy(&probe::ensure()?, &tree.join("bin/probe"))?;
    copy(&refill::ensure()?.join(refill::PROGRAM), &tree.join("bin").join(refill::PROGRAM))?;
    let scripts = [
        ("init", INIT),
        ("bin/agent", AGENT),
        ("bin/modprobe", MODPROBE),
        ("bin/net-up", NET_UP),
        ("etc/dhcp", DHCP),
        // What a mount without a type tries.
        ("etc/filesystems", "ext4\nxfs\nbtrfs\n"),
        // Where busybox's acpid looks, by the kernel's names for button and event.
        ("etc/acpi/PWRF/00000080", POWER_BUTTON),
    ];
    create(&tree.join("etc/acpi/PWRF"))?;
    for (name, text) in scripts {
        let file = tree.join(name);
        at("write", &file, fs::write(&file, text))?;
        at("make executable", &file, fs::set_permissions(&file, fs::Permissions::from_mode(0o755)))?;
    }
    for tool in TOOLS {
        put_with_libraries(tool, tree)?;
    }
    let link = tree.join("usr/sbin/mkfs.ext4");
    Ok(at("link", &link, std::os::unix::fs::symlink("mke2fs", &link))?)
}

/// Modules of `kernel`, a name a line in `list`, and what they need, into `modules/` of the tree.
pub(super) fn put_modules(list: &str, kernel: &Path, tree: &Path) -> Result<(), GuestError> {
    let wanted = list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let modules = Modules::scan(&kernel.join("modules"))?.in_order(wanted)?;
    let at_boot = modules.iter().filter(|module| module.name != LOADED_BY_MOUNT);
    let order: String = at_boot.map(|module| format!("{}\n", module.name)).collect();
    put_code(&modules, tree)?;
    let file = tree.join("modules/order");
    Ok(at("write", &file, fs::write(&file, order))?)
}

fn put_code(modules: &[Module], tree: &Path) -> Result<(), CacheError> {
    for module in modules {
        let file = tree.join("modules").join(format!("{}.ko", module.name));
        at("write", &file, fs::write(&file, &module.code))?;
    }
    Ok(())
}

/// A module that is loaded when a file system of this name is mounted, with what it needs.
fn put_driver(name: &str, kernel: &Path, tree: &Path) -> Result<(), GuestError> {
    create(&tree.join("modules"))?;
    let modules = Modules::scan(&kernel.join("modules"))?.in_order([name].into_iter())?;
    put_code(&modules, tree)?;
    let needs = modules.iter().filter(|module| module.name != name);
    let needs: String = needs.map(|module| format!("{}\n", module.name)).collect();
    let file = tree.join("modules").join(format!("{name}.needs"));
    Ok(at("write", &file, fs::write(&file, needs))?)
}

pub(super) fn static_busybox() -> Result<PathBuf, GuestError> {
    let path = shell::find("busybox").ok_or(GuestError::Missing("busybox-static"))?;
    let code = at("read", &path, fs::read(&path))?;
    // A dynamic program names its loader.
    if code.windows(8).any(|window| window == b"/ld-linu") {
        return Err(GuestError::NotStatic { name: "busybox", path });
    }
    Ok(path)
}

/// Puts a program of the host into the tree's `usr/sbin`, with every library that it loads.
pub(super) fn put_with_libraries(program: &'static str, tree: &Path) -> Result<(), GuestError> {
    let path = shell::find(program).ok_or(GuestError::Missing(program))?;
    copy(&path, &tree.join("usr/sbin").join(program))?;
    put_libraries(&path, tree)
}

/// Puts every library that a program loads into the tree, at the same paths.
pub(super) fn put_libraries(program: &Path, tree: &Path) -> Result<(), GuestError> {
    for library in libraries(&shell::output(Command::new("ldd").arg(program))?) {
        let target = tree.join(library.trim_start_matches('/'));
        if !target.exists() {
            copy(Path::new(&library), &target)?;
        }
    }
    Ok(())
}

/// The absolute paths in what `ldd` prints, the loader's own among them.
fn libraries(ldd: &str) -> BTreeSet<String> {
    let words = ldd.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    words.map(str::to_owned).collect()
}

/// Packs a folder as the kernel wants it: newc, owned by root whoever makes it.
fn pack(tree: &Path, archive: &Path) -> Result<(), GuestError> {
    let names = shell::output(Command::new("find").arg(".").current_dir(tree))?;
    let mut names: Vec<_> = names.lines().collect();
    names.sort_unstable();
    let list = archive.with_extension("list");
    at("write", &list, fs::write(&list, names.join("\n") + "\n"))?;
    let input = at("open", &list, fs::File::open(&list))?;
    let output = at("create", archive, fs::File::create(archive))?;
    let mut cpio = Command::new("cpio");
    cpio.args(["-o", "-H", "newc", "-R", "0:0", "--quiet"]).current_dir(tree);
    shell::run(cpio.stdin(input).stdout(output).stderr(Stdio::inherit()))?;
    Ok(at("remove", &list, fs::remove_file(&list))?)
}

fn concatenate(parts: &[&Path], whole: &Path) -> Result<(), CacheError> {
    let mut output = at("create", whole, fs::File::create(whole))?;
    for part in parts {
        let mut input = at("open", part, fs::File::open(part))?;
        at("append", part, std::io::copy(&mut input, &mut output))?;
    }
    Ok(())
}

pub(super) fn copy(from: &Path, to: &Path) -> Result<(), CacheError> {
    create(to.parent().expect("a file is in a folder"))?;
    at("copy", from, fs::copy(from, to)).map(drop)
}

pub(super) fn create(folder: &Path) -> Result<(), CacheError> {
    at("create", folder, fs::create_dir_all(folder))
}

#[cfg(test)]
mod tests {
    #[test]
    fn libraries_are_found_whatever_form_ldd_prints() {
        let ldd = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expect = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert!(super::libraries(ldd).iter().eq(expect.iter()));
    }
}
