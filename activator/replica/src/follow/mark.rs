//! Where the newest acknowledged L0 ends in the WAL, kept so that it can prove itself after a gap:
//! [`WalMark`]. Before the first one of a visit, the file equals it and the WAL is empty: [`FreshMark`].
//!
//! The salts of a generation are random, and the checksum at an offset runs over every frame before
//! it: when both are there again, nobody restarted the WAL, and what the L0s hold is its beginning.

use std::fs;
use std::io;
use std::path::Path;

use dormouse_core::ids::Txid;
use dormouse_core::position::FileId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::database::Database;
use super::error::FollowError;
use crate::inspect;
use crate::ltx::PageSize;
use crate::wal::{Salts, WalEnd, WalHeader, WalSum};

const NAME: &str = "wal-mark.json";
const VERSION: u32 = 1;

/// The end of a WAL of which everything is in the database file.
const FINISHED_NAME: &str = "finished-mark.json";

const FRESH_NAME: &str = "fresh-mark.json";

/// A visit began over this L0 and an empty WAL, and nothing was uploaded since.
///
/// All that was committed since is in the WAL as long as that was never begun anew and nothing was
/// copied out of it: then the file is as it was, and the WAL's header counts no restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FreshMark {
    version: u32,
    /// The L0 that the file equals.
    pub txid: Txid,
    file: FileId,
}

impl FreshMark {
    /// The file as it is now equals that L0, and has no WAL.
    #[must_use]
    pub const fn new(txid: Txid, file: FileId) -> Self {
        Self { version: VERSION, txid, file }
    }

    /// Replaces the mark. Not made durable: it is of use only while the app runs. Blocks.
    pub fn save(&self, state_dir: &Path) -> io::Result<()> {
        save(state_dir, FRESH_NAME, self)
    }

    /// Takes it away: this visit did not begin so. Blocks.
    pub fn remove(state_dir: &Path) -> io::Result<()> {
        crate::restore::remove(&state_dir.join(FRESH_NAME))
    }

    /// The mark of this very L0, if there is one. Blocks.
    #[must_use]
    pub fn load(state_dir: &Path, txid: Txid) -> Option<Self> {
        let mark: Self = load(state_dir, FRESH_NAME)?;
        (mark.version == VERSION && mark.txid == txid).then_some(mark)
    }

    /// Whether the WAL still holds all that was committed since.
    pub(super) fn holds(&self, database: &Database) -> Result<bool, FollowError> {
        let is_same = inspect::stat(database.path()).ok().flatten() == Some(self.file);
        let Some(wal) = database.open_wal()? else { return Ok(is_same) };
        let fail = |error| FollowError::io(database.wal_path(), error);
        let is_empty = wal.metadata().map_err(fail)?.len() == 0;
        let header = WalHeader::read(&wal).map_err(fail)?;
        Ok(is_same && (is_empty || header.is_some_and(|header| header.restarts == 0)))
    }
}

fn save(state_dir: &Path, name: &str, mark: &impl Serialize) -> io::Result<()> {
    let fresh = state_dir.join(format!("{name}.tmp"));
    fs::write(&fresh, serde_json::to_vec(mark).map_err(io::Error::other)?)?;
    fs::rename(fresh, state_dir.join(name))
}

fn load<T: DeserializeOwned>(state_dir: &Path, name: &str) -> Option<T> {
    serde_json::from_slice(&fs::read(state_dir.join(name)).ok()?).ok()
}

/// The end of an L0 in the WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WalMark {
    version: u32,
    /// The L0.
    pub txid: Txid,
    inode: u64,
    offset: u64,
    salts: (u32, u32),
    sum: (u32, u32),
    page_size: u32,
    /// Pages of the database after it.
    pub page_count: u32,
}

impl WalMark {
    pub(super) fn new(
        txid: Txid,
        inode: u64,
        end: WalEnd,
        page_size: PageSize,
        page_count: u32,
    ) -> Self {
        Self {
            version: VERSION,
            txid,
            inode,
            offset: end.offset,
            salts: (end.salts.0, end.salts.1),
            sum: (end.sum.0, end.sum.1),
            page_size: page_size.get(),
            page_count,
        }
    }

    /// Replaces the mark. Not made durable: one that is lost or old proves nothing. Blocks.
    pub fn save(&self, state_dir: &Path) -> io::Result<()> {
        save(state_dir, NAME, self)
    }

    /// The mark of this very L0, if there is one. Blocks.
    #[must_use]
    pub fn load(state_dir: &Path, txid: Txid) -> Option<Self> {
        let mark: Self = load(state_dir, NAME)?;
        (mark.version == VERSION && mark.txid == txid).then_some(mark)
    }

    /// Where all of the WAL was copied, whatever L0 ends there. Blocks.
    pub(super) fn save_finished(&self, state_dir: &Path) -> io::Result<()> {
        save(state_dir, FINISHED_NAME, self)
    }

    /// The place, where all of the WAL was copied up to it and the WAL was begun anew once since: for
    /// one who knows that the lock of a finished WAL was held throughout.
    pub(super) fn finished(
        &self,
        database: &Database,
        state_dir: &Path,
    ) -> Result<Option<WalEnd>, FollowError> {
        let Some(finished) = load::<Self>(state_dir, FINISHED_NAME) else { return Ok(None) };
        let place = |mark: &Self| (mark.inode, mark.offset, mark.salts, mark.sum, mark.page_size);
        if place(&finished) != place(self) || database.inode() != self.inode {
            return Ok(None);
        }
        let Some(wal) = database.open_wal()? else { return Ok(None) };
        let fail = |error| FollowError::io(database.wal_path(), error);
        let Some(header) = WalHeader::read(&wal).map_err(fail)? else { return Ok(None) };
        let end = WalEnd {
            offset: self.offset,
            salts: Salts(self.salts.0, self.salts.1),
            sum: WalSum(self.sum.0, self.sum.1),
        };
        let follows = header.page_size.get() == self.page_size && end.salts.precede(header.salts);
        Ok(follows.then_some(end))
    }

    /// The place in the WAL, if it still holds.
    pub(super) fn proven(&self, database: &Database) -> Result<Option<WalEnd>, FollowError> {
        let Some(wal) = database.open_wal()? else { return Ok(None) };
        let fail = |error| FollowError::io(database.wal_path(), error);
        let Some(header) = WalHeader::read(&wal).map_err(fail)? else { return Ok(None) };
        let is_same = database.inode() == self.inode
            && header.page_size.get() == self.page_size
            && header.salts == Salts(self.salts.0, self.salts.1);
        let sum = WalSum(self.sum.0, self.sum.1);
        let end = WalEnd { offset: self.offset, salts: header.salts, sum };
        Ok((is_same && header.ends_at(&wal, end).map_err(fail)?).then_some(end))
    }
}
