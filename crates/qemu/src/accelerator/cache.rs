//! Cache of the KVM trial: a verdict is valid until QEMU, the CPU model or the user changes or the host boots.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Verdict;
use crate::Binary;

/// Everything that the verdict depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Question {
    binary: PathBuf,
    binary_modified: (i64, i64),
    cpu_model: String,
    user: u32,
    /// Another kernel, or other module options, may lead to another verdict.
    host_boot: String,
}

#[derive(Serialize, Deserialize)]
struct Record {
    question: Question,
    verdict: Verdict,
}

impl Question {
    /// The question whether KVM works for this QEMU, this CPU model and the current user.
    pub fn about(binary: &Binary, cpu_model: &str) -> Self {
        let metadata = fs::metadata(binary.path());
        Self {
            binary: binary.path().to_owned(),
            binary_modified: metadata.map_or((0, 0), |metadata| (metadata.mtime(), metadata.mtime_nsec())),
            cpu_model: cpu_model.to_owned(),
            user: rustix::process::geteuid().as_raw(),
            host_boot: host_boot(),
        }
    }

    /// Name of the cache file. Machines with different CPU models may share a folder.
    fn file(&self, folder: &Path) -> PathBuf {
        let mut hasher = DefaultHasher::new();
        (&self.binary, &self.cpu_model, self.user).hash(&mut hasher);
        folder.join(format!("kvm-probe-{:016x}.json", hasher.finish()))
    }
}

/// Identifies this boot of the host. Empty if the kernel does not tell.
pub fn host_boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The cached verdict. None if there is none or the file is unreadable.
pub fn recall(folder: &Path, question: &Question) -> Option<Verdict> {
    let record: Record = serde_json::from_slice(&fs::read(question.file(folder)).ok()?).ok()?;
    (record.question == *question).then_some(record.verdict)
}

/// Caches a verdict. After a failure, the next start tries KVM again.
pub fn remember(folder: &Path, question: &Question, verdict: &Verdict) {
    let record = Record { question: question.clone(), verdict: verdict.clone() };
    let file = question.file(folder);
    let temporary = file.with_extension(format!("new.{}", std::process::id()));
    let text = serde_json::to_vec(&record).expect("a record is plain data");
    if let Err(error) = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, &file)) {
        tracing::debug!(file = %file.display(), %error, "the accelerator probe will run again: its answer cannot be kept");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question() -> Question {
        Question {
            binary: "/usr/bin/qemu".into(),
            binary_modified: (1, 2),
            cpu_model: "host".into(),
            user: 0,
            host_boot: "a".into(),
        }
    }

    fn verdict() -> Verdict {
        Verdict { works: false, why: "QEMU said so".into() }
    }

    #[test]
    fn verdict_is_kept_until_something_changes() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(recall(folder.path(), &question()), None);
        remember(folder.path(), &question(), &verdict());
        assert_eq!(recall(folder.path(), &question()), Some(verdict()));
        for changed in [
            Question { binary: "/opt/qemu".into(), ..question() },
            Question { binary_modified: (1, 3), ..question() },
            Question { cpu_model: "max".into(), ..question() },
            Question { user: 1000, ..question() },
            Question { host_boot: "b".into(), ..question() },
        ] {
            assert_eq!(recall(folder.path(), &changed), None, "{changed:?}");
        }
    }

    #[test]
    fn truncated_verdict_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        remember(folder.path(), &question(), &verdict());
        let file = question().file(folder.path());
        let text = fs::read(&file).unwrap();
        fs::write(&file, &text[..text.len() / 2]).unwrap();
        assert_eq!(recall(folder.path(), &question()), None);
    }

    #[test]
    fn missing_folder_does_no_harm() {
        remember(Path::new("/no/such"), &question(), &verdict());
        assert_eq!(recall(Path::new("/no/such"), &question()), None);
    }
}
