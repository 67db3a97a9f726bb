//! Commands from the API to the machine's event loop, and how the answers come back.
//!
//! HTTP thread -> Control -> event loop (one at a time, in order) -> answer over a channel made for this one question.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hearth_api::{ApiError, DiskSize, ErrorWord, MachineStatus, Order, RemountPlan};

use crate::age::Signs;

/// The loop answers within milliseconds, except while it takes a guest over from a dead keeper or a disk drains.
const PATIENCE: Duration = Duration::from_secs(30);

/// A query or a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Status,
    Age,
    RemountPlan,
    /// Read this disk's image size again.
    Resize {
        disk: String,
    },
    Order(Order),
}

/// The loop's answer to a command.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    Status(Box<MachineStatus>),
    /// The request was accepted; events report its progress.
    Accepted,
    Resized(DiskSize),
    Age(Box<Signs>),
    RemountPlan(Box<RemountPlan>),
}

pub type Reply = Sender<Result<Answer, ApiError>>;

/// What the loop leaves as the answer to requests that it will not take any more, because it ends. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct LastAnswer(Arc<OnceLock<ApiError>>);

impl LastAnswer {
    /// The loop ends because another keeper takes the machine over.
    pub fn hand_over(&self, machine: &str) {
        let what = format!("the keeper of {machine} is being replaced");
        let hint = "send the request again in a second";
        // It ends once.
        let _ = self.0.set(ApiError::new(ErrorWord::KeeperReplaced, what).hint(hint));
    }

    fn get(&self) -> ApiError {
        let ended = || ApiError::new(ErrorWord::MachineEnded, "the machine has ended");
        self.0.get().cloned().unwrap_or_else(ended)
    }
}

/// Sends commands to the event loop. `send` must not block; a loop that has ended may drop them.
pub struct Control {
    send: Box<dyn Fn(Command, Reply) + Send + Sync>,
    patience: Duration,
    last_answer: LastAnswer,
}

impl Control {
    pub fn new(send: impl Fn(Command, Reply) + Send + Sync + 'static) -> Self {
        Self { send: Box::new(send), patience: PATIENCE, last_answer: LastAnswer::default() }
    }

    /// Answers with this once the loop has ended.
    pub fn or_last(mut self, last_answer: LastAnswer) -> Self {
        self.last_answer = last_answer;
        self
    }

    #[cfg(test)]
    pub(crate) fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    pub fn ask(&self, command: Command) -> Result<Answer, ApiError> {
        let (reply, answer) = channel();
        (self.send)(command, reply);
        answer.recv_timeout(self.patience).unwrap_or_else(|error| Err(self.no_answer(error)))
    }

    /// The machine's status, which is available in any state.
    pub fn status(&self) -> Result<Box<MachineStatus>, ApiError> {
        match self.ask(Command::Status)? {
            Answer::Status(status) => Ok(status),
            other => {
                Err(ApiError::new(ErrorWord::Failed, format!("internal error: asked for the status, got {other:?}")))
            }
        }
    }

    fn no_answer(&self, error: RecvTimeoutError) -> ApiError {
        match error {
            RecvTimeoutError::Timeout => {
                ApiError::new(ErrorWord::Timeout, format!("the machine did not respond within {:?}", self.patience))
                    .hint("the request may still take effect; see the events")
            }
            // The loop ended before it took the command.
            RecvTimeoutError::Disconnected => self.last_answer.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use hearth_api::ReadyRequest;

    use super::*;

    #[test]
    fn ended_and_slow_loops_give_different_errors() {
        let ended = Control::new(|_, reply| drop(reply));
        assert_eq!(ended.ask(Command::Status).unwrap_err().error, ErrorWord::MachineEnded);

        let held = Mutex::new(Vec::new());
        let slow = Control::new(move |_, reply| held.lock().unwrap().push(reply)).with_patience(Duration::ZERO);
        assert_eq!(slow.ask(Command::Status).unwrap_err().error, ErrorWord::Timeout);
    }

    #[test]
    fn dropped_request_may_be_sent_again() {
        let last_answer = LastAnswer::default();
        let hands_over = last_answer.clone();
        let control = Control::new(move |_, reply| {
            hands_over.hand_over("web");
            drop(reply);
        });
        let refused = control.or_last(last_answer).ask(Command::Order(Order::Ready(ReadyRequest {}))).unwrap_err();
        assert_eq!(refused.error, ErrorWord::KeeperReplaced);
    }
}
