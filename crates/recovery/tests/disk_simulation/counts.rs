//! Counts: how often each thing happened in the runs, to see that they are about all of them.

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
    power_cuts,
    crashes,
    hops,
    stops,
    resizes,
    image_copies,
    failed_image_copies,
    // Live copies of guest memory: the keeper's own, and QEMU's by its log.
    saved_memories,
    migrated_memories,
    // Pages in the logs that the guest had not written to itself.
    logged_pages,
    out_of_space
);
