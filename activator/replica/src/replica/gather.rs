//! Levels while a host is awake: one job at a time, in the background, when something is due.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use dormouse_core::ids::Txid;
use dormouse_core::time::{Deadline, Mono, Nanos, Now};
use dormouse_store::{LtxKey, Store};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{Base, Settings};
use crate::compact::CompactError;
use crate::follow::SpooledFile;
use crate::levels::{self, Age, Change, Due, Fault, Inventory, Job, Known, Worker, local_path};
use crate::put::Place;
use crate::restore::{RemoteFile, SNAPSHOT_LEVEL};

/// Longest wait after failed jobs, in first waits.
const BACKOFF_MAX: u64 = 64;
/// A clock that was set back must not put a job off for ever.
const AHEAD_MAX: Nanos = Nanos::from_secs(86_400);

/// How a job ended.
pub(super) type Outcome = Result<Change, CompactError>;

/// A job that ends with its owner.
struct Task(JoinHandle<Outcome>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What one host's levels need.
pub(super) struct Gatherer<S> {
    worker: Worker<S>,
    settings: crate::levels::LevelSettings,
    inventory: Inventory,
    /// As the inventory says; read off anew after each change.
    due: Option<Due>,
    task: Option<Task>,
    inputs: Vec<LtxKey>,
    local: BTreeMap<LtxKey, (PathBuf, u64)>,
    not_before: Mono,
    backoff: Nanos,
    deadline: watch::Sender<Option<Deadline>>,
    /// Newest acknowledged number, as it was when the last job was begun, and now.
    own: (Txid, Txid),
    /// Where the visit began, or the damage was heard of.
    base: Txid,
    /// What is wrong with the replica.
    fault: Option<Fault>,
    pub(super) trouble: Option<String>,
}

impl<S: Store> Gatherer<S> {
    pub(super) fn new(
        place: Place<S>,
        settings: &Settings,
        base: &Base,
        inventory: Option<Inventory>,
        now: Now,
        deadline: Option<Deadline>,
    ) -> Self {
        let damaged = levels::is_marked_damaged(&settings.state_dir);
        let fault = (damaged && base.txid() > Txid(0)).then_some(Fault::Damaged);
        let known = match base {
            Base::Image { after: Txid(0) } => Inventory::empty(),
            Base::Current { .. } | Base::Image { .. } => Inventory::unknown(),
        };
        let (deadline, receiver) = watch::channel(deadline);
        let worker = Worker {
            place,
            state_dir: settings.state_dir.clone(),
            budget: settings.budget.clone(),
            deadline: receiver,
            clock: settings.clock,
            patience: None,
        };
        let mut gatherer = Self {
            worker,
            settings: settings.levels,
            inventory: inventory.unwrap_or(known),
            due: None,
            task: None,
            inputs: Vec::new(),
            local: BTreeMap::new(),
            not_before: now.mono,
            backoff: first_wait(&settings.levels),
            deadline,
            own: (base.txid(), base.txid()),
            base: base.txid(),
            fault,
            trouble: fault.map(|fault| fault.to_string()),
        };
        gatherer.look(now);
        gatherer
    }

    pub(super) fn set_deadline(&self, deadline: Option<Deadline>) {
        self.deadline.send_replace(deadline);
    }

    pub(super) fn deadline(&self) -> Option<Deadline> {
        *self.deadline.borrow()
    }

    /// Where an acknowledged file is to be kept until it is merged; none: it is not.
    pub(super) fn room_for(&self, file: &SpooledFile) -> Option<PathBuf> {
        self.fits(file.size).then(|| local_path(&self.worker.state_dir, &LtxKey::l0(file.txid)))
    }

    fn fits(&self, size: u64) -> bool {
        let kept: u64 = self.local.values().map(|(_, size)| *size).sum();
        kept.saturating_add(size) <= self.settings.local_bytes_max
    }

    /// An L0 was acknowledged.
    pub(super) fn acknowledged(&mut self, now: Now, file: &SpooledFile, kept: Option<PathBuf>) {
        let known = Known {
            size: file.size,
            age: Age::Of(file.timestamp_ms),
            is_fence: Some(file.is_image),
            is_image: file.is_image,
        };
        let key = LtxKey::l0(file.txid);
        self.own.1 = file.txid;
        self.inventory.acknowledged(key, known);
        if self.fault.is_none() && levels::is_marked_damaged(&self.worker.state_dir) {
            self.base = file.txid;
            self.set_fault(Some(Fault::Damaged));
        }
        if let Some(path) = kept {
            self.local.insert(key, (path, file.size));
        }
        self.look(now);
    }

    /// When to call [`Gatherer::start`]; none while a job runs, while nothing is ever due, past the
    /// session's deadline, and in a visit that wrote nothing: it is to cost nothing.
    pub(super) fn next_due(&self, now: Now) -> Option<Mono> {
        let due = self.due.as_ref()?;
        let is_over = self.deadline.borrow().is_some_and(|deadline| deadline.passed(now));
        let is_idle = self.own.1 == self.base && self.fault.is_none();
        if self.task.is_some() || is_over || is_idle {
            return None;
        }
        let ahead_ms = u64::try_from(due.at_ms.saturating_sub(now.wall.unix_ms())).unwrap_or(0);
        let at = now.mono + Nanos::from_millis(ahead_ms).min(AHEAD_MAX);
        Some(at.max(self.not_before))
    }

    /// Starts what is due.
    pub(super) fn start(&mut self, now: Now) {
        if self.next_due(now).is_none_or(|at| at > now.mono) {
            return;
        }
        // Ages went on since the last look: what is due now may be more than then.
        self.look(now);
        let Some(Due { job, .. }) = self.due.clone() else { return };
        self.inputs = match &job {
            Job::Merge { inputs, .. } => inputs.iter().map(|file| file.key).collect(),
            Job::List | Job::Snapshot { .. } | Job::Delete { .. } => Vec::new(),
        };
        let paths = self.local.iter().map(|(key, (path, _))| (*key, path.clone())).collect();
        self.own.0 = self.own.1;
        self.task = Some(Task(tokio::spawn(self.worker.clone().run(job, paths))));
    }

    /// Waits for the job that runs; for ever when none does.
    pub(super) async fn ended(&mut self) -> Outcome {
        let Some(Task(task)) = &mut self.task else { return std::future::pending().await };
        let outcome = task.await.unwrap_or_else(|error| {
            Err(CompactError::io(&self.worker.state_dir, std::io::Error::other(error)))
        });
        self.task = None;
        outcome
    }

    pub(super) fn on_ended(&mut self, now: Now, outcome: Outcome) {
        match outcome {
            Ok(change) => {
                self.inventory.apply(&change, now.wall.unix_ms(), self.own);
                if let Some((key, path)) = change.local {
                    let size = change.added.first().map_or(0, |(_, known)| known.size);
                    self.keep(key, path, size);
                }
                for key in std::mem::take(&mut self.inputs).iter().chain(&change.removed) {
                    self.drop_local(key);
                }
                self.backoff = first_wait(&self.settings);
                self.audit(&change.added, change.listing.is_some());
            }
            // The deadline's next move wakes it.
            Err(CompactError::Waits) => (),
            Err(error) => {
                if !matches!(error, CompactError::Upload(_) | CompactError::Delete(_)) {
                    // A file is not there, or not what it was: list, and trust no copy.
                    self.inventory.doubt();
                    for (_, (path, _)) in std::mem::take(&mut self.local) {
                        fs::remove_file(path).ok();
                    }
                }
                self.trouble = Some(format!("compaction: {error}"));
                self.not_before = now.mono + self.backoff;
                let max = first_wait(&self.settings).0.saturating_mul(BACKOFF_MAX);
                self.backoff = self.backoff.doubled(Nanos(max));
            }
        }
        self.look(now);
    }

    /// No restore and no merge gets past this number: a snapshot of what comes after is due.
    pub(super) fn damaged_since(&mut self, txid: Txid) {
        if txid > Txid(0) {
            self.base = txid;
            self.set_fault(Some(Fault::Damaged));
        }
    }

    /// What the store holds now, for the next visit; the job that runs ends here, and what it may
    /// have written is found by a list.
    pub(super) fn conclude(&mut self) -> Inventory {
        if self.task.take().is_some() {
            self.inventory.doubt();
        }
        std::mem::take(&mut self.inventory)
    }

    fn look(&mut self, now: Now) {
        let now_ms = now.wall.unix_ms();
        let job = self.bridge().map(|image| Job::Snapshot { inputs: vec![image] });
        self.due = match job {
            Some(job) => Some(Due { at_ms: now_ms, job }),
            None => self.inventory.next_due(&self.settings, now_ms),
        };
    }

    /// A whole image that mends the replica once it is a snapshot.
    fn bridge(&self) -> Option<RemoteFile> {
        match self.fault? {
            Fault::Gap { have } => self.inventory.image_after(have),
            Fault::Damaged => self.inventory.image_after(self.base),
            Fault::Foreign { .. } => None,
        }
    }

    /// The next L0 is to be a whole image: the replica is not whole, and none is there yet.
    pub(super) fn wants_image(&self) -> bool {
        self.fault.is_some_and(Fault::is_mended_by_image) && self.bridge().is_none()
    }

    /// Is all there, after a list, or a snapshot that may have mended it?
    fn audit(&mut self, added: &[(LtxKey, Known)], is_listed: bool) {
        let is_mended = added.iter().any(|(key, _)| key.level == SNAPSHOT_LEVEL);
        if is_mended {
            // A mark that stays makes one more image.
            levels::unmark_damaged(&self.worker.state_dir).ok();
        }
        // Names alone do not tell what a drill found.
        let says_nothing = !is_listed || self.fault == Some(Fault::Damaged);
        self.set_fault(if says_nothing && !is_mended {
            self.fault
        } else {
            self.inventory.fault(self.own.1)
        });
    }

    fn set_fault(&mut self, fault: Option<Fault>) {
        self.fault = fault;
        self.trouble = fault.map(|fault| fault.to_string());
    }

    /// The output of a merge is the next level's input: kept, if it fits.
    fn keep(&mut self, key: LtxKey, path: PathBuf, size: u64) {
        let fits = self.fits(size);
        self.local.insert(key, (path, size));
        if !fits {
            self.drop_local(&key);
        }
    }

    fn drop_local(&mut self, key: &LtxKey) {
        if let Some((path, _)) = self.local.remove(key) {
            // A copy that stays is removed at the next start.
            fs::remove_file(path).ok();
        }
    }
}

fn first_wait(settings: &crate::levels::LevelSettings) -> Nanos {
    Nanos::from_millis(settings.retry_ms)
}
