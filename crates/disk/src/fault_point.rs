//! Fault points: moments in the middle of the disk server's work at which a test may end its keeper.
//!
//! They are where another process sees some of what belongs together and not yet the rest. Builds without debug assertions
//! have none.

use std::cell::RefCell;
use std::rc::Rc;

/// Whether this build has them.
pub const ENABLED: bool = cfg!(debug_assertions);

type Hook = Rc<dyn Fn()>;

thread_local! {
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

/// Calls `hook` at each fault point that this thread reaches. It may panic.
pub fn set_hook(hook: impl Fn() + 'static) {
    HOOK.set(Some(Rc::new(hook)));
}

/// A fault point.
#[inline]
pub(crate) fn reach() {
    if ENABLED && let Some(hook) = HOOK.with_borrow(Clone::clone) {
        hook();
    }
}
