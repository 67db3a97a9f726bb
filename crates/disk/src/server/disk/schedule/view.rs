//! View: what the schedule may look at, and must not change.

use crate::server::disk::blocks::Blocks;
use crate::server::disk::job::Jobs;
use crate::server::disk::operations::Operations;

#[derive(Clone, Copy)]
pub struct View<'a> {
    pub jobs: &'a Jobs,
    pub blocks: &'a Blocks,
    pub operations: &'a Operations,
}
