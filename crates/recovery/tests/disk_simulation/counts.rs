//! Counts: how often each event happened in the runs, to check that the runs cover all of them.

macro_rules! counts {
    ($($name:ident),*) => {
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Counts {
            $(pub $name: u64,)*
        }

        impl Counts {
            pub fn add(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }

            pub fn has_all(&self) -> bool {
                [$(self.$name),*].iter().all(|count| *count > 0)
            }
        }
    };
}

counts!(
    answers,
    kills,
    kills_at_fault_points,
    power_cuts,
    crashes,
    hops,
    stops,
    resizes,
    image_copies,
    failed_image_copies,
    // Copies of a living guest's memory: the keeper's, and QEMU's with its log.
    saved_memories,
    migrated_memories,
    // Logged pages that the guest had not written itself.
    logged_pages,
    out_of_space
);
