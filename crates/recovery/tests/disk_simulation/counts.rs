//! Counts: how often something happened in the runs.

/// How often what happened, to see that a run is about something.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub answers: u64,
    pub kills: u64,
    pub crashes: u64,
    pub hops: u64,
    pub stops: u64,
    pub resizes: u64,
    pub saves: u64,
    pub out_of_space: u64,
}

impl Counts {
    pub fn add(&mut self, other: Self) {
        self.answers += other.answers;
        self.kills += other.kills;
        self.crashes += other.crashes;
        self.hops += other.hops;
        self.stops += other.stops;
        self.resizes += other.resizes;
        self.saves += other.saves;
        self.out_of_space += other.out_of_space;
    }

    pub fn has_all(&self) -> bool {
        let Self { answers, kills, crashes, hops, stops, resizes, saves, out_of_space } = *self;
        [answers, kills, crashes, hops, stops, resizes, saves, out_of_space].iter().all(|count| *count > 0)
    }
}
