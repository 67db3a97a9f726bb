//! Programs that tests put in the place of others: scripts, written so that they can be run at once.

use std::path::Path;
use std::process::Command;

/// Writes a script. A child does it: had this process the file open for writing, a child that another test forks at that
/// moment would hold it open too, and it could not be run ("Text file busy").
pub fn write_program(path: &Path, text: &str) {
    let write = ["-c", "printf %s \"$1\" >\"$2\" && chmod 755 \"$2\"", "sh", text];
    let written = Command::new("sh").args(write).arg(path).status().expect("every system has a shell");
    assert!(written.success(), "{} cannot be written", path.display());
}
