//! What a host's replica holds, as far as its writer knows; kept over a sleep in one small file.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use dormouse_core::ids::{Generation, Txid};
use dormouse_store::LtxKey;
use serde::{Deserialize, Serialize};

use super::Change;
use crate::restore::{Listing, RemoteFile};

const NAME: &str = "inventory.json";
const VERSION: u32 = 1;

/// How old a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Age {
    /// Time of its content, milliseconds since 1970.
    Of(i64),
    /// It was found by a list at that time; its own is in its metadata or header.
    ListedAt(i64),
}

impl Age {
    pub(crate) const fn ms(self) -> i64 {
        match self {
            Self::Of(ms) | Self::ListedAt(ms) => ms,
        }
    }
}

/// What is known of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// Length in bytes.
    pub size: u64,
    /// How old it is.
    pub age: Age,
    /// It must never be deleted; none: its metadata says.
    pub is_fence: Option<bool>,
    /// It holds every page.
    pub is_image: bool,
}

/// What a host's replica holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    pub(super) files: BTreeMap<LtxKey, Known>,
    /// Everything that the store holds is in it.
    pub(super) is_complete: bool,
    /// Something in it was seen to be wrong.
    pub(super) is_doubtful: bool,
    /// When the replica was last listed, milliseconds since 1970.
    pub(super) listed_ms: i64,
    /// Something was written since.
    pub(super) has_news: bool,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    generation: Generation,
    txid: Txid,
    #[serde(default)]
    listed_ms: i64,
    files: Vec<(u8, Txid, Txid, Known)>,
}

impl Inventory {
    /// Of a replica that holds nothing yet.
    #[must_use]
    pub fn empty() -> Self {
        Self { is_complete: true, ..Self::default() }
    }

    /// Of a replica of which nothing is known: its first job is a list.
    #[must_use]
    pub fn unknown() -> Self {
        Self::default()
    }

    /// Of what a list gave at that time.
    #[must_use]
    pub fn listed(listing: &Listing, now_ms: i64) -> Self {
        let mut inventory = Self::empty();
        inventory.merge_list(listing, now_ms, (Txid(0), Txid(0)));
        inventory
    }

    /// A list completes it; what the writer knew better stays. `own` are the newest numbers that were
    /// acknowledged before the list was begun, and by now: the list may miss those in between, and
    /// what it misses of the others is gone.
    pub(crate) fn merge_list(&mut self, listing: &Listing, now_ms: i64, own: (Txid, Txid)) {
        let known = std::mem::take(&mut self.files);
        for file in &listing.files {
            let is_image = file.key.level == 0 && file.key.min == Txid(1);
            // Fences are L0s.
            let is_fence = (file.key.level > 0).then_some(false);
            let found = Known { size: file.size, age: Age::ListedAt(now_ms), is_fence, is_image };
            self.files.insert(file.key, known.get(&file.key).copied().unwrap_or(found));
        }
        self.has_news = false;
        for (key, what) in known {
            if key.level == 0 && key.min > own.0 && key.min <= own.1 {
                self.files.insert(key, what);
                self.has_news = true;
            }
        }
        self.is_complete = true;
        self.is_doubtful = false;
        self.listed_ms = now_ms;
    }

    /// A file is there.
    pub fn add(&mut self, key: LtxKey, known: Known) {
        self.files.insert(key, known);
    }

    /// An upload was acknowledged.
    pub(crate) fn acknowledged(&mut self, key: LtxKey, known: Known) {
        if self.files.is_empty() && self.is_complete {
            // Nothing was there to be listed.
            self.listed_ms = known.age.ms();
        }
        self.add(key, known);
        self.has_news = true;
    }

    /// What a job changed; `own` as for a list.
    pub(crate) fn apply(&mut self, change: &Change, now_ms: i64, own: (Txid, Txid)) {
        if let Some(listing) = &change.listing {
            self.merge_list(listing, now_ms, own);
        }
        for (key, known) in change.added.iter().chain(&change.learned) {
            self.add(*key, *known);
        }
        change.removed.iter().for_each(|key| self.remove(key));
    }

    pub(crate) fn remove(&mut self, key: &LtxKey) {
        self.files.remove(key);
    }

    /// Whether a list would tell nothing new.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Something in it is wrong: a list is due.
    pub(crate) fn doubt(&mut self) {
        self.is_complete = false;
        self.is_doubtful = true;
    }

    /// As a list would give it.
    #[must_use]
    pub fn listing(&self) -> Listing {
        let files =
            self.files.iter().map(|(key, known)| RemoteFile { key: *key, size: known.size });
        Listing { files: files.collect() }
    }

    /// Newest L0.
    #[must_use]
    pub fn tip(&self) -> Txid {
        self.level(0).next_back().map_or(Txid(0), |(key, _)| key.max)
    }

    pub(super) fn level(
        &self,
        level: u8,
    ) -> impl DoubleEndedIterator<Item = (&LtxKey, &Known)> + Clone {
        let first = LtxKey { level, min: Txid(0), max: Txid(0) };
        let last = LtxKey { level, min: Txid(u64::MAX), max: Txid(u64::MAX) };
        self.files.range(first..=last)
    }

    /// What an earlier visit left, if nobody has written since; the file is removed, so that a
    /// crash leaves none that is out of date. Blocks.
    #[must_use]
    pub fn take(state_dir: &Path, generation: Generation, txid: Txid) -> Option<Self> {
        let path = state_dir.join(NAME);
        let bytes = fs::read(&path).ok()?;
        fs::remove_file(&path).ok()?;
        let stored: Stored = serde_json::from_slice(&bytes).ok()?;
        if (stored.version, stored.generation, stored.txid) != (VERSION, generation, txid) {
            return None;
        }
        let mut inventory = Self { listed_ms: stored.listed_ms, ..Self::empty() };
        for (level, min, max, known) in stored.files {
            inventory.add(LtxKey { level, min, max }, known);
        }
        Some(inventory)
    }

    /// Keeps it over a sleep. Not made durable: without it the next visit lists. Blocks.
    pub fn save(&self, state_dir: &Path, generation: Generation) -> io::Result<()> {
        if !self.is_complete {
            return Ok(());
        }
        let files = self.files.iter().map(|(key, known)| (key.level, key.min, key.max, *known));
        let stored = Stored {
            version: VERSION,
            generation,
            txid: self.tip(),
            listed_ms: self.listed_ms,
            files: files.collect(),
        };
        let bytes = serde_json::to_vec(&stored).map_err(io::Error::other)?;
        let fresh = state_dir.join("inventory.json.tmp");
        fs::write(&fresh, bytes)?;
        fs::rename(&fresh, state_dir.join(NAME))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Known {
        Known { size: 7, age: Age::Of(5), is_fence: Some(false), is_image: false }
    }

    #[test]
    fn it_is_kept_over_a_sleep_and_taken_once_by_the_same_owner() {
        let dir = tempfile::tempdir().unwrap();
        let mut inventory = Inventory::empty();
        inventory.add(LtxKey { level: 0, min: Txid(3), max: Txid(3) }, known());
        inventory.add(LtxKey { level: 9, min: Txid(1), max: Txid(2) }, known());
        let take =
            |generation, txid| Inventory::take(dir.path(), Generation(generation), Txid(txid));
        for (generation, txid) in [(2, 3), (1, 4)] {
            inventory.save(dir.path(), Generation(1)).unwrap();
            assert_eq!(take(generation, txid), None);
        }
        inventory.save(dir.path(), Generation(1)).unwrap();
        assert_eq!(take(1, 3), Some(inventory));
        assert_eq!(take(1, 3), None, "a crash must not find it again");
    }

    #[test]
    fn a_list_completes_it_and_what_the_writer_knows_better_stays() {
        let mut inventory = Inventory::unknown();
        let l0 = |n| LtxKey { level: 0, min: Txid(n), max: Txid(n) };
        for n in [4, 5] {
            inventory.add(l0(n), known());
        }
        let files = [l0(3), l0(4)].map(|key| RemoteFile { key, size: 9 });
        inventory.merge_list(&Listing { files: files.to_vec() }, 100, (Txid(4), Txid(5)));
        assert!(inventory.is_complete());
        let ages: Vec<_> = inventory.level(0).map(|(key, known)| (key.min.0, known.age)).collect();
        assert_eq!(ages, [(3, Age::ListedAt(100)), (4, Age::Of(5)), (5, Age::Of(5))]);
    }
}
