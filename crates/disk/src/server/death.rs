//! Unexpected end of a disk's thread: a panic, or a loop that cannot go on. It is reported to the disk's owner.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};

type Tell = Box<dyn FnOnce(String) + Send>;

#[derive(Default)]
enum State {
    #[default]
    Unwatched,
    Watched(Tell),
    /// And why.
    Dead(String),
}

/// State shared by the thread and its owner.
#[derive(Default)]
pub struct Death(Mutex<State>);

impl Death {
    /// Runs the thread's work; an error or a panic is its death.
    pub fn of(&self, work: impl FnOnce() -> Result<(), String>) {
        // The work's own values are dropped on the way, and nobody else sees them.
        let why = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => return,
            Ok(Err(why)) => why,
            Err(panic) => format!("it panicked: {}", message(&*panic)),
        };
        tracing::error!(why, "a disk's thread has ended");
        let before = std::mem::replace(&mut *self.state(), State::Dead(why.clone()));
        if let State::Watched(tell) = before {
            tell(why);
        }
    }

    pub fn watch(&self, tell: Tell) {
        let mut state = self.state();
        if let State::Dead(why) = &*state {
            let why = why.clone();
            drop(state);
            return tell(why);
        }
        *state = State::Watched(tell);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nobody panics with it")
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let literal = panic.downcast_ref::<&str>().copied();
    literal.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it did not say why")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// The reason that a watcher gets, whether it registered before or after the end.
    #[track_caller]
    fn check(work: fn() -> Result<(), String>, expected: Option<&str>) {
        for watches_before in [true, false] {
            let (death, (tell, told)) = (Death::default(), mpsc::channel());
            let watch = || death.watch(Box::new(move |why| tell.send(why).unwrap()));
            if watches_before {
                watch();
                death.of(work);
            } else {
                death.of(work);
                watch();
            }
            assert_eq!(told.try_recv().ok().as_deref(), expected, "before: {watches_before}");
        }
    }

    #[test]
    fn every_end_but_the_wanted_one_is_told() {
        check(|| Ok(()), None);
        check(|| Err("no events".to_owned()), Some("no events"));
        check(|| panic!("nothing left"), Some("it panicked: nothing left"));
        check(|| panic!("queue {} is not there", 2), Some("it panicked: queue 2 is not there"));
    }
}
