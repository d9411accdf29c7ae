//! How databases are kept in the store, and restored for practice.

use serde::{Deserialize, Serialize};

use super::Span;

/// Levels, retention, and what replication may cost an app's disk.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Replica {
    /// Window in which uploads are gathered into one file of level 1.
    pub level_1: Span,
    /// Window in which files of level 1 are gathered into one of level 2.
    pub level_2: Span,
    /// Window in which files of level 2 are gathered into one of level 3.
    pub level_3: Span,
    /// Window of the snapshots of a host that stays awake.
    pub snapshot: Span,
    /// Least age of an upload that is deleted because a level has it.
    pub l0_retention: Span,
    /// After so long a replica that is written to is listed, to see whether all of it is there.
    pub audit: Span,
    /// How far back a restore to a time is possible.
    pub retention: Span,
    /// MiB of uploads that a host keeps on the local disk until they are gathered; 0: none, they are read
    /// back from the store.
    pub local_mib: u32,
    /// MiB of WAL past which the read lock is let go, so that the app can reuse its WAL; 1 or more.
    pub wal_max_mib: u32,
    /// MiB of free disk below which the same happens.
    pub disk_free_min_mib: u32,
}

impl Default for Replica {
    fn default() -> Self {
        Self {
            level_1: Span::from_secs(30),
            level_2: Span::from_secs(300),
            level_3: Span::from_secs(3600),
            snapshot: Span::from_secs(86_400),
            l0_retention: Span::from_secs(300),
            audit: Span::from_secs(3600),
            retention: Span::from_secs(86_400),
            local_mib: 16,
            wal_max_mib: 1024,
            disk_free_min_mib: 64,
        }
    }
}

/// Restores for practice: the host whose drill is longest ago, one at a time.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Drill {
    /// Between two drills of this box; absent: none.
    pub every: Option<Span>,
    /// Longest drill.
    pub budget: Span,
    /// MiB of the largest database that is restored for practice.
    pub max_mib: u32,
}

impl Default for Drill {
    fn default() -> Self {
        Self { every: None, budget: Span::from_secs(600), max_mib: 4096 }
    }
}
