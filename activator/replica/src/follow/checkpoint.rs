//! Checkpoints of ours: they let the WAL be reused without losing a frame.
//!
//! Most is backfilled and synced while writers go on; the rest is copied and backfilled under a
//! write barrier (`BEGIN IMMEDIATE` on a second connection), so that writers wait milliseconds.
//!
//! An app's `SQLite` up to 3.51.2 has the WAL-reset race: a checkpoint that has read the WAL's
//! length before a writer starts the WAL anew counts frames as copied that were not. It cannot
//! happen to ours: the first part runs while our read transaction is open. On a read mark above 0
//! that transaction keeps every writer from starting the WAL anew; on mark 0 it keeps every
//! checkpoint from copying. The second part lets it go, and runs under the barrier, where nobody
//! writes.

use std::os::unix::fs::FileExt as _;

use nix::sys::statvfs::statvfs;
use rusqlite::Connection;

use super::error::FollowError;
use super::shm::Seen;
use super::{
    CHECKPOINT_PAGES, Follower, GUARD_PAGES, ImageWhy, Place, Source, WAL_BYTES_LONG, WalSize,
};
use crate::ltx::{WAL_FRAME_HEADER_LEN, WAL_HEADER_LEN};

/// Pages that a writer is held up for.
const REST_PAGES: u64 = 500;
/// Rounds beside a writer that is faster than the disk.
const BACKFILLS_MAX: u32 = 2;

impl Follower {
    /// Checkpoints when the WAL has grown enough since the last try.
    pub fn maintain(&mut self) -> Result<(), FollowError> {
        let Place::Held(end) = self.place else { return Ok(()) };
        if !self.is_long(end.offset, end.salts.0) {
            return Ok(());
        }
        self.tried = Some(end);
        self.seal()?;
        self.keep_limits()
    }

    /// An app must not run out of disk because of us: past a bound the read lock goes, the app's
    /// own checkpoints reuse the WAL, and the next L0 is a full image.
    fn keep_limits(&mut self) -> Result<(), FollowError> {
        let Place::Held(end) = self.place else { return Ok(()) };
        let why = if end.offset > self.limits.wal_bytes_max {
            ImageWhy::WalTooLong
        } else if self.disk_free()? < self.limits.disk_free_min {
            ImageWhy::DiskLow
        } else {
            return Ok(());
        };
        self.lose(why);
        if let Some(pin) = &mut self.pin {
            pin.hold_nothing();
        }
        if self.reader.is_autocommit() {
            return Ok(());
        }
        self.database.run(&self.reader, "read lock", "COMMIT")
    }

    /// While commits keep coming: keeps the app from trying checkpoints that our lock makes vain.
    pub fn keep_checkpoints_out(&mut self) {
        if self.keeps_checkpoints_out() {
            return;
        }
        let seen = self.index.seen().unwrap_or_default();
        if seen.frames >= GUARD_PAGES {
            // Without it the app is slower, and nothing else.
            self.index.keep_checkpoints_out().ok();
        }
    }

    /// A pause of the writer, or a checkpoint of ours.
    pub fn let_checkpoints(&mut self) -> Result<(), FollowError> {
        self.index.let_checkpoints().map_err(|error| FollowError::io(self.database.path(), error))
    }

    /// Whether the app's checkpoints are kept out.
    #[must_use]
    pub const fn keeps_checkpoints_out(&self) -> bool {
        self.index.keeps_checkpoints_out()
    }

    /// Room for the spool.
    pub(super) fn disk_free(&self) -> Result<u64, FollowError> {
        let stat = statvfs(&self.state_dir)
            .map_err(|errno| FollowError::io(&self.state_dir, std::io::Error::from(errno)))?;
        Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
    }

    /// How long the WAL is, as far as checkpoints go.
    #[must_use]
    pub fn wal_size(&mut self) -> WalSize {
        let Seen { frames, salt, .. } = self.index.seen().unwrap_or_default();
        let len = self.frames_len(frames);
        if !self.is_long(len, salt) {
            WalSize::Short
        } else if len > WAL_BYTES_LONG.min(self.limits.wal_bytes_max) {
            WalSize::TooLong
        } else {
            WalSize::Long
        }
    }

    /// There is much more than at the last try of a checkpoint in this generation.
    fn is_long(&self, len: u64, salt: u32) -> bool {
        let tried = self.tried.filter(|end| end.salts.0 == salt);
        let new = len.saturating_sub(tried.map_or(0, |end| end.offset));
        new >= self.frames_len(CHECKPOINT_PAGES)
    }

    fn frames_len(&self, frames: u64) -> u64 {
        frames * (u64::from(self.page_size.get()) + WAL_FRAME_HEADER_LEN)
    }

    /// Copies the rest of the WAL and backfills all of it, as far as other readers allow.
    pub fn seal(&mut self) -> Result<(), FollowError> {
        self.let_checkpoints()?;
        self.let_copying();
        let mut barrier = self.database.connect()?;
        for _ in 0..BACKFILLS_MAX {
            self.poll()?;
            self.carry_pending()?;
            self.backfill_most(&mut barrier)?;
            let seen = self.index.seen().unwrap_or_default();
            if seen.frames.saturating_sub(self.frames().unwrap_or(0)) < REST_PAGES {
                break;
            }
        }
        match self.database.barrier(&mut barrier) {
            Ok(()) => (),
            // A long write transaction of the app: the next try comes with the next growth.
            Err(FollowError::Locked { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
        self.poll()?;
        self.carry_pending()?;
        let Place::Held(end) = self.place else { return Ok(()) };
        let (is_complete, _) = self.relock()?;
        self.place = if is_complete { Place::Sealed(end) } else { Place::Held(end) };
        self.locked_at = end.offset;
        self.database.run(&barrier, "write barrier", "ROLLBACK")?;
        if is_complete {
            self.note_finished(end);
        }
        Ok(())
    }

    /// Our locks for the next process keep no checkpoint from copying.
    pub(super) fn let_copying(&mut self) {
        if let Some(pin) = &mut self.pin {
            pin.hold_log();
        }
    }

    /// Backfills while writers go on, and waits for the disk: what is there already need not be
    /// waited for under the barrier.
    fn backfill_most(&mut self, spare: &mut Connection) -> Result<(), FollowError> {
        self.advance(spare)?;
        self.backfill_pinned(spare)?;
        self.wal()?
            .sync_data()
            .map_err(|error| FollowError::io(self.database.wal_path(), error))?;
        // A checkpoint that could not copy everything leaves this to the next one.
        self.database.sync()
    }

    /// A checkpoint beside writers: only under our read transaction, see above.
    pub(super) fn backfill_pinned(&self, spare: &Connection) -> Result<(), FollowError> {
        if self.reader.is_autocommit() {
            return Ok(());
        }
        match self.database.checkpoint(spare, "PASSIVE") {
            // Locked: a checkpoint of the app runs, and does it.
            Ok(_) | Err(FollowError::Locked { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Under the barrier: drops the read lock, backfills, takes it again. Whether every frame is
    /// in the database file now, and how many frames `SQLite` knows of, if it told.
    pub(super) fn relock(&mut self) -> Result<(bool, Option<u64>), FollowError> {
        self.let_copying();
        let result = self.try_relock();
        match (&result, &mut self.pin) {
            (Err(_), _) => self.lose(ImageWhy::LockLost),
            (Ok((true, _)), Some(pin)) => drop(pin.hold_finished()),
            (Ok((true | false, _)), _) => (),
        }
        result
    }

    fn try_relock(&self) -> Result<(bool, Option<u64>), FollowError> {
        if !self.reader.is_autocommit() {
            self.database.run(&self.reader, "read lock", "COMMIT")?;
        }
        let copied = self.database.checkpoint_counted(&self.reader, "PASSIVE");
        self.database.lock(&self.reader)?;
        match copied {
            Ok((_, frames)) if self.frames().is_some_and(|ours| ours != frames) => {
                Err(self.other_frames(frames))
            }
            Ok((is_complete, frames)) => Ok((is_complete, Some(frames))),
            // Another checkpoint of the app runs.
            Err(FollowError::Locked { .. }) => Ok((false, None)),
            Err(error) => Err(error),
        }
    }

    /// Moves the read lock forward, so that more can be backfilled. The new lock is taken before
    /// the old one goes: with frames beyond the old one it cannot be the one of a finished WAL.
    fn advance(&mut self, spare: &mut Connection) -> Result<(), FollowError> {
        let Place::Held(end) = self.place else { return Ok(()) };
        if end.offset <= self.locked_at || self.reader.is_autocommit() {
            return Ok(());
        }
        self.database.lock(spare)?;
        std::mem::swap(&mut self.reader, spare);
        self.locked_at = end.offset;
        self.database.run(spare, "read lock", "COMMIT")
    }

    /// Takes pending pages out of the WAL.
    fn carry_pending(&mut self) -> Result<(), FollowError> {
        let Some(pending) = &mut self.pending else { return Ok(()) };
        let wal_path = self.database.wal_path();
        let Some(wal) = self.database.open_wal()? else { return Ok(()) };
        let mut page = vec![0; self.page_size.buffer_len()];
        for source in pending.pages.values_mut() {
            let Source::Wal(offset) = *source else { continue };
            wal.read_exact_at(&mut page, offset)
                .map_err(|error| FollowError::io(wal_path, error))?;
            let slot = self
                .carry
                .put(&page, self.page_size)
                .map_err(|error| FollowError::io(&self.state_dir, error))?;
            *source = Source::Carry(slot);
        }
        Ok(())
    }

    /// Frames of the WAL that were followed, where there are any.
    pub(super) fn frames(&self) -> Option<u64> {
        match self.place {
            Place::Held(end) | Place::Sealed(end) => {
                let frame = u64::from(self.page_size.get()) + WAL_FRAME_HEADER_LEN;
                Some(end.offset.saturating_sub(WAL_HEADER_LEN) / frame)
            }
            Place::Fresh | Place::Lost(_) => None,
        }
    }

    fn other_frames(&self, frames: u64) -> FollowError {
        let ours = self.frames().unwrap_or(0);
        let why = format!("SQLite knows {frames} frames, {ours} were followed");
        FollowError::io(self.database.wal_path(), std::io::Error::other(why))
    }

    /// A writer that is killed between its last frame and telling the other processes of it leaves
    /// a commit in the WAL that we followed and that nobody else sees. The app is gone: as the
    /// first to open the database again, we make `SQLite` read the WAL as a crash does, and see it.
    fn recover(&mut self) -> Result<(), FollowError> {
        let Some(ours) = self.frames() else { return Ok(()) };
        let (_, frames) = self.database.checkpoint_counted(&self.reader, "PASSIVE")?;
        // A finished WAL may have been begun anew, by a checkpoint of the app and not by a commit.
        let is_begun_anew = frames == 0 && matches!(self.place, Place::Sealed(_));
        if frames == ours || is_begun_anew {
            return Ok(());
        }
        let gone = Connection::open_in_memory()
            .map_err(|error| FollowError::sqlite(self.database.path(), "open", error))?;
        drop(std::mem::replace(&mut self.reader, gone));
        self.reader = self.database.connect()?;
        self.database.lock(&self.reader)?;
        self.database.run(&self.reader, "read lock", "COMMIT")?;
        let (_, frames) = self.database.checkpoint_counted(&self.reader, "PASSIVE")?;
        if frames == ours { Ok(()) } else { Err(self.other_frames(frames)) }
    }

    /// After the app is gone and everything is durable: empties the WAL for good and closes.
    /// The database file then is what the newest L0 says.
    pub fn close_clean(mut self) -> Result<(), FollowError> {
        use rusqlite::config::DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE;
        self.let_checkpoints()?;
        if let Some(pin) = &mut self.pin {
            pin.end();
        }
        if !self.reader.is_autocommit() {
            self.database.run(&self.reader, "read lock", "COMMIT")?;
        }
        self.recover()?;
        let Self { reader, database, page_size, page_count, .. } = self;
        if !database.checkpoint(&reader, "TRUNCATE")? {
            return Err(FollowError::Locked { path: database.path().to_owned() });
        }
        let fail = |error| FollowError::sqlite(database.path(), "close", error);
        reader.set_db_config(SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false).map_err(fail)?;
        reader.close().map_err(|(_conn, error)| fail(error))?;
        let expected = u64::from(page_count) * u64::from(page_size.get());
        if database.len()? != expected {
            // Somebody wrote after the last L0: not what was uploaded.
            return Err(FollowError::Replaced { path: database.path().to_owned() });
        }
        database.sync()
    }
}
