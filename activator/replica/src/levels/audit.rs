//! Does the store still hold what its writer wrote? Now and then a host that is written to lists its
//! replica. What is missing is mended by a whole image, of which the local copy is the source.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dormouse_core::ids::Txid;
use dormouse_store::LtxKey;

use super::Inventory;
use crate::restore::{RemoteFile, RestoreError, Target};

/// What is wrong with a replica, by the names of its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It can be restored up to this TXID only, although more was acknowledged.
    Gap {
        /// The last TXID before the gap.
        have: Txid,
    },
    /// It was found to be damaged when it was restored for practice, or its pages have another size now.
    Damaged,
    /// A file that this box did not write, beyond what it wrote.
    Foreign {
        /// The file.
        key: LtxKey,
    },
}

impl Fault {
    /// Whether a whole image mends it.
    #[must_use]
    pub const fn is_mended_by_image(self) -> bool {
        match self {
            Self::Gap { .. } | Self::Damaged => true,
            Self::Foreign { .. } => false,
        }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gap { have } => write!(
                f,
                "files behind TXID {have} are gone from the store: a whole image is uploaded"
            ),
            Self::Damaged => {
                f.write_str("the replica cannot be restored as it is: a whole image is uploaded")
            }
            Self::Foreign { key } => write!(
                f,
                "file {} of level {} was not written by this box, and no restore gets past it: \
                 move it away",
                key.name(),
                key.level
            ),
        }
    }
}

impl Inventory {
    /// What keeps a restore from reaching `own`, the newest number that was acknowledged here. The
    /// one behind it may be on its way.
    #[must_use]
    pub fn fault(&self, own: Txid) -> Option<Fault> {
        let foreign = self.files.keys().filter(|key| key.max > own.next());
        if let Some(key) = foreign.min_by_key(|key| (key.min, key.max)) {
            return Some(Fault::Foreign { key: *key });
        }
        if own == Txid(0) {
            return None;
        }
        match self.listing().plan(Target::Txid(own)) {
            Ok(_) => None,
            Err(RestoreError::Unreached { have, .. }) => Some(Fault::Gap { have }),
            Err(_) => Some(Fault::Gap { have: Txid(0) }),
        }
    }

    /// A whole image among the L0s behind a gap: a snapshot of it bridges the gap.
    pub(crate) fn image_after(&self, have: Txid) -> Option<RemoteFile> {
        let mut images =
            self.level(0).rev().filter(|(key, known)| known.is_image && key.min > have);
        images.next().map(|(key, known)| RemoteFile { key: *key, size: known.size })
    }

    /// When the next audit is due; none while nothing was written since the last list.
    pub(super) fn audit_at(&self, every_ms: i64) -> Option<i64> {
        self.has_news.then(|| self.listed_ms.saturating_add(every_ms))
    }

    /// Whether an audit is due.
    #[must_use]
    pub fn is_audit_due(&self, every_ms: i64, now_ms: i64) -> bool {
        self.audit_at(every_ms).is_some_and(|at| at <= now_ms)
    }
}

fn mark(state_dir: &Path) -> PathBuf {
    state_dir.join("replica-damaged")
}

/// The replica was seen to be damaged: the host's next visit mends it. Blocks.
pub fn mark_damaged(state_dir: &Path) -> io::Result<()> {
    fs::write(mark(state_dir), b"")
}

/// Whether it was. Blocks.
#[must_use]
pub fn is_marked_damaged(state_dir: &Path) -> bool {
    fs::symlink_metadata(mark(state_dir)).is_ok()
}

/// It is mended. Blocks.
pub(crate) fn unmark_damaged(state_dir: &Path) -> io::Result<()> {
    crate::restore::remove(&mark(state_dir))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::levels::{Age, Known};

    fn with(files: &[(u8, u64, u64)]) -> Inventory {
        let mut inventory = Inventory::empty();
        for (level, min, max) in files {
            let key = LtxKey { level: *level, min: Txid(*min), max: Txid(*max) };
            let is_image = *level == 0 && *min == 5;
            let known = Known { size: 1, age: Age::Of(1), is_fence: None, is_image };
            inventory.add(key, known);
        }
        inventory
    }

    #[test]
    fn a_gap_and_a_missing_tip_are_told_by_what_was_acknowledged() {
        let fault = |files: &[_], own| with(files).fault(Txid(own));
        assert_eq!(fault(&[], 0), None);
        assert_eq!(fault(&[(0, 1, 1), (0, 2, 2)], 2), None);
        assert_eq!(fault(&[(0, 1, 1), (0, 2, 2)], 1), None, "one may be on its way");
        assert_eq!(fault(&[(0, 1, 1), (0, 3, 3)], 3), Some(Fault::Gap { have: Txid(1) }));
        assert_eq!(fault(&[(0, 1, 1), (0, 2, 2)], 3), Some(Fault::Gap { have: Txid(2) }));
        assert_eq!(fault(&[], 3), Some(Fault::Gap { have: Txid(0) }));
        assert_eq!(fault(&[(0, 1, 1), (0, 3, 3), (9, 1, 3)], 3), None, "a snapshot bridges it");
    }

    #[test]
    fn a_foreign_file_is_named() {
        let last = u64::MAX;
        let Some(fault @ Fault::Foreign { key }) =
            with(&[(0, 1, 1), (0, last, last)]).fault(Txid(1))
        else {
            panic!("a fault");
        };
        assert_eq!(key.max, Txid(last));
        assert!(fault.to_string().contains("ffffffffffffffff"), "{fault}");
    }

    #[test]
    fn the_newest_image_behind_a_gap_bridges_it() {
        let inventory = with(&[(0, 1, 1), (0, 4, 4), (0, 5, 5), (0, 6, 6)]);
        assert_eq!(inventory.image_after(Txid(1)).map(|file| file.key.max), Some(Txid(5)));
        assert_eq!(inventory.image_after(Txid(5)), None);
    }

    #[test]
    fn an_audit_is_due_once_something_was_written() {
        let mut inventory = with(&[(0, 1, 1)]);
        assert!(!inventory.is_audit_due(100, 1000));
        inventory.acknowledged(
            LtxKey::l0(Txid(2)),
            Known { size: 1, age: Age::Of(950), is_fence: None, is_image: false },
        );
        assert!(inventory.is_audit_due(100, 1000) && !inventory.is_audit_due(100, 99));
        inventory.merge_list(&inventory.listing(), 1000, (Txid(2), Txid(2)));
        assert!(!inventory.is_audit_due(0, 2000), "nothing new since");
    }
}
