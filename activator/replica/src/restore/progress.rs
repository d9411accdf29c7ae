//! How far a restore is, for whoever watches it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How far a restore is. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    bytes: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Bytes read so far, and bytes of all files; both 0 before there is a plan.
    #[must_use]
    pub fn now(&self) -> (u64, u64) {
        (self.0.bytes.load(Ordering::Relaxed), self.0.total.load(Ordering::Relaxed))
    }

    /// A plan begins, the first or a new one.
    pub(super) fn begin(&self, total: u64) {
        self.0.bytes.store(0, Ordering::Relaxed);
        self.0.total.store(total, Ordering::Relaxed);
    }

    pub(super) fn read(&self, bytes: u64) {
        self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}
