//! Which files to read: the choice that Litestream makes, over names alone.

use dormouse_core::ids::{Host, Txid};
use dormouse_store::{LtxKey, Store};

use super::error::RestoreError;

/// Level of full snapshots.
pub const SNAPSHOT_LEVEL: u8 = 9;

/// What to restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Everything that is there.
    Latest,
    /// Exactly this TXID.
    Txid(Txid),
    /// The last file that is not younger, in milliseconds since 1970.
    Timestamp(i64),
}

/// An LTX file in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RemoteFile {
    /// Level and TXIDs, from its name.
    pub key: LtxKey,
    /// Length in bytes.
    pub size: u64,
}

/// All LTX files of a host, in name order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Every file.
    pub files: Vec<RemoteFile>,
}

impl Listing {
    /// Lists a host's replica: one request a thousand files.
    pub async fn read<S: Store>(
        store: &S,
        prefix: &str,
        host: &Host,
    ) -> Result<Self, RestoreError> {
        let layout = store.layout();
        let root = layout.ltx_prefix(prefix, host);
        let mut files = Vec::new();
        let mut after = None;
        loop {
            let page = store.list(&root, after.as_deref()).await?;
            files.extend(page.entries.iter().filter_map(|entry| {
                let key = layout.parse_ltx_key(prefix, host, &entry.key)?;
                Some(RemoteFile { key, size: entry.size })
            }));
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        files.sort_unstable();
        Ok(Self { files })
    }

    /// Highest L0, which is the replica's position.
    #[must_use]
    pub fn tip(&self) -> Option<RemoteFile> {
        self.files.iter().rfind(|file| file.key.level == 0).copied()
    }

    /// Highest TXID of any level.
    #[must_use]
    pub fn max(&self) -> Txid {
        self.files.iter().map(|file| file.key.max).max().unwrap_or(Txid(0))
    }

    /// The files to apply, in order. For the newest state, or that at a time, every file's TXIDs
    /// must be reached.
    pub fn plan(&self, target: Target) -> Result<Vec<RemoteFile>, RestoreError> {
        if self.files.is_empty() {
            return Err(RestoreError::Empty);
        }
        if target == Target::Txid(Txid(0)) {
            let have = self.max();
            return Err(RestoreError::Unreached {
                wanted: "TXID 0; the first is 1".to_owned(),
                have,
            });
        }
        let limit = match target {
            Target::Txid(txid) => txid,
            Target::Latest | Target::Timestamp(_) => Txid(u64::MAX),
        };
        let mut plan = Vec::new();
        let mut have = Txid(0);
        let snapshot = self
            .files
            .iter()
            .filter(|file| file.key.level == SNAPSHOT_LEVEL && file.key.min == Txid(1))
            .rfind(|file| file.key.max <= limit);
        if let Some(snapshot) = snapshot {
            have = snapshot.key.max;
            plan.push(*snapshot);
        }
        while let Some(next) = self.best_after(have, limit) {
            have = next.key.max;
            plan.push(next);
        }
        match target {
            // Files that are younger than the time are not in the list any more.
            Target::Latest | Target::Timestamp(_) => {
                let next = self.files.iter().filter(|file| file.key.max > have);
                match next.map(|file| file.key.min).min() {
                    Some(next) => Err(RestoreError::Gap { have, next }),
                    None => Ok(plan),
                }
            }
            Target::Txid(txid) if have != txid => {
                Err(RestoreError::Unreached { wanted: format!("TXID {txid}"), have })
            }
            Target::Txid(_) => Ok(plan),
        }
    }

    fn best_after(&self, have: Txid, limit: Txid) -> Option<RemoteFile> {
        self.files
            .iter()
            .filter(|file| {
                file.key.level < SNAPSHOT_LEVEL
                    && file.key.min <= have.next()
                    && file.key.max > have
                    && file.key.max <= limit
            })
            .max_by_key(|file| (file.key.max, std::cmp::Reverse(file.key.min), file.key.level))
            .copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(files: &[(u8, u64, u64)]) -> Listing {
        let files = files.iter().map(|(level, min, max)| RemoteFile {
            key: LtxKey { level: *level, min: Txid(*min), max: Txid(*max) },
            size: 1,
        });
        Listing { files: files.collect() }
    }

    fn names(plan: &[RemoteFile]) -> Vec<(u8, u64, u64)> {
        plan.iter().map(|f| (f.key.level, f.key.min.0, f.key.max.0)).collect()
    }

    #[test]
    fn a_state_at_a_time_is_never_one_from_before_a_gap() {
        let listing = listing(&[(0, 1, 1), (0, 2, 2), (0, 4, 4)]);
        for target in [Target::Latest, Target::Timestamp(1)] {
            let gap = listing.plan(target).unwrap_err();
            assert!(matches!(gap, RestoreError::Gap { have: Txid(2), next: Txid(4) }), "{gap}");
        }
        assert_eq!(listing.plan(Target::Txid(Txid(2))).unwrap().len(), 2);
        assert!(listing.plan(Target::Txid(Txid(0))).is_err());
    }

    #[test]
    fn the_newest_snapshot_and_the_widest_files_are_chosen() {
        let list = listing(&[
            (0, 4, 4),
            (0, 5, 5),
            (0, 6, 6),
            (0, 7, 7),
            (1, 1, 3),
            (1, 4, 6),
            (2, 1, 6),
            (9, 1, 2),
            (9, 1, 4),
        ]);
        let plan = list.plan(Target::Latest).unwrap();
        assert_eq!(names(&plan), [(9, 1, 4), (2, 1, 6), (0, 7, 7)]);
        let plan = list.plan(Target::Txid(Txid(5))).unwrap();
        assert_eq!(names(&plan), [(9, 1, 4), (0, 5, 5)]);
    }

    #[test]
    fn a_gap_is_an_error_and_never_an_older_state() {
        let list = listing(&[(0, 1, 1), (0, 2, 2), (0, 4, 4)]);
        let error = list.plan(Target::Latest).unwrap_err();
        assert!(matches!(error, RestoreError::Gap { have: Txid(2), next: Txid(4) }), "{error}");
        let list = listing(&[(0, 3, 3)]);
        assert!(matches!(list.plan(Target::Latest), Err(RestoreError::Gap { .. })));
        assert!(matches!(listing(&[]).plan(Target::Latest), Err(RestoreError::Empty)));
    }

    #[test]
    fn a_txid_that_is_not_there_is_an_error() {
        let list = listing(&[(0, 1, 1), (0, 2, 2), (1, 1, 2)]);
        assert!(matches!(
            list.plan(Target::Txid(Txid(5))),
            Err(RestoreError::Unreached { have: Txid(2), .. })
        ));
    }
}
