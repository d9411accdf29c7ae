//! Locks that outlive this process, for the next one to go on where this one left off.
//!
//! Our read transaction ends with us. So that an app cannot begin its WAL anew until the next
//! activator is there, two descriptors of our own hold open file description locks, and somebody
//! else ([`Keeper`]) holds the same descriptions:
//!
//! - on the database, `SQLite`'s shared lock: nobody who closes it last removes the WAL;
//! - in the wal-index, the last read mark's lock, the mark set to "not used": the WAL is not begun
//!   anew, and all of it may be copied; or
//! - the lock of read mark 0, after all of the WAL was copied: it may be begun anew once, and
//!   nothing is copied out of that, as with our own transaction on a finished WAL.
//!
//! They are locks as any reader has them, and of use only in the gap: while we live, our
//! transaction does as much. Offsets: `SQLite`'s "WAL-mode file format", the same for all versions.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{self, c_int, off_t};

/// `SHARED_FIRST` of `SQLite`'s unix VFS, and how many bytes.
const SHARED: (off_t, off_t) = (0x4000_0002, 510);
/// `WAL_READ_LOCK(0)`.
const FINISHED: (off_t, off_t) = (123, 1);
/// `WAL_READ_LOCK(4)`, the last one: an app's readers take the first that is free.
const LAST_MARK: (off_t, off_t) = (127, 1);
/// Of `aReadMark[4]`, a native number.
const LAST_MARK_AT: u64 = 116;
const MARK_NOT_USED: u32 = u32::MAX;

/// Who holds descriptors of one database beyond our end.
pub trait Keeper: std::fmt::Debug + Send + Sync {
    /// What an earlier process left with it; nothing at a second call.
    fn take(&self) -> Vec<OwnedFd>;
    /// Holds these from now on.
    fn keep(&self, descriptors: &[BorrowedFd<'_>]);
    /// Holds nothing of this database any more.
    fn forget(&self);
}

/// Lets go of what an earlier process left, where nobody goes on from it.
pub fn let_go(keeper: &dyn Keeper) {
    let left = keeper.take();
    for descriptor in &left {
        unlock(descriptor.as_fd());
    }
    if !left.is_empty() {
        keeper.forget();
    }
}

/// What an earlier process left of this very database.
#[derive(Debug, Default)]
pub(super) struct Kept {
    database: Option<File>,
    index: Option<File>,
    /// All of the WAL was copied when it was left.
    pub(super) is_finished: bool,
    holds_last: bool,
}

impl Kept {
    /// Before any connection of ours: what is of no use is closed, and with it our locks would go.
    pub(super) fn take(keeper: &dyn Keeper, database: &Path, index: &Path) -> Self {
        let is_of = |file: &File, path: &Path| {
            let same = || Some((file.metadata().ok()?, fs::symlink_metadata(path).ok()?));
            same().is_some_and(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()))
        };
        let mut kept = Self::default();
        for descriptor in keeper.take() {
            let file = File::from(descriptor);
            if kept.database.is_none() && is_of(&file, database) {
                kept.database = Some(file);
            } else if kept.index.is_none() && is_of(&file, index) {
                kept.is_finished = holds(&file, FINISHED.0);
                kept.holds_last = holds(&file, LAST_MARK.0);
                kept.index = Some(file);
            } else {
                unlock(file.as_fd());
            }
        }
        kept
    }
}

/// Whether a lock of this very description is on that byte.
fn holds(file: &File, byte: off_t) -> bool {
    let path = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
    fs::read_to_string(path)
        .is_ok_and(|told| locks(&told).any(|(from, to)| from <= byte && byte <= to))
}

/// First and last byte of each open file description lock, as `fdinfo` tells them.
fn locks(told: &str) -> impl Iterator<Item = (off_t, off_t)> {
    told.lines().filter(|line| line.contains("OFDLCK")).filter_map(|line| {
        let mut words = line.split_whitespace().rev();
        let to = words.next()?;
        let from = words.next()?.parse().ok()?;
        Some((from, if to == "EOF" { off_t::MAX } else { to.parse().ok()? }))
    })
}

/// Our locks on one database. Its descriptors are kept to the end: closing one would drop the
/// locks of this process's connections.
#[derive(Debug)]
pub(super) struct Pin {
    keeper: Arc<dyn Keeper>,
    database: Option<File>,
    index: Option<File>,
    holds_last: bool,
    is_over: bool,
}

impl Pin {
    /// Under our read transaction; takes every lock that it can.
    pub(super) fn new(keeper: Arc<dyn Keeper>, kept: Kept, database: &Path, index: &Path) -> Self {
        let Kept { database: kept_database, index: kept_index, holds_last, .. } = kept;
        let is_complete = kept_database.is_some() && kept_index.is_some();
        // One that cannot be opened costs a whole image after a gap, and nothing else.
        let database = kept_database.or_else(|| open(database, false).ok());
        let index = kept_index.or_else(|| open(index, true).ok());
        let mut this = Self { keeper, database, index, holds_last, is_over: false };
        this.hold_still();
        if !is_complete {
            this.keeper.forget();
            let both = [&this.database, &this.index].into_iter().flatten();
            this.keeper.keep(&both.map(|file| file.as_fd()).collect::<Vec<_>>());
        }
        this
    }

    /// Nothing is copied out of the WAL, and it is not begun anew.
    pub(super) fn hold_still(&mut self) {
        self.share_database();
        self.set_index(libc::F_RDLCK, FINISHED);
        self.hold_last();
    }

    /// The WAL is not begun anew; what is in it may be copied.
    pub(super) fn hold_log(&mut self) {
        self.share_database();
        self.hold_last();
        self.set_index(libc::F_UNLCK, FINISHED);
    }

    /// All of the WAL is copied, and our own transaction is one on a finished WAL: it may be begun
    /// anew once. Whether that is held.
    pub(super) fn hold_finished(&mut self) -> bool {
        self.share_database();
        if !self.set_index(libc::F_RDLCK, FINISHED) {
            return false;
        }
        self.set_index(libc::F_UNLCK, LAST_MARK);
        self.holds_last = false;
        true
    }

    /// Holds nothing, until it is asked to again.
    pub(super) fn hold_nothing(&mut self) {
        for file in [&self.database, &self.index].into_iter().flatten() {
            unlock(file.as_fd());
        }
        self.holds_last = false;
    }

    /// For good: the next process has nothing to go on from.
    pub(super) fn end(&mut self) {
        if !std::mem::replace(&mut self.is_over, true) {
            self.hold_nothing();
            self.keeper.forget();
        }
    }

    /// As a process that is killed: the locks stay.
    #[cfg(test)]
    pub(super) const fn die(&mut self) {
        self.is_over = true;
    }

    fn share_database(&self) {
        if let Some(database) = &self.database {
            set(database.as_fd(), libc::F_RDLCK, SHARED);
        }
    }

    fn set_index(&self, kind: c_int, range: (off_t, off_t)) -> bool {
        self.index.as_ref().is_some_and(|index| set(index.as_fd(), kind, range))
    }

    /// Who holds a mark's lock alone may set the mark: one that is not used holds up nobody who
    /// copies the WAL.
    fn hold_last(&mut self) {
        if self.holds_last || !self.set_index(libc::F_WRLCK, LAST_MARK) {
            return;
        }
        let mark = MARK_NOT_USED.to_ne_bytes();
        let is_set = self
            .index
            .as_ref()
            .is_some_and(|index| index.write_all_at(&mark, LAST_MARK_AT).is_ok());
        let kind = if is_set { libc::F_RDLCK } else { libc::F_UNLCK };
        self.holds_last = self.set_index(kind, LAST_MARK) && is_set;
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.end();
    }
}

fn open(path: &Path, writes: bool) -> io::Result<File> {
    OpenOptions::new().read(true).write(writes).custom_flags(libc::O_NOFOLLOW).open(path)
}

fn unlock(file: BorrowedFd<'_>) {
    set(file, libc::F_UNLCK, (0, 0));
}

/// Whether it was set; not while somebody else's is in the way.
fn set(file: BorrowedFd<'_>, kind: c_int, (start, len): (off_t, off_t)) -> bool {
    let short = |n: c_int| libc::c_short::try_from(n).unwrap_or_default();
    let lock = libc::flock {
        l_type: short(kind),
        l_whence: short(libc::SEEK_SET),
        l_start: start,
        l_len: len,
        // An open file description lock must not name a process.
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).is_ok()
}

#[cfg(test)]
#[path = "pin_tests.rs"]
pub(crate) mod tests;
