//! Check whether this host and each machine on it can be reloaded now. Nothing is stopped.

use std::path::{Path, PathBuf};

use hearth_api::ParkRequest;
use hearth_memory::room::{FileSystemKind, Room};
use serde::Serialize;
use serde_json::Value;

use super::super::text::{Side, table};
use super::super::{CliError, Context, Exit};
use super::PrepareArguments;
use super::host_root::{HostRoot, files_through_cache};
use crate::check::life;
use crate::client::Client;
use crate::host_reload::{MachineNote, Outcome};
use crate::runtime_root::RuntimeRoot;

/// `1` if a kernel is loaded that kexec would start.
const KEXEC_LOADED: &str = "/sys/kernel/kexec_loaded";

/// One line of the answer.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// None for the host itself.
    pub machine: Option<String>,
    /// Empty if it can.
    pub problems: Vec<String>,
    /// None for the host, and for a machine whose keeper does not answer.
    #[serde(skip)]
    note: Option<MachineNote>,
}

/// A machine as its keeper reports it.
struct Seen {
    note: MachineNote,
    /// The configuration as resolved.
    config: Value,
}

impl Verdict {
    pub fn can(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Verdicts on the host, which comes first, and on its machines.
pub struct Findings {
    pub verdicts: Vec<Verdict>,
}

impl Findings {
    pub fn of(root: &RuntimeRoot, arguments: &PrepareArguments) -> Self {
        // In a drill the host keeps its kernel and everything in its memory.
        let host_root = (!arguments.drill).then(HostRoot::host);
        let problems =
            host_root.as_ref().map(|host_root| host_problems(host_root, &arguments.record.record)).unwrap_or_default();
        let mut findings = Self { verdicts: vec![Verdict { machine: None, problems, note: None }] };
        for name in root.names() {
            let looked = match life::orphaned_qemu(&root.machine(&name)) {
                Some(pid) => Err(format!(
                    "its keeper has died but its QEMU (pid {pid}) still runs; take it over with `hearth run`"
                )),
                None if life::has_keeper(&root.machine(&name)) => look(root, &name),
                None => continue,
            };
            let (problems, note) = match looked {
                Ok(seen) => (machine_problems(root, &seen, host_root.as_ref()), Some(seen.note)),
                Err(why) => (vec![why], None),
            };
            findings.verdicts.push(Verdict { machine: Some(name), problems, note });
        }
        findings
    }

    pub fn can(&self) -> bool {
        self.verdicts.iter().all(Verdict::can)
    }

    /// Whether the host itself can reload; if not, no machine can.
    pub fn host_can(&self) -> bool {
        self.verdicts.iter().filter(|verdict| verdict.machine.is_none()).all(Verdict::can)
    }

    /// The machines whose keepers answered. Those that cannot be parked are noted as such.
    pub fn machines(&self) -> Vec<MachineNote> {
        let notes = self.verdicts.iter().filter_map(|verdict| {
            let mut note = verdict.note.clone()?;
            if !verdict.can() {
                note.decide(Outcome::NotParked, Some(verdict.problems.join("; ")));
            }
            Some(note)
        });
        notes.collect()
    }

    /// All problems on one line.
    pub fn problems(&self) -> String {
        let lines = self.verdicts.iter().flat_map(|verdict| {
            let who = verdict.machine.as_deref().unwrap_or("this host");
            verdict.problems.iter().map(move |problem| format!("{who}: {problem}"))
        });
        lines.collect::<Vec<_>>().join("; ")
    }
}

pub fn show(context: &mut Context<'_>, arguments: &PrepareArguments) -> Result<Exit, CliError> {
    let findings = Findings::of(&context.root, arguments);
    if context.json {
        findings.verdicts.iter().try_for_each(|verdict| context.write_json(verdict))?;
    } else {
        let head = ["", "CAN", "WHY NOT"].map(str::to_owned).to_vec();
        let rows: Vec<_> = std::iter::once(head).chain(findings.verdicts.iter().flat_map(rows)).collect();
        table(&[Side::Left; 3], &rows).iter().try_for_each(|line| context.write_line(line))?;
    }
    Ok(if findings.can() { Exit::Done } else { Exit::Failed })
}

fn rows(verdict: &Verdict) -> Vec<Vec<String>> {
    let who = verdict.machine.clone().unwrap_or_else(|| "(host)".to_owned());
    let Some((first, rest)) = verdict.problems.split_first() else { return vec![vec![who, "yes".to_owned()]] };
    let first = vec![who, "no".to_owned(), first.clone()];
    let rest = rest.iter().map(|problem| vec![String::new(), String::new(), problem.clone()]);
    std::iter::once(first).chain(rest).collect()
}

fn host_problems(host_root: &HostRoot, record: &Path) -> Vec<String> {
    [kexec_problem(), host_root.resume_problem(), host_root.file_problem("the record", record)]
        .into_iter()
        .flatten()
        .collect()
}

fn kexec_problem() -> Option<String> {
    match std::fs::read_to_string(KEXEC_LOADED) {
        Ok(text) if text.trim() == "1" => None,
        Ok(_) => Some(
            "no kernel is loaded for kexec; load one with `kexec -l KERNEL --initrd=INITRD --reuse-cmdline`".into(),
        ),
        Err(error) => {
            Some(format!("this kernel does not support kexec ({KEXEC_LOADED}: {error}); boot one with CONFIG_KEXEC"))
        }
    }
}

fn look(root: &RuntimeRoot, name: &str) -> Result<Seen, String> {
    let client = Client::new(root.api_socket(name));
    let status = client.status().map_err(|error| crate::chain(&error))?;
    let config = client.config().map_err(|error| crate::chain(&error))?;
    let path = |key: &str| {
        let path = config[key].as_str().map(PathBuf::from);
        path.ok_or_else(|| format!("its keeper is of a version that does not report its {key}"))
    };
    let note = MachineNote {
        name: name.to_owned(),
        file: path("file")?,
        memory_folder: path("memory_folder")?,
        unit: unit_of(status.keeper.pid),
        outcome: Outcome::Begun,
        why: None,
        stood_ms: None,
    };
    Ok(Seen { note, config })
}

/// `host_root` is none if the host keeps its kernel.
fn machine_problems(root: &RuntimeRoot, Seen { note, config }: &Seen, host_root: Option<&HostRoot>) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(host_root) = host_root {
        problems.extend(memory_problems(host_root, &note.memory_folder));
        problems.extend(needed_files(config).iter().filter_map(|(what, path)| host_root.file_problem(what, path)));
    }
    if !note.file.exists() {
        problems.push(format!("{} is missing, so no keeper can be started for it", note.file.display()));
    }
    let asked = Client::new(root.api_socket(&note.name)).send(&ParkRequest { check: true });
    problems.extend(asked.err().map(|error| crate::chain(&error)));
    problems
}

fn memory_problems(host_root: &HostRoot, folder: &Path) -> Vec<String> {
    let maps_directly = match Room::of(folder) {
        Ok(room) => room.kind == FileSystemKind::Dax,
        Err(error) => return vec![crate::chain(&error)],
    };
    match host_root.memory_problem(folder, maps_directly) {
        Some(problem) => vec![problem],
        None => files_through_cache(folder),
    }
}

/// Files, apart from memory, that the next keeper and QEMU need.
fn needed_files(config: &Value) -> Vec<(String, PathBuf)> {
    let path = |value: &Value| value.as_str().map(PathBuf::from);
    let each = |key: &str| config[key].as_array().cloned().unwrap_or_default();
    let named = |what: &str, device: &Value| format!("{what} {}:", device["name"].as_str().unwrap_or_default());
    let (kernel, firmware) = (&config["boot"]["kernel"], &config["boot"]["firmware"]);
    let mut files = vec![
        ("its configuration".to_owned(), path(&config["file"])),
        ("its kernel".to_owned(), path(&kernel["kernel"])),
        ("its initrd".to_owned(), path(&kernel["initrd"])),
        ("its firmware".to_owned(), path(&firmware["code"])),
        ("its firmware_vars".to_owned(), path(&firmware["vars"])),
        ("its QEMU".to_owned(), path(&config["qemu"])),
    ];
    files.extend(each("disks").iter().map(|disk| (named("disk", disk), path(&disk["path"]))));
    files.extend(each("nvram").iter().map(|device| (named("nvram", device), path(&device["mirror"]["file"]))));
    files.into_iter().filter_map(|(what, path)| Some((what, path?))).collect()
}

/// Finds the unit in `0::/system.slice/system-hearth.slice/hearth@web.service`; starting it starts the keeper again.
fn unit_of(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    unit_in(&text)
}

fn unit_in(cgroups: &str) -> Option<String> {
    let last = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?.rsplit('/').next()?;
    (last.starts_with("hearth@") && last.ends_with(".service")).then(|| last.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_keeper_is_known_by_its_unit() {
        let check = |cgroups: &str, expect: Option<&str>| assert_eq!(unit_in(cgroups).as_deref(), expect, "{cgroups}");
        check("0::/system.slice/system-hearth.slice/hearth@web.service\n", Some("hearth@web.service"));
        check("12:cpu:/x\n0::/system.slice/hearth@db.service\n", Some("hearth@db.service"));
        check("0::/user.slice/user-0.slice/session-1.scope\n", None);
        check("0::/system.slice/sshd.service\n", None);
        check("", None);
    }

    #[test]
    fn memory_lost_with_the_kernel_is_reported() {
        let problems = memory_problems(&HostRoot::host(), Path::new("/dev/shm"));
        assert!(problems.len() == 1 && problems[0].starts_with("/dev/shm: is on tmpfs"), "{problems:?}");
        assert_eq!(memory_problems(&HostRoot::host(), Path::new("/nowhere")).len(), 1);
    }

    #[test]
    fn needed_files_come_from_the_configuration() {
        let check = |text: &str, expect: &[&str]| {
            let (file, root) = (Path::new("/etc/hearth/web.toml"), RuntimeRoot::new("/run/hearth"));
            let text = format!("name = \"web\"\nmemory = \"1GiB\"\n{text}");
            let config = serde_json::to_value(Config::parse(&text, file, &root).unwrap()).unwrap();
            let files = needed_files(&config).into_iter().map(|(what, path)| format!("{what} {}", path.display()));
            assert_eq!(files.collect::<Vec<_>>(), expect);
        };
        let kernel = "qemu = \"/opt/qemu\"\n[boot]\nkernel = \"/boot/vmlinuz\"\ninitrd = \"/boot/initrd\"\n";
        let expect = ["its configuration /etc/hearth/web.toml", "its kernel /boot/vmlinuz", "its initrd /boot/initrd"];
        check(kernel, &[&expect[..], &["its QEMU /opt/qemu"]].concat());
        let firmware = "[boot]\nfirmware = \"/srv/OVMF.fd\"\nfirmware_vars = \"/srv/vars.fd\"\n\
                        [[disks]]\nname = \"root\"\npath = \"/srv/web.img\"\n\
                        [[nvram]]\nname = \"log\"\nsize = \"4MiB\"\nmirror = \"sync\"\nmirror_file = \"/srv/log\"\n";
        let expect = [
            "its configuration /etc/hearth/web.toml",
            "its firmware /srv/OVMF.fd",
            "its firmware_vars /srv/vars.fd",
            "disk root: /srv/web.img",
            "nvram log: /srv/log",
        ];
        check(firmware, &expect);
    }

    #[test]
    fn every_problem_has_a_line_of_its_own() {
        let verdict = Verdict { machine: Some("web".into()), problems: vec!["one".into(), "two".into()], note: None };
        assert_eq!(table(&[Side::Left; 3], &rows(&verdict)), ["web  no  one", "         two"]);
        let host = Verdict { machine: None, problems: vec!["a".into()], note: None };
        let findings = Findings { verdicts: vec![host, verdict] };
        assert!(!findings.can() && !findings.host_can());
        assert_eq!(findings.problems(), "this host: a; web: one; web: two");
    }
}
