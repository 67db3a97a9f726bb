//! A problem with a machine's configuration or its host, as the operator reads it.

use std::fmt;

use serde::Serialize;

/// A problem. Text form: `error: SUBJECT: MESSAGE; HINT`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    pub severity: Severity,
    /// The thing concerned: a key of the file, a path, a program.
    pub subject: String,
    pub message: String,
    /// How to mend it.
    pub hint: String,
    /// Whether it may pass while the configuration file stays as it is.
    #[serde(skip)]
    pub may_pass: bool,
    /// Whether something that the configuration file names is not there, or of no use.
    #[serde(skip)]
    pub is_missing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The machine can run, with a drawback.
    Warning,
    /// The machine cannot run.
    Error,
}

impl Problem {
    /// An error that only an edit of the configuration file mends. Use `for_now` for all others.
    ///
    /// The processor model and the machine type are of this class, although QEMU knows them: what QEMU is installed does not
    /// change while a service manager tries again every two seconds.
    pub fn error(subject: impl Into<String>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        let (subject, message, hint) = (subject.into(), message.into(), hint.into());
        Self { severity: Severity::Error, subject, message, hint, may_pass: false, is_missing: false }
    }

    /// An error of the surroundings: it may pass, or somebody may mend it, while the file stays as it is. Examples: an image in
    /// use, a missing file or program (its mount may come later), a port that is taken, too little memory.
    pub fn for_now(subject: impl Into<String>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { may_pass: true, ..Self::error(subject, message, hint) }
    }

    /// As `for_now`, of a file, program, user or interface that the configuration file names.
    pub fn missing(subject: impl Into<String>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { is_missing: true, ..Self::for_now(subject, message, hint) }
    }

    pub fn warning(subject: impl Into<String>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(subject, message, hint) }
    }

    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        write!(formatter, "{severity}: {}: {}", self.subject, self.message)?;
        if self.hint.is_empty() { Ok(()) } else { write!(formatter, "; {}", self.hint) }
    }
}
