//! Step: the steps of a restore, in order. A drill names one of them, after which the keeper dies.

/// A completed step. Before `Begin` the next keeper begins anew; from then on it continues with the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The new machine's folder exists, with the order to restore it.
    Make,
    /// A keeper has read the order and the snapshot.
    Note,
    /// Half of what is read before the guest runs has been read, beside QEMU's start.
    Prefetch,
    /// QEMU waits for its guest.
    Launch,
    /// QEMU has the guest, which stands still.
    LetIn,
    /// The journal records the guest.
    Begin,
    /// The guest runs.
    Run,
    /// Half of all memory is loaded.
    Fill,
    /// Nothing is missing, but that is not recorded yet.
    Finish,
}

impl Step {
    /// All steps, in order.
    pub const ALL: [Self; 9] = [
        Self::Make,
        Self::Note,
        Self::Prefetch,
        Self::Launch,
        Self::LetIn,
        Self::Begin,
        Self::Run,
        Self::Fill,
        Self::Finish,
    ];

    /// Name of the step, as a drill gives it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Make => "restore-make",
            Self::Note => "restore-note",
            Self::Prefetch => "restore-prefetch",
            Self::Launch => "restore-launch",
            Self::LetIn => "restore-let-in",
            Self::Begin => "restore-begin",
            Self::Run => "restore-run",
            Self::Fill => "restore-fill",
            Self::Finish => "restore-finish",
        }
    }
}
