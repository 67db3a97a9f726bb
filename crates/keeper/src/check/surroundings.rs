//! Checks the length of socket paths, the user that QEMU runs as, and whether the kernel can confine it.

use crate::config::{AUTO_USER, Config, DevicesConfig, NetBackend};
use crate::folders::own_user;
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;
use crate::unix_socket::PATH_BYTES_MAX;

/// Digits of a generation's number. More than 9999 QEMUs in a machine's life are not expected.
const GENERATION_DIGITS: &str = "9999";

pub fn check(config: &Config, root: &RuntimeRoot, problems: &mut Vec<Problem>) {
    check_paths(config, root, problems);
    problems.extend(user(config, rustix::process::geteuid().is_root()));
    problems.extend(confinement(config, hearth_qemu::kernel_has_landlock()));
}

pub fn check_paths(config: &Config, root: &RuntimeRoot, problems: &mut Vec<Problem>) {
    problems.extend(socket_paths(config));
    problems.extend(earlier_folder(config, root));
}

/// Checking the longest path is enough: shortening it shortens all.
fn socket_paths(config: &Config) -> Option<Problem> {
    let mut names: Vec<String> =
        ["userfault", "qmp", "serial"].map(|kind| format!("{kind}-{GENERATION_DIGITS}.sock")).into();
    names.push("console.sock".to_owned());
    let DevicesConfig { disks, nvram, nets, .. } = &config.devices;
    let disks = disks.iter().map(|disk| &disk.name).chain(nvram.iter().map(|device| &device.name));
    names.extend(disks.map(|name| format!("disk-{name}.sock")));
    let passt = nets.iter().enumerate().filter(|(_, net)| matches!(net.backend, NetBackend::Passt { .. }));
    names.extend(passt.map(|(index, _)| format!("passt-{index}-{GENERATION_DIGITS}.sock")));
    let longest = names.into_iter().max_by_key(String::len)?;
    let bytes = config.folders.runtime.join(&longest).as_os_str().len();
    let excess = bytes.checked_sub(PATH_BYTES_MAX).filter(|excess| *excess > 0)?;
    let folder = config.folders.runtime.display();
    let message = format!(
        "{folder} is too long: with /{longest} a socket's path has {bytes} bytes, but only {PATH_BYTES_MAX} are \
         allowed"
    );
    Some(Problem::error("runtime_folder", message, format!("choose a folder whose path is {excess} bytes shorter")))
}

/// A machine with another runtime folder is known by a link, which an earlier folder of that name would block.
fn earlier_folder(config: &Config, root: &RuntimeRoot) -> Option<Problem> {
    let place = root.machine(&config.name);
    let in_the_way = place != config.folders.runtime && place.exists() && !place.is_symlink();
    in_the_way.then(|| {
        let message = format!("{} already exists", place.display());
        Problem::for_now(
            "runtime_folder",
            message,
            "stop the machine if it runs there and remove the folder, or remove runtime_folder",
        )
    })
}

fn user(config: &Config, is_root: bool) -> Option<Problem> {
    match (config.qemu.user.as_deref(), is_root) {
        (Some(AUTO_USER), true) => (!own_user::is_mapped()).then(|| {
            let message = "this user namespace (for example a container's) has no free users for QEMU";
            Problem::error("qemu_user", message, "choose a user that it has, such as nobody")
        }),
        (Some(user), true) if !is_known(user) => {
            let hint = format!("create it (useradd --system {user}), or set qemu_user = \"auto\"");
            Some(Problem::missing("qemu_user", format!("user {user} does not exist"), hint))
        }
        (Some(user), false) => {
            let user = if user == AUTO_USER { "another user" } else { user };
            let message = format!("only root can make QEMU become {user}");
            Some(Problem::error("qemu_user", message, "remove the line, or run hearth as root"))
        }
        (None, true) => Some(Problem::warning(
            "qemu_user",
            "QEMU will run as root",
            "set qemu_user = \"auto\": a guest that breaks out of QEMU gets the rights of QEMU's user",
        )),
        _ => None,
    }
}

fn confinement(config: &Config, has_landlock: bool) -> Option<Problem> {
    (config.qemu.sandbox && !has_landlock).then(|| {
        Problem::warning(
            "sandbox",
            "this kernel has no Landlock, or it is turned off: QEMU may open every file that its user may",
            "start the kernel with landlock in its list of security modules (lsm=)",
        )
    })
}

/// Only local users, so that QEMU does not depend on a directory service that needs the network.
fn is_known(user: &str) -> bool {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    passwd.lines().any(|line| line.split(':').next() == Some(user))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::runtime_root::RuntimeRoot;

    fn config(more: &str) -> Config {
        let text = format!("name = \"web\"\nmemory = \"64MiB\"\n{more}\n[boot]\nkernel = \"k\"\n");
        Config::parse(&text, Path::new("/machines/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap()
    }

    #[test]
    fn kernel_without_landlock_is_reported() {
        assert_eq!(confinement(&config(""), true), None);
        assert_eq!(confinement(&config("sandbox = false"), false), None);
        let problem = confinement(&config(""), false).unwrap().to_string();
        assert!(problem.starts_with("warning: sandbox: this kernel has no Landlock"), "{problem}");
    }

    #[test]
    fn too_long_runtime_folder_is_reported() {
        assert_eq!(socket_paths(&config("")), None);
        let long = config(&format!("runtime_folder = \"/{}\"", "x".repeat(90)));
        let problem = socket_paths(&long).unwrap();
        assert_eq!(
            problem.to_string(),
            format!(
                "error: runtime_folder: /{} is too long: with /userfault-9999.sock a socket's path has 111 bytes, but only 107 are allowed; choose a folder whose path is 4 bytes shorter",
                "x".repeat(90)
            )
        );
        assert_eq!(socket_paths(&config(&format!("runtime_folder = \"/{}\"", "x".repeat(86)))), None);
    }

    #[test]
    fn the_user_of_qemu() {
        assert_eq!(user(&config("qemu_user = \"root\""), true), None);
        assert_eq!(user(&config(""), false), None);
        let check = |more: &str, is_root, expect: &str| {
            assert_eq!(user(&config(more), is_root).unwrap().to_string(), expect);
        };
        check(
            "qemu_user = \"nobody-here\"",
            true,
            "error: qemu_user: user nobody-here does not exist; create it (useradd --system nobody-here), or set qemu_user = \"auto\"",
        );
        check(
            "qemu_user = \"auto\"",
            false,
            "error: qemu_user: only root can make QEMU become another user; remove the line, or run hearth as root",
        );
        check(
            "qemu_user = \"nobody\"",
            false,
            "error: qemu_user: only root can make QEMU become nobody; remove the line, or run hearth as root",
        );
        assert!(!user(&config(""), true).unwrap().is_error());
    }
}
