//! Why a replica cannot be restored.

use std::io;
use std::path::{Path, PathBuf};

use dormouse_core::ids::Txid;
use dormouse_store::ReadError;

use crate::ltx::{LtxError, Pgno};
use crate::put::rfc3339;

/// Why a replica cannot be restored. None of these gives an older state instead.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// There is nothing in the store.
    #[error("the replica is empty")]
    Empty,
    /// Files are missing in the middle, or at the beginning.
    #[error(
        "the replica has a gap: it is complete up to TXID {have}, the next file begins at {next}"
    )]
    Gap {
        /// Last TXID that can be reached.
        have: Txid,
        /// First TXID after the gap.
        next: Txid,
    },
    /// The wanted TXID or time is not in the replica.
    #[error("the replica does not reach {wanted}: its files allow TXID {have}")]
    Unreached {
        /// What was asked for.
        wanted: String,
        /// What can be had.
        have: Txid,
    },
    /// Everything in the replica is younger.
    #[error("nothing is as old as {}: the oldest state there is, is of {}", rfc3339(*wanted_ms), rfc3339(*oldest_ms))]
    TooOld {
        /// What was asked for, milliseconds since 1970.
        wanted_ms: i64,
        /// What can be had.
        oldest_ms: i64,
    },
    /// The store did not give what it listed.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A file is torn or corrupt.
    #[error(transparent)]
    Ltx(#[from] LtxError),
    /// A file is not what its name says, or does not fit the one before.
    #[error("{file}: {why}")]
    Misfit {
        /// The file.
        file: String,
        /// What is wrong.
        why: &'static str,
    },
    /// No file has this page.
    #[error("no file of the replica holds page {page} of {page_count}")]
    MissingPage {
        /// The page.
        page: Pgno,
        /// Pages of the database.
        page_count: u32,
    },
    /// The disk is full.
    #[error(
        "{}: no room on the disk for the restored file; make room, or restore elsewhere (nothing \
         was left behind)",
        path.display()
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
    },
    /// The local file could not be written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl RestoreError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            return Self::NoRoom { path };
        }
        Self::Io { path, source }
    }

    /// The list is stale (files were compacted away): list and plan again.
    #[must_use]
    pub const fn is_stale_list(&self) -> bool {
        matches!(self, Self::Read(ReadError::NotFound { .. }))
    }
}
