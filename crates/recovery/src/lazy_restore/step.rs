//! Steps of a restore, in order. A drill names one of them, after which the keeper dies.

/// What has been done. Until `Begin` the next keeper begins anew; from then on it goes on with the guest that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The new machine's folder is there, with the order to restore it.
    Make,
    /// A keeper has read the order and the snapshot.
    Note,
    /// Half of what is read before the guest runs, beside QEMU's start.
    Prefetch,
    /// QEMU waits for its guest.
    Launch,
    /// It has the guest, which stands still.
    LetIn,
    /// The journal says so.
    Begin,
    /// The guest goes on.
    Run,
    /// Half of all memory is there.
    Fill,
    /// Nothing is missing, which nobody has noted.
    Finish,
}

impl Step {
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
