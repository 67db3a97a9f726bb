//! The metrics as a file for node_exporter, replaced as a whole. A daemon that is told to end removes it: what it says would stay true
//! for node_exporter. A killed one leaves it, and the time in it gets old.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use hearth_memory::{Durability, replace_file};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::web::metrics_text;
use crate::cli::survey::Collector;

/// node_exporter is asked about that often.
const EVERY: Duration = Duration::from_secs(15);
/// node_exporter is another user.
const MODE: u32 = 0o644;

#[derive(Debug, thiserror::Error)]
pub enum TextfileError {
    #[error("node_exporter reads only files that end in .prom: {path} does not")]
    Name { path: PathBuf },
    #[error("cannot start to write {path}")]
    Start { path: PathBuf, source: io::Error },
}

/// Writes the file in a thread, until a signal ends the process. A file that cannot be written is tried again: its
/// folder may come later, and nothing else must wait for it.
pub fn start(path: &Path, collector: &Arc<Collector>) -> Result<(), TextfileError> {
    let failed = |source| TextfileError::Start { path: path.to_owned(), source };
    if path.extension().is_none_or(|extension| extension != "prom") {
        return Err(TextfileError::Name { path: path.to_owned() });
    }
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(failed)?;
    let file = Arc::new(Mutex::new(File { path: path.to_owned(), fails: false }));
    remove_at(signals, file.clone()).map_err(failed)?;
    let collector = collector.clone();
    let spawned = thread::Builder::new().name("textfile".to_owned()).spawn(move || {
        loop {
            let text = metrics_text(&collector);
            lock(&file).write(&text);
            thread::sleep(EVERY);
        }
    });
    spawned.map(drop).map_err(failed)
}

struct File {
    path: PathBuf,
    /// Whether it could not be written last.
    fails: bool,
}

impl File {
    /// Logs only the first failure, and the end of failures.
    fn write(&mut self, text: &str) {
        let path = self.path.display();
        let written = write(&self.path, text);
        match &written {
            Err(error) if !self.fails => tracing::warn!(%error, %path, "cannot write the metrics; trying again"),
            Ok(()) if self.fails => tracing::info!(%path, "the metrics are written again"),
            _ => {}
        }
        self.fails = written.is_err();
    }
}

fn lock(file: &Mutex<File>) -> MutexGuard<'_, File> {
    file.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes the file at the first of these signals, and ends the process as the signal does.
fn remove_at(mut signals: Signals, file: Arc<Mutex<File>>) -> io::Result<()> {
    let wait = move || {
        let Some(signal) = signals.forever().next() else { return };
        // Held until the end, so that it is not written again.
        let file = lock(&file);
        if let Err(error) = fs::remove_file(&file.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, path = %file.path.display(), "cannot remove the metrics, which are old from now on");
        }
        // Ends the process.
        let _ = signal_hook::low_level::emulate_default_handler(signal);
    };
    thread::Builder::new().name("textfile-end".to_owned()).spawn(wait).map(drop)
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    replace_file(path, Durability::Process, |file| {
        file.set_permissions(Permissions::from_mode(MODE))?;
        file.write_all(text.as_bytes())
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::cli::survey::fake::Keepers;

    #[test]
    fn file_is_whole_and_readable_by_others() {
        let (keepers, folder) = (Keepers::start(&["web"]), tempfile::tempdir().unwrap());
        let path = folder.path().join("hearth.prom");
        start(&path, &Collector::new(keepers.root())).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !path.exists() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("\nhearth_keeper_up{machine=\"web\"} 1\n") && text.ends_with('\n'), "{text}");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, MODE);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn wrong_name_is_refused_at_the_start() {
        let keepers = Keepers::start(&[]);
        let error = start(Path::new("/nowhere/hearth.txt"), &Collector::new(keepers.root())).unwrap_err();
        assert_eq!(
            crate::chain(&error),
            "node_exporter reads only files that end in .prom: /nowhere/hearth.txt does not"
        );
    }

    #[test]
    fn file_is_written_once_its_folder_is_there() {
        let (keepers, folder) = (Keepers::start(&[]), tempfile::tempdir().unwrap());
        let path = folder.path().join("later/hearth.prom");
        start(&path, &Collector::new(keepers.root())).unwrap();
        let mut file = File { path: path.clone(), fails: false };
        file.write("");
        assert!(file.fails);
        fs::create_dir(folder.path().join("later")).unwrap();
        file.write("");
        assert!(!file.fails && path.exists());
    }
}
