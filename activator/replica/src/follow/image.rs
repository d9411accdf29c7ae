//! A full image as the next L0: right after any gap.

use std::collections::BTreeMap;

use super::error::FollowError;
use super::{Follower, ImageWhy, Place};
use crate::ltx::Pgno;
use crate::wal::{Scan, WalEnd, WalHeader};

/// What a full image is made of: frames where they are newer than the file, else the file.
/// Stable while the read lock is held.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) frames: BTreeMap<Pgno, u64>,
    pub(super) page_count: u32,
    pub(super) end: Option<WalEnd>,
}

impl Follower {
    /// Takes a stable view of the whole database under a short write barrier.
    pub(super) fn view(&mut self) -> Result<(Image, Place), FollowError> {
        self.let_checkpoints()?;
        self.let_copying();
        let mut barrier = self.database.connect()?;
        // Shortens the barrier; our own lock may hold it back, then the barrier does it all.
        self.backfill_pinned(&barrier)?;
        self.database.barrier(&mut barrier)?;
        let (is_complete, known) = self.relock()?;
        // By the connection that goes: the question makes it keep the schema.
        let page_count = self.database.page_count(&barrier)?;
        let scan = self.whole_wal(known)?;
        let end = scan.as_ref().map(|scan| scan.end);
        let (frames, place) = match scan {
            // All frames are in the file, which nobody can change now: our lock is the one of a
            // finished WAL. The next generation may begin.
            Some(scan) if is_complete => (BTreeMap::new(), Place::Sealed(scan.end)),
            Some(scan) => (scan.pages, Place::Held(scan.end)),
            None if is_complete => (BTreeMap::new(), Place::Fresh),
            None => (BTreeMap::new(), Place::Lost(ImageWhy::WalGone)),
        };
        self.locked_at = end.map_or(0, |end| end.offset);
        self.tried = end;
        self.database.run(&barrier, "write barrier", "ROLLBACK")?;
        Ok((Image { frames, page_count, end }, place))
    }

    /// What `SQLite` knows of the WAL: a killed writer may have left a commit behind that.
    fn whole_wal(&self, frames: Option<u64>) -> Result<Option<Scan>, FollowError> {
        let Some(wal) = self.database.open_wal()? else { return Ok(None) };
        let fail = |error| FollowError::io(self.database.wal_path(), error);
        match WalHeader::read(&wal).map_err(fail)? {
            Some(header) => {
                let until = frames.map_or(u64::MAX, |frames| header.offset_of(frames));
                header.scan_until(&wal, header.start(), until).map_err(fail)
            }
            None => Ok(None),
        }
    }
}
