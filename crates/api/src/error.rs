//! Errors of the API: a word for programs, a message and a hint for people.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Body of every failed request's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApiError {
    /// The reason, for programs.
    pub error: ErrorWord,
    /// The operation that failed, and the thing that it failed on.
    pub message: String,
    /// How to mend it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Reason why a request failed. Programs may rely on these words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorWord {
    /// The request is not HTTP, not JSON, or has unknown or missing fields.
    BadRequest,
    /// The client is a QEMU, which the API does not serve.
    Forbidden,
    /// No route has this path.
    NoSuchRoute,
    /// The path exists, but with another method.
    WrongMethod,
    /// The request's head or body is too large.
    TooLarge,
    /// The machine has no disk with this name.
    NoSuchDisk,
    /// The machine's state does not allow this now.
    WrongState,
    /// The machine's configuration rules this out.
    NotPossible,
    /// The machine did not respond in time; the request may still take effect.
    Timeout,
    /// Too many clients are connected.
    TooManyClients,
    /// Another keeper takes the machine over and did not get the request; send it again.
    KeeperReplaced,
    /// The machine has ended, and its keeper is about to.
    MachineEnded,
    /// The operation failed.
    Failed,
}

impl ErrorWord {
    /// All reasons.
    pub const ALL: [Self; 13] = [
        Self::BadRequest,
        Self::Forbidden,
        Self::NoSuchRoute,
        Self::WrongMethod,
        Self::TooLarge,
        Self::NoSuchDisk,
        Self::WrongState,
        Self::NotPossible,
        Self::Timeout,
        Self::TooManyClients,
        Self::KeeperReplaced,
        Self::MachineEnded,
        Self::Failed,
    ];

    /// The HTTP status that carries this word.
    pub fn status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::Forbidden => 403,
            Self::NoSuchRoute | Self::NoSuchDisk => 404,
            Self::WrongMethod => 405,
            Self::WrongState | Self::NotPossible => 409,
            Self::TooLarge => 413,
            Self::Failed => 500,
            Self::TooManyClients | Self::KeeperReplaced | Self::MachineEnded => 503,
            Self::Timeout => 504,
        }
    }

    /// The word used in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::BadRequest => "bad_request",
            Self::Forbidden => "forbidden",
            Self::NoSuchRoute => "no_such_route",
            Self::WrongMethod => "wrong_method",
            Self::TooLarge => "too_large",
            Self::NoSuchDisk => "no_such_disk",
            Self::WrongState => "wrong_state",
            Self::NotPossible => "not_possible",
            Self::Timeout => "timeout",
            Self::TooManyClients => "too_many_clients",
            Self::KeeperReplaced => "keeper_replaced",
            Self::MachineEnded => "machine_ended",
            Self::Failed => "failed",
        }
    }
}

impl ApiError {
    /// An error without a hint.
    pub fn new(error: ErrorWord, message: impl Into<String>) -> Self {
        Self { error, message: message.into(), hint: None }
    }

    /// Adds what to do about the error.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)?;
        self.hint.as_ref().map_or(Ok(()), |hint| write!(formatter, "; {hint}"))
    }
}

impl std::error::Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_written_as_they_are_named() {
        for word in ErrorWord::ALL {
            assert_eq!(serde_json::to_value(word).unwrap(), word.name());
        }
    }

    #[test]
    fn the_hint_follows_the_message() {
        let error = ApiError::new(ErrorWord::NoSuchDisk, "web has no disk data").hint("its disks are: root");
        assert_eq!(error.to_string(), "web has no disk data; its disks are: root");
    }
}
