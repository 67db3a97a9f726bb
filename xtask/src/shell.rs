//! Runs other programs, with errors that name the program and include its output.

use std::process::{Command, Stdio};

#[derive(Debug, thiserror::Error)]
pub enum ShellError {
    #[error("cannot start {program}; `make setup` installs missing tools")]
    Start { program: String, source: std::io::Error },
    #[error("`{command}` failed with {status}{said}")]
    Failed { command: String, status: std::process::ExitStatus, said: String },
}

/// Runs a program whose output goes to the user.
pub fn run(command: &mut Command) -> Result<(), ShellError> {
    let status = command.status().map_err(|source| start_error(command, source))?;
    if status.success() { Ok(()) } else { Err(failed(command, status, b"")) }
}

/// Runs a program, and returns its standard output. Its standard error becomes part of an error.
pub fn output(command: &mut Command) -> Result<String, ShellError> {
    let result = command.stdin(Stdio::null()).output().map_err(|source| start_error(command, source))?;
    if !result.status.success() {
        return Err(failed(command, result.status, &result.stderr));
    }
    Ok(String::from_utf8_lossy(&result.stdout).into_owned())
}

/// The path of an installed program. `/sbin` is searched even if it is not in an ordinary user's `PATH`.
pub fn find(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':')
        .chain(["/usr/sbin", "/sbin"])
        .map(|folder| std::path::Path::new(folder).join(program))
        .find(|file| file.is_file())
}

fn start_error(command: &Command, source: std::io::Error) -> ShellError {
    ShellError::Start { program: command.get_program().to_string_lossy().into_owned(), source }
}

fn failed(command: &Command, status: std::process::ExitStatus, stderr: &[u8]) -> ShellError {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let command = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    // The end of a long message has the reason.
    let text = String::from_utf8_lossy(stderr);
    let lines: Vec<_> = text.trim().lines().collect();
    let tail = lines[lines.len().saturating_sub(20)..].join("\n");
    let said = if tail.is_empty() { String::new() } else { format!(":\n{tail}") };
    ShellError::Failed { command, status, said }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_includes_command_and_its_message() {
        let error = output(Command::new("sh").args(["-c", "echo no space left >&2; exit 3"])).unwrap_err().to_string();
        assert!(
            error.contains("sh -c") && error.contains("exit status: 3") && error.contains("no space left"),
            "{error}"
        );
    }

    #[test]
    fn missing_program_is_named_with_the_remedy() {
        let error = run(&mut Command::new("hearth-no-such-program")).unwrap_err().to_string();
        assert!(error.contains("hearth-no-such-program") && error.contains("make setup"), "{error}");
    }
}
