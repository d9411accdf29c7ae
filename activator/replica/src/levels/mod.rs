//! Levels and retention, as Litestream's tools expect them: level 1 gathers L0s, 2 and 3 gather the
//! level below, 9 holds whole images; what they cover is deleted once it is old enough.
//!
//! [`Inventory`] is what the store holds as far as its writer knows, and decides by that alone what
//! is due, so that nothing is listed while the writer knows what it wrote. `Worker` carries one
//! [`Job`] out. Everything is built from acknowledged files, write-once; an L0 goes only when a
//! higher level covers it and it is old enough, never the newest, never a fence.
//!
//! Reads no clock but the one that it is given. A database with nothing new is never due.

mod audit;
mod choose;
mod inventory;
mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Semaphore;

pub(crate) use audit::unmark_damaged;
pub use audit::{Fault, is_marked_damaged, mark_damaged};
pub use choose::{Due, Job};
pub use inventory::{Age, Inventory, Known};
pub(crate) use work::{Change, Worker, clear, local_dir, local_path};

/// Levels that gather the level below.
pub const GATHERING_LEVELS: usize = 3;

/// When levels are made and how long their files are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelSettings {
    /// Windows of levels 1, 2 and 3, milliseconds of the wall clock.
    pub windows_ms: [i64; GATHERING_LEVELS],
    /// Window of the snapshots of a host that stays awake.
    pub snapshot_ms: i64,
    /// Least age of an L0 that is deleted.
    pub l0_retention_ms: i64,
    /// How far back a restore to a time is possible.
    pub retention_ms: i64,
    /// Acknowledged files that are kept on the local disk until they are merged, bytes a host.
    pub local_bytes_max: u64,
    /// Bytes that one merge reads (two files are read whatever they weigh).
    pub merge_bytes_max: u64,
    /// After so long a replica that is written to is listed, to see whether all of it is there.
    pub audit_ms: i64,
    /// First wait after a job that failed; doubles up to 64 times that.
    pub retry_ms: u64,
}

impl Default for LevelSettings {
    /// The windows and times of Litestream.
    fn default() -> Self {
        Self {
            windows_ms: [30_000, 300_000, 3_600_000],
            snapshot_ms: 86_400_000,
            l0_retention_ms: 300_000,
            retention_ms: 86_400_000,
            local_bytes_max: 16 << 20,
            merge_bytes_max: 256 << 20,
            audit_ms: 3_600_000,
            retry_ms: 10_000,
        }
    }
}

/// What all hosts of a box share: one job at a time, and what came of them.
#[derive(Clone, Debug)]
pub struct Budget {
    pub(crate) turn: Arc<Semaphore>,
    done: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    deleted: Arc<AtomicU64>,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            turn: Arc::new(Semaphore::new(1)),
            done: Arc::default(),
            failed: Arc::default(),
            deleted: Arc::default(),
        }
    }
}

impl Budget {
    /// Files of higher levels that were written.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Jobs that failed.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Files that were deleted.
    #[must_use]
    pub fn deleted(&self) -> u64 {
        self.deleted.load(Ordering::Relaxed)
    }

    pub(crate) fn count(&self, change: &Change) {
        let files = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        self.done.fetch_add(files(change.added.len()), Ordering::Relaxed);
        self.deleted.fetch_add(files(change.removed.len()), Ordering::Relaxed);
    }

    pub(crate) fn count_failure(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }
}
