//! Where the newest acknowledged L0 ends in the WAL, kept so that it can prove itself after a gap.
//!
//! The salts of a generation are random, and the checksum at an offset runs over every frame before
//! it: when both are there again, nobody restarted the WAL, and what the L0s hold is its beginning.

use std::fs;
use std::io;
use std::path::Path;

use dormouse_core::ids::Txid;
use serde::{Deserialize, Serialize};

use super::database::Database;
use super::error::FollowError;
use crate::ltx::PageSize;
use crate::wal::{Salts, WalEnd, WalHeader, WalSum};

const NAME: &str = "wal-mark.json";
const VERSION: u32 = 1;

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
        let fresh = state_dir.join("wal-mark.json.tmp");
        fs::write(&fresh, serde_json::to_vec(self).map_err(io::Error::other)?)?;
        fs::rename(fresh, state_dir.join(NAME))
    }

    /// The mark of this very L0, if there is one. Blocks.
    #[must_use]
    pub fn load(state_dir: &Path, txid: Txid) -> Option<Self> {
        let bytes = fs::read(state_dir.join(NAME)).ok()?;
        let mark: Self = serde_json::from_slice(&bytes).ok()?;
        (mark.version == VERSION && mark.txid == txid).then_some(mark)
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
