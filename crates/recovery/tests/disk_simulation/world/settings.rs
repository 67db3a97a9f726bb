//! Settings: what a seed decides before its run begins.

use std::time::Duration;

use hearth_disk::limit::Limits;

use super::World;
use crate::qemu;
use crate::random::Random;

/// Events of a step, with their weights, and whether a seed may disable an event or make it frequent. A run with few
/// kinds of events gets further with them.
pub(super) type Action = (u64, bool, fn(&mut World));
pub(super) const ACTIONS: [Action; 20] = [
    (230, false, World::turn),
    (130, false, World::send_messages),
    (180, false, World::submit),
    (150, false, World::apply),
    (130, false, World::report),
    (70, false, World::look),
    (35, false, World::pass_time),
    (25, true, World::scribble),
    (10, true, World::begin_stop),
    (6, true, World::begin_hop),
    (3, true, World::kill),
    (3, true, World::light_fuse),
    (1, true, World::cut_power),
    (3, true, World::crash),
    (3, true, World::resize),
    (4, true, World::copy_image),
    (12, true, World::copy_memory),
    (3, true, World::ready),
    (4, true, World::tend),
    (4, true, World::trouble),
];

/// Index of `begin_hop`.
pub(super) const HOP: usize = 9;

/// Properties of a run that its seed decides before it begins.
pub(super) struct Settings {
    pub(super) weights: [u64; ACTIONS.len()],
    pub(super) limits: Limits,
    pub(super) pool_bytes: usize,
    pub(super) depth: u32,
    pub(super) hold_back: Duration,
    pub(super) boot_set_bytes: Option<u64>,
    pub(super) features: u64,
    /// The guest switches its write cache off, and on and off again.
    pub(super) switches_cache: bool,
    /// One operation in this many fails.
    pub(super) failing: Option<u64>,
    /// The image's file system is sometimes full. Never together with limits, because a retry does not pay again.
    pub(super) fills: bool,
    /// A process that a dead QEMU left behind writes to its memory.
    pub(super) haunted: bool,
    /// QEMU sends invalid messages.
    pub(super) hostile: bool,
}

impl Settings {
    pub(super) fn new(random: &mut Random) -> Self {
        let is_limited = random.one_in(3);
        let limits = match is_limited {
            true => Limits {
                bytes_per_second: random.one_in(2).then(|| random.pick(&[64 << 10, 1 << 20, 10 << 20])),
                operations_per_second: random.one_in(2).then(|| random.pick(&[10, 100, 1000])),
            },
            false => Limits::default(),
        };
        let mut features = qemu::VERSION_1 | qemu::PROTOCOL_FEATURES;
        for (feature, one_in) in [(qemu::EVENT_INDEX, 4), (qemu::INDIRECT, 2), (qemu::CONFIG_WCE, 3), (qemu::FLUSH, 6)]
        {
            features |= if random.one_in(one_in) { 0 } else { feature };
        }
        let boot_set_bytes = (!random.one_in(4)).then(|| random.pick(&[68 << 10, 200 << 10, 1 << 20]));
        let weights =
            ACTIONS.map(|(weight, varies, _)| if varies { weight * random.pick(&[0, 1, 1, 4]) } else { weight });
        Self {
            weights,
            limits,
            // Limits are counted by operation, so operations must not be split because buffers are missing.
            pool_bytes: if is_limited { 1 << 20 } else { random.pick(&[32 << 10, 128 << 10, 1 << 20]) },
            depth: random.pick(&[1, 2, 8, 128]),
            hold_back: random.pick(&[Duration::ZERO, Duration::from_micros(250)]),
            boot_set_bytes,
            switches_cache: features & qemu::CONFIG_WCE != 0 && random.one_in(4),
            features,
            failing: random.one_in(3).then(|| random.pick(&[5, 30])),
            haunted: random.one_in(4),
            hostile: random.one_in(6),
            fills: !is_limited && random.one_in(3),
        }
    }
}
