//! Compaction at sleep: what keeps the next restore at a few GETs.
//!
//! Everything is built from acknowledged files only: a snapshot from the closed database, which
//! equals the newest acknowledged L0; levels 1 to 3 from files of the store or their local copies.
//! Nothing is listed while the inventory knows what the store holds. A compaction that fails
//! leaves the replica as good as before.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_core::ids::{Generation, Txid};
use dormouse_core::time::{Deadline, Now};
use dormouse_core::upload::PutAnswer;
use dormouse_store::{LtxKey, Store};
use tokio::sync::watch;

use crate::levels::{
    self, Age, Budget, Change, Fault, Inventory, Job, Known, LevelSettings, Worker,
};
use crate::ltx::{Encoder, Encoding, Header, LtxError, PageSize, Pgno};
use crate::put::{Kind, Place};
use crate::restore::{RemoteFile, RestoreError, SNAPSHOT_LEVEL, Target};
use crate::spool;

/// Files that a restore may read before a compaction is worth its requests.
pub const PLAN_FILES_MAX: usize = 16;
/// The same where a whole image costs next to nothing: with the list four requests.
pub const SMALL_PLAN_FILES_MAX: usize = 3;
/// What a small replica's restore reads at most.
const SMALL_BYTES: u64 = 4 << 20;
/// A snapshot is written when the increments weigh this share of the base.
const SNAPSHOT_SHARE: u64 = 2; // one half
/// L0s that are worth a file of level 1, so that their own can go.
const GATHERED_MIN: usize = 8;
/// A host that falls asleep does not wait long for its turn: the next visit compacts.
const TURN_WAIT: Duration = Duration::from_secs(5);
/// Jobs of one sleep.
const JOBS_MAX: u32 = 8;

/// The closed database, which equals the newest acknowledged L0.
#[derive(Clone, Debug)]
pub struct Closed {
    /// The database file; nobody writes to it until the compaction has ended.
    pub database: PathBuf,
    /// The host's state directory, for temporary files.
    pub state_dir: PathBuf,
    /// Generation of the lease, for the inventory's file.
    pub generation: Generation,
    /// What the file equals.
    pub txid: Txid,
    /// Bytes a page.
    pub page_size: PageSize,
    /// Pages.
    pub page_count: u32,
}

/// By what rules, and until when.
#[derive(Clone, Debug)]
pub struct Terms {
    /// When levels are made and how long their files are kept.
    pub settings: LevelSettings,
    /// What all hosts share.
    pub budget: Budget,
    /// The session's deadline.
    pub deadline: watch::Receiver<Option<Deadline>>,
    /// Reads the clocks.
    pub clock: fn() -> Now,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// The files that were written.
    pub written: Vec<LtxKey>,
    /// Files that were deleted.
    pub deleted: usize,
}

/// Why a compaction did nothing. The replica is as good as before.
#[derive(Debug, thiserror::Error)]
pub enum CompactError {
    /// The replica cannot be listed or planned.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// A file is corrupt, or could not be written.
    #[error(transparent)]
    Ltx(#[from] LtxError),
    /// A local file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The replica is not at the TXID of the local file.
    #[error("the replica is at TXID {remote}, the local file at {local}")]
    Moved {
        /// Newest L0 of the store.
        remote: Txid,
        /// What the file equals.
        local: Txid,
    },
    /// The replica is not whole, and compacting it does not help.
    #[error("{0}")]
    Fault(Fault),
    /// The upload did not succeed.
    #[error("upload of the compacted file: {0}")]
    Upload(String),
    /// A file that nobody needs could not be deleted.
    #[error("deleting what is covered: {0}")]
    Delete(String),
    /// The session's deadline has passed, or the box is busy with others: it waits.
    #[error("it waits for the session, or for its turn")]
    Waits,
}

impl CompactError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
}

/// What to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// A restore is cheap enough.
    Nothing,
    /// A full image at level 9.
    Snapshot,
    /// These files into one of that level.
    Merge(u8, Vec<RemoteFile>),
}

/// Chooses by names and sizes alone.
pub fn choose(inventory: &Inventory, txid: Txid) -> Result<Choice, CompactError> {
    if let Some(fault) = inventory.fault(txid) {
        let mended = fault.is_mended_by_image().then_some(Choice::Snapshot);
        return mended.ok_or(CompactError::Fault(fault));
    }
    let plan = inventory.listing().plan(Target::Latest)?;
    let remote = inventory.tip();
    if remote != txid {
        return Err(CompactError::Moved { remote, local: txid });
    }
    let l0s = inventory.waiting_for(1);
    if l0s.len() >= GATHERED_MIN {
        return Ok(Choice::Merge(1, l0s));
    }
    let base = plan.first().map_or(0, |file| file.size);
    let increments: u64 = plan.iter().skip(1).map(|file| file.size).sum();
    let is_small = base.saturating_add(increments) <= SMALL_BYTES;
    let files_max = if is_small { SMALL_PLAN_FILES_MAX } else { PLAN_FILES_MAX };
    if plan.len() <= files_max {
        return Ok(Choice::Nothing);
    }
    if is_small || increments.saturating_mul(SNAPSHOT_SHARE) >= base {
        return Ok(Choice::Snapshot);
    }
    // The widest files first: few of them are left for a restore.
    for level in [3, 2, 1] {
        let inputs = inventory.waiting_for(level);
        if inputs.len() > 1 {
            return Ok(Choice::Merge(level, inputs));
        }
    }
    Ok(Choice::Snapshot)
}

/// Compacts if it is worth it, deletes what is due, and keeps the inventory for the next visit.
/// `local` are copies of acknowledged files.
pub async fn compact<S: Store>(
    place: &Place<S>,
    closed: &Closed,
    mut inventory: Inventory,
    terms: &Terms,
) -> Result<Compacted, CompactError> {
    let sleep = Sleep { place, closed, terms };
    let mut done = Compacted::default();
    let result = sleep.all(&mut inventory, &mut done).await;
    match &result {
        Ok(()) => {
            if let Err(source) = inventory.save(&closed.state_dir, closed.generation) {
                return Err(CompactError::io(&closed.state_dir, source));
            }
        }
        Err(CompactError::Waits) => (),
        Err(_) => terms.budget.count_failure(),
    }
    let state_dir = closed.state_dir.clone();
    let cleared = blocking(&closed.state_dir, move || {
        crate::levels::clear(&state_dir).map_err(|source| CompactError::io(&state_dir, source))
    });
    cleared.await?;
    result.map(|()| done)
}

struct Sleep<'a, S> {
    place: &'a Place<S>,
    closed: &'a Closed,
    terms: &'a Terms,
}

impl<S: Store> Sleep<'_, S> {
    fn worker(&self) -> Worker<S> {
        Worker {
            place: self.place.clone(),
            state_dir: self.closed.state_dir.clone(),
            budget: self.terms.budget.clone(),
            deadline: self.terms.deadline.clone(),
            clock: self.terms.clock,
            patience: Some(TURN_WAIT),
        }
    }

    async fn all(
        &self,
        inventory: &mut Inventory,
        done: &mut Compacted,
    ) -> Result<(), CompactError> {
        let now_ms = (self.terms.clock)().wall.unix_ms();
        if !inventory.is_complete() || inventory.is_audit_due(self.terms.settings.audit_ms, now_ms)
        {
            self.job(inventory, Job::List, done).await?;
        }
        if levels::is_marked_damaged(&self.closed.state_dir) {
            self.snapshot(inventory, done).await?;
        }
        for _ in 0..JOBS_MAX {
            match choose(inventory, self.closed.txid)? {
                Choice::Nothing => break,
                Choice::Merge(level, inputs) => {
                    self.job(inventory, Job::Merge { level, inputs }, done).await?;
                }
                Choice::Snapshot => {
                    self.snapshot(inventory, done).await?;
                    break;
                }
            }
        }
        let now_ms = (self.terms.clock)().wall.unix_ms();
        while let Some(files) = inventory.due_deletes(&self.terms.settings, now_ms) {
            self.job(inventory, Job::Delete { files }, done).await?;
        }
        Ok(())
    }

    async fn job(
        &self,
        inventory: &mut Inventory,
        job: Job,
        done: &mut Compacted,
    ) -> Result<(), CompactError> {
        let worker = self.worker();
        let state_dir = self.closed.state_dir.clone();
        let local = blocking(&state_dir, {
            let dir = state_dir.clone();
            move || Ok(local_files(&dir))
        });
        let run = worker.run(job, local.await?);
        // A store that does not answer must not hold the sleep up.
        let change = tokio::time::timeout(JOB_WAIT, run).await;
        let change = change.map_err(|_| CompactError::Waits)??;
        done.written.extend(change.added.iter().map(|(key, _)| *key));
        done.deleted = done.deleted.saturating_add(change.removed.len());
        // Nothing is on its way any more.
        let own = (self.closed.txid, self.closed.txid);
        inventory.apply(&change, (self.terms.clock)().wall.unix_ms(), own);
        Ok(())
    }

    async fn snapshot(
        &self,
        inventory: &mut Inventory,
        done: &mut Compacted,
    ) -> Result<(), CompactError> {
        let worker = self.worker();
        worker.may_go_on()?;
        let _turn = worker.turn().await?;
        let scratch = self.closed.state_dir.join("compact.tmp");
        let io = |source| CompactError::io(&scratch, source);
        let nonce = spool::fresh_nonce().map_err(io)?;
        let now_ms = (self.terms.clock)().wall.unix_ms();
        let (from, to) = (self.closed.clone(), scratch.clone());
        let made = blocking(&scratch, move || write_snapshot(&from, &to, now_ms)).await;
        let key = LtxKey { level: SNAPSHOT_LEVEL, min: Txid(1), max: self.closed.txid };
        let sent = match made {
            Ok(size) => {
                let put = self.place.put(&key, &scratch, &nonce, now_ms, Kind::Plain).await;
                Ok((size, put))
            }
            Err(error) => Err(error),
        };
        crate::restore::remove(&scratch).map_err(io)?;
        let (size, (answer, why)) = sent?;
        match answer {
            // A name that is taken holds the same pages: the TXIDs say so, whoever wrote it.
            PutAnswer::Done { .. } | PutAnswer::ConditionFailed => (),
            PutAnswer::Again | PutAnswer::Unknown | PutAnswer::Refused => {
                return Err(CompactError::Upload(why));
            }
        }
        let known = Known { size, age: Age::Of(now_ms), is_fence: Some(false), is_image: true };
        let change = Change { added: vec![(key, known)], ..Change::default() };
        self.terms.budget.count(&change);
        inventory.apply(&change, now_ms, (self.closed.txid, self.closed.txid));
        done.written.push(key);
        levels::unmark_damaged(&self.closed.state_dir)
            .map_err(|source| CompactError::io(&self.closed.state_dir, source))
    }
}

/// Longest job of a sleep.
const JOB_WAIT: Duration = Duration::from_mins(1);

/// Copies that the visit left: their names say what they are.
fn local_files(state_dir: &Path) -> BTreeMap<LtxKey, PathBuf> {
    let mut found = BTreeMap::new();
    let Ok(entries) = fs::read_dir(crate::levels::local_dir(state_dir)) else { return found };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let key = name.to_str().and_then(|name| {
            let (level, name) = name.split_once('-')?;
            LtxKey::parse_name(level.parse().ok()?, name)
        });
        if let Some(key) = key {
            found.insert(key, entry.path());
        }
    }
    found
}

fn write_snapshot(closed: &Closed, to: &Path, now_ms: i64) -> Result<u64, CompactError> {
    let io = |path| move |source| CompactError::io(path, source);
    let size = closed.page_size;
    let mut header = Header::new(size, closed.page_count, Txid(1), closed.txid);
    header.timestamp_ms = now_ms;
    // Nobody holds a lock of ours on a closed database: opening and closing it is harmless.
    let from = File::open(&closed.database).map_err(io(&closed.database))?;
    let out = BufWriter::with_capacity(1 << 16, File::create(to).map_err(io(to))?);
    let mut encoder = Encoder::new(out, "snapshot", header, Encoding::Frame)?;
    let mut buffer = vec![0; size.buffer_len()];
    let mut page = size.next_stored(Pgno(0));
    while page.0 <= closed.page_count {
        from.read_exact_at(&mut buffer, size.offset_of(page)).map_err(io(&closed.database))?;
        encoder.page(page, &buffer)?;
        page = size.next_stored(page);
    }
    let (mut out, written) = encoder.finish()?;
    out.flush().map_err(io(to))?;
    Ok(written.size)
}

pub(crate) async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> Result<T, CompactError> + Send + 'static,
) -> Result<T, CompactError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(CompactError::io(path, io::Error::other(error))),
    }
}

#[cfg(test)]
#[path = "compact_tests.rs"]
mod tests;
