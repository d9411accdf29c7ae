//! Why a database cannot be followed.

use std::io;
use std::path::{Path, PathBuf};

use crate::ltx::{LtxError, LtxFault};

/// Why a database cannot be followed (now).
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// There is no database file.
    #[error("{}: no database file", path.display())]
    Absent {
        /// The database.
        path: PathBuf,
    },
    /// The file is none that we dare to open.
    #[error("{}: {why}; the database must be a regular file with one link", path.display())]
    Unsafe {
        /// The database.
        path: PathBuf,
        /// What it is.
        why: &'static str,
    },
    /// Another file, or none, stands under the name of the database or of its WAL.
    #[error("{}: the file was replaced or removed while the app ran", path.display())]
    Replaced {
        /// The database, or its WAL.
        path: PathBuf,
    },
    /// The app has the file that stood there before open, and writes to it.
    #[error(
        "{}: it, or its -wal, was replaced or removed while the app ran, and the app goes on with \
         the former file, which no name leads to: what it writes is kept nowhere; `dormouse sleep` \
         ends it, and the next wake goes on with the file that stands here",
        path.display()
    )]
    Former {
        /// The database.
        path: PathBuf,
    },
    /// The database is not in WAL mode.
    #[error("{}: not in WAL mode; set `PRAGMA journal_mode=WAL` in the app", path.display())]
    NotWal {
        /// The database.
        path: PathBuf,
    },
    /// Somebody holds the database exclusively.
    #[error(
        "{}: locked by the app; `PRAGMA locking_mode=EXCLUSIVE` cannot be replicated",
        path.display()
    )]
    Locked {
        /// The database.
        path: PathBuf,
    },
    /// Not a database, or an encrypted one.
    #[error("{}: not a plain SQLite database (encrypted?)", path.display())]
    NotSqlite {
        /// The database.
        path: PathBuf,
    },
    /// A file system without working locks and change events.
    #[error("{}: on a network file system, where SQLite's WAL is unsafe", path.display())]
    NetworkFs {
        /// The database.
        path: PathBuf,
    },
    /// An I/O error.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// `SQLite` said no.
    #[error("{}: {what}: {source}", path.display())]
    Sqlite {
        /// The database.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The cause.
        source: rusqlite::Error,
    },
    /// The L0 could not be written.
    #[error(transparent)]
    Ltx(#[from] LtxError),
}

impl FollowError {
    /// There is no file, or one without a byte.
    pub(crate) fn is_before_the_first_write(&self) -> bool {
        match self {
            Self::Absent { .. } => true,
            Self::NotWal { path } => std::fs::metadata(path).is_ok_and(|stat| stat.len() == 0),
            Self::Unsafe { .. }
            | Self::Replaced { .. }
            | Self::Former { .. }
            | Self::Locked { .. }
            | Self::NotSqlite { .. }
            | Self::NetworkFs { .. }
            | Self::Io { .. }
            | Self::Sqlite { .. }
            | Self::Ltx(_) => false,
        }
    }

    /// The disk is in the way, not the database: it takes nothing more, being full, over its quota, or
    /// read-only.
    #[must_use]
    pub fn blames_disk(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        let kind = match self {
            Self::Io { source, .. } | Self::Ltx(LtxError { fault: LtxFault::Io(source), .. }) => {
                source.kind()
            }
            Self::Ltx(_)
            | Self::Absent { .. }
            | Self::Unsafe { .. }
            | Self::Replaced { .. }
            | Self::Former { .. }
            | Self::NotWal { .. }
            | Self::Locked { .. }
            | Self::NotSqlite { .. }
            | Self::NetworkFs { .. }
            | Self::Sqlite { .. } => return false,
        };
        [QuotaExceeded, ReadOnlyFilesystem, StorageFull].contains(&kind)
    }

    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    /// Sorts an error of `SQLite` into its named state.
    pub(crate) fn sqlite(path: &Path, what: &'static str, source: rusqlite::Error) -> Self {
        use rusqlite::ErrorCode::{DatabaseBusy, DatabaseLocked, NotADatabase};
        let path = path.to_owned();
        match source.sqlite_error_code() {
            Some(DatabaseBusy | DatabaseLocked) => Self::Locked { path },
            Some(NotADatabase) => Self::NotSqlite { path },
            Some(_) | None => Self::Sqlite { path, what, source },
        }
    }
}
