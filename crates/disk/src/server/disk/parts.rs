//! Parts: what a request passes through between its queue and the image, and how it is answered at the end.
//!
//! Each part owns its fields. The ways through them are `dispatch` (to the image) and `completion` (from it).

use super::blocks::Blocks;
use super::context::Context;
use super::job::Jobs;
use super::operations::Operations;
use super::overlap::RequestId;
use super::schedule::Schedule;
use super::schedule::view::View;
use crate::server::connection::Connection;
use crate::server::request::{Kind, Status};

pub struct Parts {
    pub context: Context,
    pub jobs: Jobs,
    pub blocks: Blocks,
    pub schedule: Schedule,
    pub operations: Operations,
}

impl Parts {
    /// The parts that the schedule may look at.
    pub fn view(&self) -> View<'_> {
        View { jobs: &self.jobs, blocks: &self.blocks, operations: &self.operations }
    }

    /// Answers a request if all of it is done. `connection` is `None` if its own is gone.
    pub fn finish_if_done(&mut self, connection: Option<&mut Connection>, id: RequestId) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        if job.pending > 0 || !job.all_handed_over() {
            return;
        }
        if std::mem::take(&mut job.flush_after) && job.status == Status::Ok && connection.is_some() {
            self.operations.flush(&self.context, &mut self.jobs, id);
            return self.finish_if_done(connection, id);
        }
        self.blocks.end(id, &self.context.counters);
        let Some(job) = self.jobs.remove(id) else { return };
        let is_read = job.request.kind == Kind::Read;
        if let Some(taken) = job.taken.filter(|_| is_read && !job.from_image) {
            let took = self.context.now().saturating_duration_since(taken);
            self.blocks.answered(job.waits_since.is_none(), took);
        }
        if let Some(connection) = connection {
            let _ = connection.memory.write(job.request.status, &[job.status as u8]);
            let bytes = if is_read && job.status == Status::Ok { job.request.bytes as u32 + 1 } else { 1 };
            connection.answer(job.origin.queue, job.origin.head, bytes);
        }
        self.jobs.recycle(job.request);
    }
}
