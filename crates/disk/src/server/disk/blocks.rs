//! Blocks: asks host memory for the disk's blocks and reports changes to it, request by request.
//!
//! request begins -> what it changes is void -> a read's hits are served -> operation ends -> memory is told -> request ends
//!
//! Requests that meet one another while one of them changes a block (`overlap`) leave nothing behind in memory.

use std::ops::Range;
use std::sync::Arc;

use super::job::{BLOCK, Job};
use super::overlap::{Overlaps, RequestId};
use super::running::Part;
use crate::server::counters::{Counters, add};
use crate::server::memory::{GuestMap, Unmapped};
use crate::server::recorder::{RamPart, Recorder, Tracking};
use crate::server::request::{Kind, Request, Status};
use crate::server::transfer::{self, Cursor};
use crate::warm::Answered;

/// A run of misses goes on over fewer bytes of hits than these. They are read for nothing, but another operation would
/// take longer: on a volume with 3000 operations and 125 MiB a second, as long as 42 KiB.
pub const GAP_BYTES: u64 = 32 << 10;

pub struct Blocks {
    pub recorder: Recorder,
    pub overlaps: Overlaps,
    tracked: bool,
}

impl Blocks {
    pub fn new(recorder: Recorder, tracked: bool) -> Self {
        Self { recorder, overlaps: Overlaps::default(), tracked }
    }

    /// Sets what the next connection's requests are recorded in.
    pub fn attach(&mut self, tracking: Option<Tracking>) {
        self.recorder.attach(tracking.filter(|_| self.tracked));
    }

    /// The RAM whose pages are recorded; empty if none are.
    pub fn ram(&self) -> Arc<[RamPart]> {
        self.recorder.ram()
    }

    /// A request begins.
    pub fn begin(&mut self, id: RequestId, job: &Job) {
        let (blocks, changes) = (job.blocks(), job.request.kind.changes_blocks());
        if changes {
            // Before anything of it can reach the disk, and before a later read can ask for what was there.
            self.recorder.void(blocks.clone());
        }
        self.overlaps.begin(id, blocks, changes);
    }

    /// These blocks are gone from the disk. Data on its way from there is uncertain.
    pub fn cut_off(&mut self, gone: Range<u64>) {
        self.overlaps.taint(&gone);
        self.recorder.void(gone);
    }

    /// Finds what the image has to do next for a request. A read's hits are served.
    pub fn find_run(&mut self, id: RequestId, job: &mut Job, memory: &GuestMap, counters: &Counters) {
        match job.request.kind {
            Kind::Read => self.look(id, job, memory, counters),
            _ => (job.run, job.next) = (0..job.work(), job.work()),
        }
    }

    /// Looks at what follows in a read: hits are served, the misses after them become the run. Hits in a short gap
    /// between misses are served too (the page moves), and the bytes from the image are the same.
    fn look(&mut self, id: RequestId, job: &mut Job, memory: &GuestMap, counters: &Counters) {
        let tainted = self.overlaps.is_tainted(id);
        let request = &job.request;
        let mut at = job.next;
        let blocks = (request.offset + at) / BLOCK..(request.offset + request.bytes).div_ceil(BLOCK);
        job.admitted = false;
        // A block that a write in flight is changing is void in the source, so it would miss; not asking makes that certain.
        // For a single block the source is asked once.
        let is_single = blocks.end - blocks.start == 1;
        if self.overlaps.changing(&blocks) || !is_single && !self.recorder.may_be_warm(blocks) {
            job.run = at..request.bytes;
            job.next = request.bytes;
            return;
        }
        let mut cursor = Cursor::at(request, at);
        let mut run = at..at;
        // Hits since the last miss: warm, unless the run goes on behind them.
        let (mut warm, mut gap) = (0, 0);
        while at < request.bytes {
            let step = transfer::step(request, at);
            let place = (request.offset + at, step);
            let served = transfer::serve(memory, &mut self.recorder, place, cursor, !tainted);
            let hit = served.unwrap_or_else(|_| {
                job.status = Status::IoError;
                true
            });
            cursor.advance(step);
            at += step;
            if !hit {
                run.end = at;
                gap = 0;
                continue;
            }
            if run.is_empty() {
                warm += step;
                run = at..at;
                continue;
            }
            gap += step;
            if gap >= GAP_BYTES {
                break;
            }
        }
        (job.run, job.next) = (run, at);
        add(&counters.bytes_read_warm, warm + gap);
        self.recorder.commit();
    }

    /// An operation ended well: what is now known of the blocks, whoever asked. Memory that holds some of them is kept current.
    pub fn learn(&mut self, job: &Job, part: &Part, data: &[u8]) {
        let certain = !self.overlaps.is_tainted(part.job);
        if job.request.kind == Kind::Read {
            let offset = job.request.offset + part.position - part.around.before;
            if self.recorder.wants(job.request.bytes) {
                transfer::tell_read(&self.recorder, offset, data, certain);
            } else {
                self.recorder.missed(offset / BLOCK..(offset + data.len() as u64).div_ceil(BLOCK));
            }
        } else if certain {
            transfer::tell_written(&self.recorder, &job.request, part.position, data);
        }
    }

    /// An operation ended well for a guest that is still there: its data is copied to the guest, and it is noted which of the
    /// guest's pages hold which blocks.
    pub fn deliver(&mut self, job: &mut Job, part: &Part, memory: &GuestMap, data: &[u8], counters: &Counters) {
        let recordable = !self.overlaps.is_tainted(part.job);
        let (recorder, position) = (&mut self.recorder, part.position);
        if job.request.kind == Kind::Write {
            add(&counters.bytes_written, part.bytes);
            if recordable {
                transfer::note_written(memory, recorder, &job.request, position, data);
            }
        } else {
            add(&counters.bytes_read_image, part.bytes);
            if transfer::deliver(memory, recorder, &job.request, position, data, recordable).is_err() {
                job.status = Status::IoError;
            }
        }
        recorder.commit();
    }

    /// Copies bytes that are no block's to the guest.
    pub fn deliver_reply(&mut self, request: &Request, memory: &GuestMap, data: &[u8]) -> Result<(), Unmapped> {
        let copied = transfer::deliver(memory, &mut self.recorder, request, 0, data, false);
        self.recorder.commit();
        copied
    }

    /// A request ends.
    pub fn end(&mut self, id: RequestId, counters: &Counters) {
        if self.overlaps.is_tainted(id) {
            add(&counters.tainted, 1);
        }
        self.overlaps.end(id);
    }

    /// A read that has ended was answered by memory alone.
    pub fn answered(&self, in_line: bool, took: std::time::Duration) {
        self.recorder.answered(Answered { in_line, beside_writes: self.overlaps.is_changing(), took });
    }
}
