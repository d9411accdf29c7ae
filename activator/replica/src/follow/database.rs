//! Opening another process's database: safely, and so that our locks last.
//!
//! POSIX trap: closing *any* descriptor of the database file drops all locks that this process
//! holds on it. So the file is opened once and closed after the connections; everything else
//! here looks by `lstat`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::libc::O_NOFOLLOW;
use nix::sys::statfs;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};

use super::error::FollowError;
use crate::ltx::{PageSize, Pgno};
use crate::wal::read_up_to;

/// How long a lock of the app is waited for before the database counts as locked.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);
/// Tries of the write barrier that only yield: a writer in a loop leaves gaps of microseconds.
const BARRIER_SPINS: i32 = 2000; // × about 4 us = 8 ms
/// Tries after which the barrier is given up.
const BARRIER_TRIES: i32 = BARRIER_SPINS + 1000; // × 500 us = half a second
const BARRIER_PAUSE: Duration = Duration::from_micros(500);
/// Pages that our connections cache: they read one page of the schema.
const CACHE_PAGES: i32 = 1;
/// `SQLite`'s header: page size at 16, file format versions at 18 and 19.
pub(crate) const SQLITE_HEADER_LEN: usize = 100;
const FORMAT_WAL: u8 = 2;

/// The database file, open for reading pages and for keeping our locks.
#[derive(Debug)]
pub(crate) struct Database {
    /// Dropped after every connection: owners declare it last.
    file: File,
    path: PathBuf,
    wal_path: PathBuf,
    inode: u64,
}

impl Database {
    /// Opens the file without following a link in its last component.
    pub(crate) fn open(path: &Path) -> Result<Self, FollowError> {
        let parent = path.parent().unwrap_or(Path::new("/"));
        let name = path.file_name().unwrap_or_default();
        // SQLite refuses links anywhere in the path; those above the host's directory are ours.
        let parent = parent.canonicalize().map_err(|error| absent_or_io(path, error))?;
        let path = parent.join(name);
        let stat = fs::symlink_metadata(&path).map_err(|error| absent_or_io(&path, error))?;
        check_kind(&path, &stat)?;
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(O_NOFOLLOW)
            .open(&path)
            .map_err(|error| absent_or_io(&path, error))?;
        let opened = file.metadata().map_err(|error| FollowError::io(&path, error))?;
        check_kind(&path, &opened)?;
        check_file_system(&path, &file)?;
        let wal_path = wal_path(&path);
        Ok(Self { file, wal_path, inode: opened.ino(), path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) const fn inode(&self) -> u64 {
        self.inode
    }

    pub(crate) fn wal_path(&self) -> &Path {
        &self.wal_path
    }

    /// The name must still mean the file that is open.
    pub(crate) fn check_same(&self) -> Result<(), FollowError> {
        let stat =
            fs::symlink_metadata(&self.path).map_err(|error| absent_or_io(&self.path, error))?;
        if stat.ino() == self.inode {
            Ok(())
        } else {
            Err(FollowError::Replaced { path: self.path.clone() })
        }
    }

    /// The inode that stands under the WAL's name.
    pub(crate) fn wal_inode(&self) -> Option<u64> {
        Some(fs::symlink_metadata(&self.wal_path).ok()?.ino())
    }

    /// Page size, if the file's header says WAL mode.
    pub(crate) fn wal_page_size(&self) -> Result<PageSize, FollowError> {
        let mut head = [0; SQLITE_HEADER_LEN];
        let got = read_up_to(&self.file, &mut head, 0)
            .map_err(|error| FollowError::io(&self.path, error))?;
        if got == 0 {
            // An empty file is a database that nobody wrote to yet, in rollback mode.
            return Err(FollowError::NotWal { path: self.path.clone() });
        }
        let size =
            page_size(&head).ok_or_else(|| FollowError::NotSqlite { path: self.path.clone() })?;
        if head[18] != FORMAT_WAL || head[19] != FORMAT_WAL {
            return Err(FollowError::NotWal { path: self.path.clone() });
        }
        Ok(size)
    }

    /// Reads a page; zeros beyond the end of the file.
    pub(crate) fn read_page(
        &self,
        size: PageSize,
        page: Pgno,
        into: &mut [u8],
    ) -> Result<(), FollowError> {
        let got = read_up_to(&self.file, into, size.offset_of(page))
            .map_err(|error| FollowError::io(&self.path, error))?;
        into[got..].fill(0);
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<(), FollowError> {
        self.file.sync_data().map_err(|error| FollowError::io(&self.path, error))
    }

    pub(crate) fn len(&self) -> Result<u64, FollowError> {
        Ok(self.file.metadata().map_err(|error| FollowError::io(&self.path, error))?.len())
    }

    /// Opens the WAL; none when there is no such file.
    pub(crate) fn open_wal(&self) -> Result<Option<File>, FollowError> {
        match OpenOptions::new().read(true).custom_flags(O_NOFOLLOW).open(&self.wal_path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(FollowError::io(&self.wal_path, error)),
        }
    }

    /// A connection that never checkpoints by itself, not even when it closes.
    pub(crate) fn connect(&self) -> Result<Connection, FollowError> {
        let fail = |error| FollowError::sqlite(&self.path, "open", error);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_NOFOLLOW;
        let conn = Connection::open_with_flags(&self.path, flags).map_err(fail)?;
        conn.busy_timeout(BUSY_TIMEOUT).map_err(fail)?;
        conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(fail)?;
        conn.pragma_update(None, "wal_autocheckpoint", 0).map_err(fail)?;
        conn.pragma_update(None, "cache_size", CACHE_PAGES).map_err(fail)?;
        let mode: String =
            conn.query_row("PRAGMA journal_mode", (), |row| row.get(0)).map_err(fail)?;
        // SQLite took memory for 20 pages before it heard of the smaller cache.
        conn.release_memory().map_err(fail)?;
        if mode != "wal" {
            return Err(FollowError::NotWal { path: self.path.clone() });
        }
        self.check_same()?;
        Ok(conn)
    }

    /// Sets the mode that is kept in the file's header.
    pub(crate) fn switch_to_wal(&self) -> Result<(), FollowError> {
        let fail = |error| FollowError::sqlite(&self.path, "switch to WAL", error);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NOFOLLOW;
        let conn = Connection::open_with_flags(&self.path, flags).map_err(fail)?;
        let mode: String =
            conn.query_row("PRAGMA journal_mode = wal", (), |row| row.get(0)).map_err(fail)?;
        if mode == "wal" { Ok(()) } else { Err(FollowError::NotWal { path: self.path.clone() }) }
    }

    /// Keeps every other writer out until `ROLLBACK`; [`FollowError::Locked`] when a writer of
    /// the app holds on.
    pub(crate) fn barrier(&self, conn: &mut Connection) -> Result<(), FollowError> {
        let fail = |error| FollowError::sqlite(&self.path, "write barrier", error);
        conn.busy_handler(Some(wait_for_gap)).map_err(fail)?;
        conn.execute_batch("BEGIN IMMEDIATE").map_err(fail)
    }

    /// Begins the read transaction that keeps the WAL still.
    pub(crate) fn lock(&self, conn: &Connection) -> Result<(), FollowError> {
        let fail = |error| FollowError::sqlite(&self.path, "read lock", error);
        conn.execute_batch("BEGIN").map_err(fail)?;
        // Reads the header alone: a question about the schema would keep all of it in memory.
        conn.query_row("PRAGMA schema_version", (), |_| Ok(())).map_err(fail)
    }

    pub(crate) fn run(
        &self,
        conn: &Connection,
        what: &'static str,
        sql: &str,
    ) -> Result<(), FollowError> {
        conn.execute_batch(sql).map_err(|error| FollowError::sqlite(&self.path, what, error))
    }

    /// Runs a checkpoint; whether it copied every frame.
    pub(crate) fn checkpoint(&self, conn: &Connection, mode: &str) -> Result<bool, FollowError> {
        let (is_complete, _) = self.checkpoint_counted(conn, mode)?;
        Ok(is_complete)
    }

    /// As [`Database::checkpoint`]; with the frames that `SQLite` knows of.
    pub(crate) fn checkpoint_counted(
        &self,
        conn: &Connection,
        mode: &str,
    ) -> Result<(bool, u64), FollowError> {
        let row: (i64, i64, i64) = conn
            .query_row(&format!("PRAGMA wal_checkpoint({mode})"), (), |row| {
                Ok((row.get(0)?, row.get(1)?, row.get(2)?))
            })
            .map_err(|error| FollowError::sqlite(&self.path, "checkpoint", error))?;
        let (busy, log, copied) = row;
        Ok((busy == 0 && log == copied, u64::try_from(log).unwrap_or(0)))
    }

    pub(crate) fn page_count(&self, conn: &Connection) -> Result<u32, FollowError> {
        conn.query_row("PRAGMA page_count", (), |row| row.get(0))
            .map_err(|error| FollowError::sqlite(&self.path, "page count", error))
    }
}

#[expect(clippy::disallowed_methods, reason = "the pause of a lock that has no wait of its own")]
fn wait_for_gap(tries: i32) -> bool {
    if tries < BARRIER_SPINS {
        std::thread::yield_now();
    } else {
        std::thread::sleep(BARRIER_PAUSE);
    }
    tries < BARRIER_TRIES
}

/// The page size that a database's header tells; none where this is no header of a database.
pub(crate) fn page_size(head: &[u8; SQLITE_HEADER_LEN]) -> Option<PageSize> {
    if !head.starts_with(b"SQLite format 3\0") {
        return None;
    }
    let size = match u32::from(u16::from_be_bytes([head[16], head[17]])) {
        1 => 65536,
        size => size,
    };
    PageSize::new(size)
}

/// `<database>-wal`.
pub(crate) fn wal_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    PathBuf::from(name)
}

fn absent_or_io(path: &Path, error: io::Error) -> FollowError {
    if error.kind() == io::ErrorKind::NotFound {
        FollowError::Absent { path: path.to_owned() }
    } else {
        FollowError::io(path, error)
    }
}

fn check_kind(path: &Path, stat: &fs::Metadata) -> Result<(), FollowError> {
    let why = if stat.is_symlink() {
        "a symbolic link"
    } else if !stat.is_file() {
        "not a regular file"
    } else if stat.nlink() != 1 {
        "a file with several links"
    } else {
        return Ok(());
    };
    Err(FollowError::Unsafe { path: path.to_owned(), why })
}

fn check_file_system(path: &Path, file: &File) -> Result<(), FollowError> {
    let kind = statfs::fstatfs(file)
        .map_err(|errno| FollowError::io(path, io::Error::from(errno)))?
        .filesystem_type();
    if [statfs::NFS_SUPER_MAGIC, statfs::SMB_SUPER_MAGIC, statfs::CODA_SUPER_MAGIC].contains(&kind)
    {
        return Err(FollowError::NetworkFs { path: path.to_owned() });
    }
    Ok(())
}
