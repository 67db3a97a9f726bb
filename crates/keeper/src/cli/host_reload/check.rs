//! Check: whether this host, and each machine on it, can be reloaded now. Nothing is stopped.

use std::path::{Path, PathBuf};

use hearth_api::ParkRequest;
use hearth_memory::room::{FileSystemKind, Room};
use serde::Serialize;

use super::super::text::{Side, table};
use super::super::{CliError, Context, Exit};
use crate::check::life;
use crate::client::Client;
use crate::host_reload::{MachineNote, Outcome};
use crate::runtime_root::RuntimeRoot;

/// `1` if a kernel is loaded that kexec would start.
const KEXEC_LOADED: &str = "/sys/kernel/kexec_loaded";

/// One line of the answer.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// None: the host itself.
    pub machine: Option<String>,
    /// Nothing: it can.
    pub problems: Vec<String>,
    /// None: the host, or a machine whose keeper says nothing of it.
    #[serde(skip)]
    note: Option<MachineNote>,
}

impl Verdict {
    pub fn can(&self) -> bool {
        self.problems.is_empty()
    }
}

/// What was looked at: the host first.
pub struct Findings {
    pub verdicts: Vec<Verdict>,
}

impl Findings {
    pub fn of(root: &RuntimeRoot, drill: bool) -> Self {
        let problems = if drill { Vec::new() } else { host_problems() };
        let mut findings = Self { verdicts: vec![Verdict { machine: None, problems, note: None }] };
        for name in root.names() {
            let looked = match life::orphaned_qemu(&root.machine(&name)) {
                Some(pid) => {
                    Err(format!("its keeper has died and its QEMU (pid {pid}) runs on; `hearth run` takes it over"))
                }
                None if life::has_keeper(&root.machine(&name)) => look(root, &name),
                None => continue,
            };
            let (problems, note) = match looked {
                Ok(machine) => (machine_problems(root, &machine, drill), Some(machine)),
                Err(why) => (vec![why], None),
            };
            findings.verdicts.push(Verdict { machine: Some(name), problems, note });
        }
        findings
    }

    pub fn can(&self) -> bool {
        self.verdicts.iter().all(Verdict::can)
    }

    /// Whether the host itself could: else no machine can.
    pub fn host_can(&self) -> bool {
        self.verdicts.iter().filter(|verdict| verdict.machine.is_none()).all(Verdict::can)
    }

    /// Machines of which more is known than that they cannot be parked: those that cannot are noted as such.
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

pub fn show(context: &mut Context<'_>, drill: bool) -> Result<Exit, CliError> {
    let findings = Findings::of(&context.root, drill);
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

fn host_problems() -> Vec<String> {
    match std::fs::read_to_string(KEXEC_LOADED) {
        Ok(text) if text.trim() == "1" => Vec::new(),
        Ok(_) => {
            vec!["no kernel is loaded that kexec could start: `kexec -l KERNEL --initrd=INITRD --reuse-cmdline`".into()]
        }
        Err(error) => vec![format!("this kernel does not do kexec: {KEXEC_LOADED}: {error}")],
    }
}

/// What its keeper says of it.
fn look(root: &RuntimeRoot, name: &str) -> Result<MachineNote, String> {
    let client = Client::new(root.api_socket(name));
    let status = client.status().map_err(|error| crate::chain(&error))?;
    let config = client.config().map_err(|error| crate::chain(&error))?;
    let path = |key: &str| {
        let path = config[key].as_str().map(PathBuf::from);
        path.ok_or_else(|| format!("its keeper is of a version that does not say its {key}"))
    };
    Ok(MachineNote {
        name: name.to_owned(),
        file: path("file")?,
        memory_folder: path("memory_folder")?,
        unit: unit_of(status.keeper.pid),
        outcome: Outcome::Begun,
        why: None,
        stood_ms: None,
    })
}

fn machine_problems(root: &RuntimeRoot, machine: &MachineNote, drill: bool) -> Vec<String> {
    let mut problems = Vec::new();
    if !drill {
        problems.extend(memory_problem(&machine.memory_folder));
    }
    if !machine.file.exists() {
        problems.push(format!("{} is gone: no keeper could be started for it", machine.file.display()));
    }
    let asked = Client::new(root.api_socket(&machine.name)).park(ParkRequest { check: true });
    problems.extend(asked.err().map(|error| crate::chain(&error)));
    problems
}

/// Memory that the host's next kernel would not find.
fn memory_problem(folder: &Path) -> Option<String> {
    match Room::of(folder) {
        Ok(Room { kind: FileSystemKind::Dax, .. }) => None,
        Ok(_) => Some(format!(
            "{} is not on a DAX file system: the guest's memory would be lost with this kernel",
            folder.display()
        )),
        Err(error) => Some(crate::chain(&error)),
    }
}

/// `0::/system.slice/system-hearth.slice/hearth@web.service`: whoever starts that starts the keeper again.
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
    fn memory_that_ends_with_the_kernel_is_told() {
        let problem = memory_problem(Path::new("/dev/shm")).unwrap();
        assert!(problem.starts_with("/dev/shm is not on a DAX file system"), "{problem}");
        assert!(memory_problem(Path::new("/nowhere")).is_some());
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
