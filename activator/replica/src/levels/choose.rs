//! What is due, and when: by names, sizes and ages alone.

use std::collections::BTreeMap;

use dormouse_core::ids::Txid;
use dormouse_store::LtxKey;

use super::inventory::{Age, Inventory, Known};
use super::{GATHERING_LEVELS, LevelSettings};
use crate::restore::{RemoteFile, SNAPSHOT_LEVEL, Target};

/// Files that one merge reads: each is open at once, with a page in memory.
const INPUTS_MAX: usize = 128;
/// Files that one job deletes.
const DELETES_MAX: usize = 128;
/// A full image among the L0s that is larger becomes a snapshot, instead of going up level by level.
const IMAGE_MERGED_MAX: u64 = 256 << 10;
/// Files of a restore after which a snapshot is worth its bytes, whatever the increments weigh.
const SNAPSHOT_PLAN_MAX: usize = 48;

/// One piece of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Job {
    /// Not everything that the store holds is known, or it is to be seen whether it still does.
    List,
    /// These files, which follow each other, into one of that level.
    Merge {
        /// Level of the new file.
        level: u8,
        /// The files.
        inputs: Vec<RemoteFile>,
    },
    /// These files, of which the first is a whole image, into a snapshot.
    Snapshot {
        /// The files.
        inputs: Vec<RemoteFile>,
    },
    /// Files that nobody needs any more.
    Delete {
        /// Each with what is known of it.
        files: Vec<(LtxKey, Known)>,
    },
}

/// When to do what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Due {
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// What.
    pub job: Job,
}

impl Inventory {
    /// What is due first; none when nothing ever is, without a new file.
    #[must_use]
    pub fn next_due(&self, settings: &LevelSettings, now_ms: i64) -> Option<Due> {
        if self.is_doubtful {
            return Some(Due { at_ms: now_ms, job: Job::List });
        }
        if !self.is_complete {
            // What this visit wrote tells when a list is worth it.
            let at_ms = self.gather(1, settings).map(|due| due.at_ms)?;
            return Some(Due { at_ms, job: Job::List });
        }
        let levels = (1..=GATHERING_LEVELS).filter_map(|level| self.gather(level, settings));
        let mut all: Vec<Due> = levels.collect();
        all.extend(self.snapshot(settings));
        all.extend(self.deletes(settings, now_ms));
        let audit = self.audit_at(settings.audit_ms);
        all.extend(audit.map(|at_ms| Due { at_ms, job: Job::List }));
        all.into_iter().min_by_key(|due| due.at_ms)
    }

    /// Files that the levels from this one on (snapshots included) already hold.
    fn covered(&self, level: u8) -> Txid {
        let above = self.files.keys().filter(|key| key.level >= level);
        above.map(|key| key.max).max().unwrap_or(Txid(0))
    }

    /// Files of the level below that this level does not hold, as far as they follow each other.
    fn waiting(&self, level: u8) -> Vec<(RemoteFile, Known)> {
        let covered = self.covered(level);
        let mut waiting: Vec<(RemoteFile, Known)> = Vec::new();
        for (key, known) in self.level(level.saturating_sub(1)) {
            let follows = waiting.last().is_none_or(|(last, _)| key.min == last.key.max.next());
            if key.min > covered && follows {
                waiting.push((RemoteFile { key: *key, size: known.size }, *known));
            }
        }
        waiting
    }

    /// Files that a level does not hold, at most as many as one merge takes.
    pub(crate) fn waiting_for(&self, level: u8) -> Vec<RemoteFile> {
        self.waiting(level).into_iter().map(|(file, _)| file).take(INPUTS_MAX).collect()
    }

    /// Files that nobody needs any more; none when there are none now.
    pub(crate) fn due_deletes(
        &self,
        settings: &LevelSettings,
        now_ms: i64,
    ) -> Option<Vec<(LtxKey, Known)>> {
        match self.deletes(settings, now_ms)?.job {
            Job::Delete { files } if !files.is_empty() => Some(files),
            Job::Delete { .. } | Job::List | Job::Merge { .. } | Job::Snapshot { .. } => None,
        }
    }

    fn gather(&self, level: usize, settings: &LevelSettings) -> Option<Due> {
        let window = *settings.windows_ms.get(level.checked_sub(1)?)?;
        let level = u8::try_from(level).ok()?;
        let waiting = self.waiting(level);
        let at_ms = boundary(waiting.first()?.1.age.ms(), window);
        let is_heavy = |known: &Known| known.is_image && known.size > IMAGE_MERGED_MAX;
        if let Some(heavy) = waiting.iter().position(|(_, known)| level == 1 && is_heavy(known))
            && heavy < 2
        {
            let inputs = vec![waiting.get(heavy)?.0];
            return Some(Due { at_ms, job: Job::Snapshot { inputs } });
        }
        let mut inputs = Vec::new();
        let mut bytes = 0_u64;
        for (file, known) in waiting {
            bytes = bytes.saturating_add(file.size);
            let is_much = bytes > settings.merge_bytes_max && inputs.len() >= 2;
            if is_much || inputs.len() == INPUTS_MAX || (level == 1 && is_heavy(&known)) {
                break;
            }
            inputs.push(file);
        }
        // One file alone would only be copied.
        (inputs.len() > 1).then_some(Due { at_ms, job: Job::Merge { level, inputs } })
    }

    /// A snapshot of a host that stays awake, where it makes the next restore cheaper.
    fn snapshot(&self, settings: &LevelSettings) -> Option<Due> {
        let inputs = self.listing().plan(Target::Latest).ok()?;
        let (base, increments) = inputs.split_first()?;
        let weight: u64 = increments.iter().map(|file| file.size).sum();
        let is_worth = weight.saturating_mul(2) >= base.size || inputs.len() > SNAPSHOT_PLAN_MAX;
        let first = self.files.get(&increments.first()?.key)?;
        if !is_worth || inputs.len() > INPUTS_MAX {
            return None;
        }
        let at_ms = boundary(first.age.ms(), settings.snapshot_ms);
        Some(Due { at_ms, job: Job::Snapshot { inputs } })
    }

    fn deletes(&self, settings: &LevelSettings, now_ms: i64) -> Option<Due> {
        let cover = Cover::of(self);
        let mut files = Vec::new();
        let mut at_ms = i64::MAX;
        for (key, known) in &self.files {
            let Some(due) = cover.delete_at(key, known, settings) else { continue };
            at_ms = at_ms.min(due);
            if due <= now_ms && files.len() < DELETES_MAX {
                files.push((*key, *known));
            }
        }
        (at_ms < i64::MAX).then_some(Due { at_ms, job: Job::Delete { files } })
    }
}

/// What stands for what: read off an inventory once, then asked for each file.
struct Cover {
    files: usize,
    /// Greatest TXID of each level.
    newest: BTreeMap<u8, Txid>,
    /// Greatest TXID and time of each snapshot, ascending.
    snapshots: Vec<(Txid, i64)>,
    /// TXIDs that levels 1 to 8 hold, ascending by their first.
    spans: Vec<(Txid, Txid)>,
}

impl Cover {
    fn of(inventory: &Inventory) -> Self {
        let mut newest = BTreeMap::new();
        let mut spans = Vec::new();
        for key in inventory.files.keys() {
            newest.insert(key.level, key.max);
            if (1..SNAPSHOT_LEVEL).contains(&key.level) {
                spans.push((key.min, key.max));
            }
        }
        spans.sort_unstable();
        // Where spans overlap, the widest so far counts: a search by the first TXID finds it.
        let mut widest = (Txid(0), Txid(0));
        for span in &mut spans {
            if span.1 <= widest.1 {
                *span = widest;
            } else {
                widest = *span;
            }
        }
        let snapshots = inventory.level(SNAPSHOT_LEVEL);
        let snapshots = snapshots.map(|(key, known)| (key.max, known.age.ms())).collect();
        Self { files: inventory.files.len(), newest, snapshots, spans }
    }

    /// From when on nobody needs a file; none: for ever needed, as things are.
    fn delete_at(&self, key: &LtxKey, known: &Known, settings: &LevelSettings) -> Option<i64> {
        let is_snapshot = key.level == SNAPSHOT_LEVEL;
        if is_snapshot && known.is_to_be_looked_at(key) && self.files > 1 {
            // Not to delete it: what it stands for depends on its age.
            return Some(known.age.ms());
        }
        if known.is_fence == Some(true) || self.newest.get(&key.level) == Some(&key.max) {
            return None;
        }
        let stands_for = |max: Txid| max > key.max || (max == key.max && !is_snapshot);
        // A snapshot that is itself older than the retention is where such a restore begins.
        let by_snapshot = self.snapshots.iter().find(|(max, _)| stands_for(*max));
        let by_snapshot = by_snapshot.map(|(_, ms)| ms.saturating_add(settings.retention_ms));
        let behind = self.spans.partition_point(|(min, _)| *min <= key.min);
        let span = behind.checked_sub(1).and_then(|at| self.spans.get(at));
        let is_gathered = key.level == 0 && span.is_some_and(|(_, max)| key.max <= *max);
        let by_level = is_gathered.then(|| match known.age {
            Age::Of(ms) => ms.saturating_add(settings.l0_retention_ms),
            // Looked at first.
            Age::ListedAt(ms) => ms,
        });
        [by_snapshot, by_level].into_iter().flatten().min()
    }
}

/// End of the window that a time lies in.
fn boundary(ms: i64, window_ms: i64) -> i64 {
    let window = window_ms.max(1);
    ms.div_euclid(window).saturating_add(1).saturating_mul(window)
}

impl Known {
    /// What decides over a file is not known: its age and whether it is a fence for an L0, its age
    /// for a snapshot.
    pub(crate) const fn is_to_be_looked_at(&self, key: &LtxKey) -> bool {
        let is_aged = matches!(self.age, Age::Of(_));
        match key.level {
            0 => !is_aged || self.is_fence.is_none(),
            SNAPSHOT_LEVEL => !is_aged,
            _ => false,
        }
    }
}

#[cfg(test)]
#[path = "choose_tests.rs"]
mod tests;
