//! Following the WAL of a database that another process writes.
//!
//! A read transaction of our own keeps the WAL from being reused; frames are read at offsets.
//! The place in the WAL holds only while that lock was held throughout. A new generation of the
//! WAL is taken only where our own sealed checkpoint allowed it, and only with the salt that
//! `SQLite` makes for the next one; everything else calls for a full image, which is always right.
//!
//! Blocks; adds no table, writes nothing to the app's database but checkpoints.

mod carry;
mod checkpoint;
mod database;
mod error;
mod image;
mod mark;
mod pin;
mod shm;
mod write;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dormouse_core::ids::{Nonce, Txid};
use rusqlite::Connection;

pub(crate) use database::{Database, SQLITE_HEADER_LEN, page_size, wal_path};
pub use error::FollowError;
pub use mark::{FreshMark, WalMark};
pub use pin::{Keeper, let_go};

use crate::ltx::{PageSize, Pgno};
use crate::wal::{WalEnd, WalHeader};
use carry::Carry;
use pin::{Kept, Pin};
use shm::{Seen, WalIndex};

/// WAL pages after which a checkpoint is worth its barrier (the default of `SQLite` itself).
pub const CHECKPOINT_PAGES: u64 = 1000;
/// Bytes of WAL after which it is not put off any more until the writer makes a pause: a writer that
/// meets the barrier waits for whole milliseconds by `SQLite`'s own steps.
const WAL_BYTES_LONG: u64 = 128 << 20;
/// WAL pages after which the app's own checkpoints are kept out while it writes.
const GUARD_PAGES: u64 = 64;
/// Why the next L0 must be a full image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageWhy {
    /// No L0 of this database was ever acknowledged, or its history is not known.
    NoHistory,
    /// The WAL went on without us: its generation is not the one that must follow.
    Generation,
    /// The WAL vanished or shrank under the lock.
    WalGone,
    /// The read lock could not be held.
    LockLost,
    /// The WAL grew past its bound because of us: the lock was let go for the app's sake.
    WalTooLong,
    /// The replica lacks files that were acknowledged.
    ReplicaDamaged,
    /// Little room is left on the disk: the lock was let go, so that the WAL can be reused.
    DiskLow,
}

/// What replication may cost the app's disk. Past either bound the lock is let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest WAL.
    pub wal_bytes_max: u64,
    /// Least room on the disk.
    pub disk_free_min: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { wal_bytes_max: 1 << 30, disk_free_min: 64 << 20 }
    }
}

/// How long the WAL is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalSize {
    /// No checkpoint is worth it.
    Short,
    /// One is worth it at the writer's next pause.
    Long,
    /// One is due.
    TooLong,
}

/// Where in the WAL we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The lock was taken over an empty WAL: the next WAL counts from its start.
    Fresh,
    /// The lock keeps this generation.
    Held(WalEnd),
    /// Everything up to here is copied and in the database file: the next generation may begin.
    Sealed(WalEnd),
    /// Not known.
    Lost(ImageWhy),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Wal(u64),
    Carry(u64),
}

/// Commits that no L0 holds yet.
#[derive(Debug)]
struct Pending {
    pages: BTreeMap<Pgno, Source>,
    commit: u32,
    /// Where in the newest generation they begin, and where they end.
    from: u64,
    end: WalEnd,
}

/// An L0 that was written to the spool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpooledFile {
    /// Its number.
    pub txid: Txid,
    /// Its nonce, which is part of its local name.
    pub nonce: Nonce,
    /// The file.
    pub path: PathBuf,
    /// Milliseconds since 1970 in its header.
    pub timestamp_ms: i64,
    /// Length in bytes.
    pub size: u64,
    /// It holds every page.
    pub is_image: bool,
    /// Pages of the database after it.
    pub page_count: u32,
    /// Where it ends in the WAL; none when it is the whole database and there was no WAL.
    pub mark: Option<WalMark>,
}

/// Switches a database that no app has open to WAL mode; true when it was in another mode, and the
/// next L0 must therefore be a full image. Blocks.
pub fn switch_to_wal(path: &Path) -> Result<bool, FollowError> {
    let database = Database::open(path)?;
    match database.wal_page_size() {
        Ok(_) => Ok(false),
        Err(FollowError::NotWal { .. }) => database.switch_to_wal().map(|()| true),
        Err(other) => Err(other),
    }
}

/// Follows one database.
#[derive(Debug)]
pub struct Follower {
    /// Holds the read transaction.
    reader: Connection,
    page_size: PageSize,
    place: Place,
    /// Offset up to which frames were copied when the read transaction began.
    locked_at: u64,
    /// End of the WAL at the last try of a checkpoint.
    tried: Option<WalEnd>,
    pending: Option<Pending>,
    carry: Carry,
    /// Pages of the database after the newest L0.
    page_count: u32,
    state_dir: PathBuf,
    limits: Limits,
    /// Of the WAL that `reader` has open: while it has, nobody who plays by the rules removes it.
    wal_inode: Option<u64>,
    /// These last: closed after the connections, or their locks would go.
    pin: Option<Pin>,
    index: WalIndex,
    database: Database,
}

impl Follower {
    /// Takes the read lock on a database in WAL mode.
    ///
    /// `is_current` says that the file equals an acknowledged L0: then, if no WAL is there, the
    /// next WAL counts from its start. Without it the next L0 is a full image.
    pub fn open(path: &Path, state_dir: &Path, is_current: bool) -> Result<Self, FollowError> {
        let database = Database::open(path)?;
        let page_size = database.wal_page_size()?;
        let had_wal = std::fs::symlink_metadata(database.wal_path()).is_ok_and(|s| s.len() > 0);
        let reader = database.connect()?;
        database.lock(&reader)?;
        let place =
            if is_current && !had_wal { Place::Fresh } else { Place::Lost(ImageWhy::NoHistory) };
        let pages = database.len()? / u64::from(page_size.get());
        let page_count = u32::try_from(pages).unwrap_or(u32::MAX);
        Ok(Self {
            reader,
            page_size,
            place,
            locked_at: 0,
            tried: None,
            pending: None,
            carry: Carry::new(state_dir),
            page_count,
            state_dir: state_dir.to_owned(),
            limits: Limits::default(),
            wal_inode: database.wal_inode(),
            pin: None,
            index: WalIndex::of(database.path()),
            database,
        })
    }

    /// As [`Follower::open`] after a gap: the next L0 is an increment exactly when `mark`, that of
    /// the newest acknowledged L0, proves itself.
    pub fn open_at(
        path: &Path,
        state_dir: &Path,
        mark: Option<&WalMark>,
    ) -> Result<Self, FollowError> {
        let mut follower = Self::open(path, state_dir, false)?;
        let Some(mark) = mark else { return Ok(follower) };
        // Under the read lock: what is proven now holds from now on.
        if let Some(end) = mark.proven(&follower.database)? {
            follower.place = Place::Held(end);
            follower.locked_at = end.offset;
            follower.page_count = mark.page_count;
        }
        Ok(follower)
    }

    /// As [`Follower::open_at`] while the app runs: `fresh` is the mark of a visit that has uploaded
    /// nothing yet, and `keeper` has the locks of the process before this one.
    pub fn open_again(
        path: &Path,
        state_dir: &Path,
        mark: Option<&WalMark>,
        fresh: Option<&FreshMark>,
        keeper: Option<&Arc<dyn Keeper>>,
    ) -> Result<Self, FollowError> {
        let index = WalIndex::of(path);
        let kept = keeper.map(|keeper| Kept::take(keeper.as_ref(), path, index.path()));
        let mut follower = Self::open_at(path, state_dir, mark)?;
        let is_finished = kept.as_ref().is_some_and(|kept| kept.is_finished);
        if let (Some(fresh), Place::Lost(_)) = (fresh, follower.place)
            && fresh.holds(&follower.database)?
        {
            follower.place = Place::Fresh;
        }
        if let (Some(mark), Place::Lost(_)) = (mark, follower.place)
            && is_finished
            && let Some(end) = mark.finished(&follower.database, state_dir)?
        {
            follower.place = Place::Sealed(end);
            follower.page_count = mark.page_count;
        }
        follower.look_for_finished();
        if let (Some(keeper), Some(kept)) = (keeper, kept) {
            follower.pin_with(Arc::clone(keeper), kept);
        }
        Ok(follower)
    }

    /// A WAL that was copied whole, and holds nothing that is not acknowledged, may be begun anew
    /// under our lock.
    fn look_for_finished(&mut self) {
        let Place::Held(end) = self.place else { return };
        let Seen { frames, salt, copied } = self.index.seen().unwrap_or_default();
        if salt == end.salts.0 && copied == frames && self.frames() == Some(frames) {
            self.place = Place::Sealed(end);
        }
    }

    /// Has locks of ours kept beyond our end. What the keeper had of an earlier process was let go
    /// of before this follower was opened: to close it now would end our own locks.
    pub fn pin(&mut self, keeper: Arc<dyn Keeper>) {
        self.pin_with(keeper, Kept::default());
    }

    fn pin_with(&mut self, keeper: Arc<dyn Keeper>, kept: Kept) {
        self.pin = Some(Pin::new(keeper, kept, self.database.path(), self.index.path()));
        if let Place::Sealed(end) = self.place {
            self.note_finished(end);
        }
    }

    /// After an image: the locks that its place calls for.
    fn pin_again(&mut self) {
        match self.place {
            Place::Sealed(end) => self.note_finished(end),
            Place::Fresh => {
                if let Some(pin) = &mut self.pin {
                    pin.hold_still();
                }
            }
            // The WAL's locks stay; a lost place proves nothing anyway.
            Place::Held(_) | Place::Lost(_) => (),
        }
    }

    /// The next process may go on with a generation that follows this one.
    fn note_finished(&mut self, end: WalEnd) {
        let Some(pin) = &mut self.pin else { return };
        if pin.hold_finished() {
            let inode = self.database.inode();
            let mark = WalMark::new(Txid(0), inode, end, self.page_size, self.page_count);
            // Without it a gap calls for a whole image: no reason to stop here.
            mark.save_finished(&self.state_dir).ok();
        }
    }

    /// As a process that is killed: what was kept stays.
    #[cfg(test)]
    pub(crate) fn die(mut self) {
        if let Some(pin) = &mut self.pin {
            pin.die();
        }
    }

    /// Where the newest acknowledged L0 ends, as that of `txid`: what comes behind it holds at least
    /// all that came behind `txid`.
    #[must_use]
    pub fn mark_as(&self, txid: Txid) -> Option<WalMark> {
        let (Place::Held(end) | Place::Sealed(end)) = self.place else { return None };
        Some(WalMark::new(txid, self.database.inode(), end, self.page_size, self.page_count))
    }

    /// The WAL was empty when the lock was taken, and nothing was read of it.
    #[must_use]
    pub const fn is_fresh(&self) -> bool {
        matches!(self.place, Place::Fresh)
    }

    /// The database's inode.
    #[must_use]
    pub const fn inode(&self) -> u64 {
        self.database.inode()
    }

    /// What is followed: the inodes of the database and its WAL.
    #[must_use]
    pub fn inodes(&self) -> Vec<u64> {
        std::iter::once(self.database.inode()).chain(self.wal_inode).collect()
    }

    /// Other bounds than the default ones.
    pub const fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// The next L0 must be a full image.
    #[must_use]
    pub const fn image_needed(&self) -> Option<ImageWhy> {
        match self.place {
            Place::Lost(why) => Some(why),
            Place::Fresh | Place::Held(_) | Place::Sealed(_) => None,
        }
    }

    /// The next L0 is to be a full image, whatever was written.
    pub fn need_image(&mut self) {
        self.lose(ImageWhy::ReplicaDamaged);
    }

    /// Pages of the database after the newest L0.
    #[must_use]
    pub const fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Bytes a page.
    #[must_use]
    pub const fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Bytes of WAL that were read and that no L0 holds yet.
    #[must_use]
    pub fn pending_bytes(&self) -> u64 {
        self.pending.as_ref().map_or(0, |pending| pending.end.offset.saturating_sub(pending.from))
    }

    /// There are commits (or an image) for the next L0.
    #[must_use]
    pub const fn has_pending(&self) -> bool {
        self.pending.is_some() || matches!(self.place, Place::Lost(_))
    }

    /// Reads what was committed since the last call; whether there is something for an L0.
    pub fn poll(&mut self) -> Result<bool, FollowError> {
        self.database.check_same()?;
        if self.wal_inode.is_some() && self.database.wal_inode() != self.wal_inode {
            let path = self.database.wal_path().to_owned();
            return Err(FollowError::Replaced { path });
        }
        if self.image_needed().is_some() {
            return Ok(true);
        }
        let Some(wal) = self.database.open_wal()? else {
            match self.place {
                Place::Fresh => (),
                Place::Held(_) | Place::Sealed(_) | Place::Lost(_) => {
                    self.lose(ImageWhy::WalGone);
                }
            }
            return Ok(self.has_pending());
        };
        let fail = |error| FollowError::io(self.database.wal_path(), error);
        let Some(header) = WalHeader::read(&wal).map_err(fail)? else {
            // Empty, or being restarted right now: its first frames will be an event.
            if let Place::Held(_) = self.place {
                self.lose(ImageWhy::WalGone);
            }
            return Ok(self.has_pending());
        };
        let Some(from) = self.continues_at(&header) else {
            self.lose(ImageWhy::Generation);
            return Ok(true);
        };
        if wal.metadata().map_err(fail)?.len() < from.offset {
            self.lose(ImageWhy::WalGone);
            return Ok(true);
        }
        if from.offset > header.start().offset && !header.ends_at(&wal, from).map_err(fail)? {
            // A commit that nobody was told of, and that another writer has overwritten.
            self.lose(ImageWhy::Generation);
            return Ok(true);
        }
        let scan = header.scan(&wal, from).map_err(fail)?;
        if let Some(scan) = scan {
            if from.offset == header.start().offset {
                self.locked_at = 0;
            }
            self.take(scan.pages, scan.commit, from.offset, scan.end);
            self.place = Place::Held(scan.end);
        }
        Ok(self.has_pending())
    }

    fn continues_at(&self, header: &WalHeader) -> Option<WalEnd> {
        if header.page_size != self.page_size {
            return None;
        }
        match self.place {
            Place::Fresh => Some(header.start()),
            Place::Held(end) | Place::Sealed(end) if end.salts == header.salts => Some(end),
            Place::Sealed(end) if end.salts.precede(header.salts) => Some(header.start()),
            Place::Held(_) | Place::Sealed(_) | Place::Lost(_) => None,
        }
    }

    fn take(&mut self, pages: BTreeMap<Pgno, u64>, commit: u32, from: u64, end: WalEnd) {
        let pending = self.pending.get_or_insert_with(|| Pending {
            pages: BTreeMap::new(),
            commit,
            from,
            end,
        });
        if pending.end.salts != end.salts {
            pending.from = from;
        }
        pending.commit = commit;
        pending.end = end;
        for (page, offset) in pages {
            if let Some(Source::Carry(slot)) = pending.pages.insert(page, Source::Wal(offset)) {
                self.carry.free(slot);
            }
        }
    }

    fn lose(&mut self, why: ImageWhy) {
        self.place = Place::Lost(why);
        self.pending = None;
        self.carry.clear();
    }

    fn wal(&self) -> Result<File, FollowError> {
        match self.database.open_wal()? {
            Some(wal) => Ok(wal),
            None => {
                Err(FollowError::io(self.database.wal_path(), std::io::ErrorKind::NotFound.into()))
            }
        }
    }
}

#[cfg(test)]
mod tests;
