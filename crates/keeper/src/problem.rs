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
    pub fn error(subject: impl Into<String>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { severity: Severity::Error, subject: subject.into(), message: message.into(), hint: hint.into() }
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
