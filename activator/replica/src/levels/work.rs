//! Carrying one job out: reading what the local disk does not have, merging, writing, deleting.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_core::ids::Txid;
use dormouse_core::time::{Deadline, Now};
use dormouse_core::upload::{PutAnswer, Standing};
use dormouse_store::{Condition, DeleteOutcome, LtxKey, ReadError, Store};
use tokio::sync::{SemaphorePermit, watch};

use super::inventory::{Age, Known};
use super::{Budget, Job};
use crate::compact::{CompactError, blocking};
use crate::ltx::{Decoder, Header};
use crate::merge::merge_from;
use crate::put::{Kind, META_FENCE, META_TIMESTAMP, Place, parse_rfc3339};
use crate::restore::{Listing, RemoteFile, RestoreError, SNAPSHOT_LEVEL, header_of, to_file};
use crate::spool;

/// Sends of one file whose outcome stays unknown.
const SENDS_MAX: u32 = 3;
/// What a job leaves behind in the host's state directory when it is cut off.
const SCRATCH: &str = "levels";
/// Acknowledged files that wait for their merge.
const LOCAL: &str = "recent";
/// Readers share this: one buffer an input.
const READ_BUFFER: usize = 8 << 10;

/// What a job changed.
#[derive(Debug, Default)]
pub(crate) struct Change {
    /// The list that was asked for.
    pub(crate) listing: Option<Listing>,
    /// New files, or what was learned of old ones.
    pub(crate) added: Vec<(LtxKey, Known)>,
    pub(crate) learned: Vec<(LtxKey, Known)>,
    pub(crate) removed: Vec<LtxKey>,
    /// The new file on the local disk.
    pub(crate) local: Option<(LtxKey, PathBuf)>,
}

/// Carries jobs of one host out, one at a time.
#[derive(Clone, Debug)]
pub(crate) struct Worker<S> {
    pub(crate) place: Place<S>,
    pub(crate) state_dir: PathBuf,
    pub(crate) budget: Budget,
    pub(crate) deadline: watch::Receiver<Option<Deadline>>,
    pub(crate) clock: fn() -> Now,
    /// Longest wait for its turn; none: as long as it takes.
    pub(crate) patience: Option<Duration>,
}

/// The directory of acknowledged files that wait for their merge.
pub(crate) fn local_dir(state_dir: &Path) -> PathBuf {
    state_dir.join(LOCAL)
}

pub(crate) fn local_path(state_dir: &Path, key: &LtxKey) -> PathBuf {
    local_dir(state_dir).join(format!("{}-{}", key.level, key.name()))
}

/// Removes what an earlier process left of jobs and of files that waited. Blocks.
pub(crate) fn clear(state_dir: &Path) -> io::Result<()> {
    for dir in [state_dir.join(SCRATCH), local_dir(state_dir)] {
        match fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => (),
        }
    }
    Ok(())
}

impl<S: Store> Worker<S> {
    /// Waits for its turn on this box, then works. Inputs in `local` are not fetched.
    pub(crate) async fn run(
        self,
        job: Job,
        local: BTreeMap<LtxKey, PathBuf>,
    ) -> Result<Change, CompactError> {
        let _turn = self.turn().await?;
        self.may_go_on()?;
        let done = match job {
            Job::List => {
                let Place { store, prefix, host } = &self.place;
                let listing = Listing::read(store, prefix, host).await?;
                Ok(Change { listing: Some(listing), ..Change::default() })
            }
            Job::Merge { level, inputs } => self.gather(level, None, &inputs, &local).await,
            Job::Snapshot { inputs } => {
                self.gather(SNAPSHOT_LEVEL, Some(Txid(1)), &inputs, &local).await
            }
            Job::Delete { files } => self.delete(files).await,
        };
        match &done {
            Ok(change) => self.budget.count(change),
            Err(CompactError::Waits) => (),
            Err(_) => self.budget.count_failure(),
        }
        done
    }

    /// Its turn on this box.
    pub(crate) async fn turn(&self) -> Result<SemaphorePermit<'_>, CompactError> {
        let patience = self.patience.unwrap_or(Duration::MAX);
        match tokio::time::timeout(patience, self.budget.turn.acquire()).await {
            Ok(Ok(turn)) => Ok(turn),
            Ok(Err(_)) | Err(_) => Err(CompactError::Waits),
        }
    }

    /// Past the session's deadline nothing is written and nothing is deleted.
    pub(crate) fn may_go_on(&self) -> Result<(), CompactError> {
        match *self.deadline.borrow() {
            Some(deadline) if deadline.passed((self.clock)()) => Err(CompactError::Waits),
            Some(_) | None => Ok(()),
        }
    }

    async fn gather(
        &self,
        level: u8,
        min: Option<Txid>,
        inputs: &[RemoteFile],
        local: &BTreeMap<LtxKey, PathBuf>,
    ) -> Result<Change, CompactError> {
        let nonce =
            spool::fresh_nonce().map_err(|error| CompactError::io(&self.state_dir, error))?;
        // A name of its own: of a job that was cut off, a thread may still be writing.
        let scratch = self.state_dir.join(SCRATCH).join(&nonce.0);
        let result = self.gather_in(&scratch, level, min, inputs, local).await;
        let (key, known) = match result {
            Ok(made) => made,
            Err(error) => {
                fs::remove_dir_all(&scratch).ok();
                return Err(error);
            }
        };
        let made = scratch.join(key.name());
        let sent = self.send(&key, &known, &made, &nonce).await;
        let kept = local_path(&self.state_dir, &key);
        let is_kept = sent.is_ok()
            && fs::create_dir_all(local_dir(&self.state_dir)).is_ok()
            && fs::rename(&made, &kept).is_ok();
        fs::remove_dir_all(&scratch).ok();
        sent?;
        let local = is_kept.then_some((key, kept));
        Ok(Change { added: vec![(key, known)], local, ..Change::default() })
    }

    async fn gather_in(
        &self,
        scratch: &Path,
        level: u8,
        min: Option<Txid>,
        inputs: &[RemoteFile],
        local: &BTreeMap<LtxKey, PathBuf>,
    ) -> Result<(LtxKey, Known), CompactError> {
        fs::create_dir_all(scratch).map_err(|error| CompactError::io(scratch, error))?;
        let mut paths = Vec::new();
        for file in inputs {
            if let Some(path) = local.get(&file.key) {
                paths.push(path.clone());
                continue;
            }
            let path = scratch.join(format!("in-{}-{}", file.key.level, file.key.name()));
            let Place { store, prefix, host } = &self.place;
            to_file(store, prefix, host, file, &path).await?;
            paths.push(path);
        }
        let (min, max) = match (inputs.first(), inputs.last()) {
            (Some(first), Some(last)) => (min.unwrap_or(first.key.min), last.key.max),
            (None, _) | (_, None) => return Err(RestoreError::Empty.into()),
        };
        let key = LtxKey { level, min, max };
        let to = scratch.join(key.name());
        let out = to.clone();
        let header = blocking(scratch, move || merge_files(&paths, &out, min)).await?;
        if header.max != max {
            let why = "its header has other TXIDs than its name";
            return Err(RestoreError::Misfit { file: key.name(), why }.into());
        }
        let size = fs::metadata(&to).map_err(|error| CompactError::io(&to, error))?.len();
        let age = Age::Of(header.timestamp_ms);
        let is_image = min == Txid(1);
        Ok((key, Known { size, age, is_fence: Some(false), is_image }))
    }

    /// Write-once. A name that is taken holds the same pages: the TXIDs say so, whoever wrote it.
    async fn send(
        &self,
        key: &LtxKey,
        known: &Known,
        path: &Path,
        nonce: &dormouse_core::ids::Nonce,
    ) -> Result<(), CompactError> {
        let mut why = String::new();
        for _ in 0..SENDS_MAX {
            self.may_go_on()?;
            let put = self.place.put(key, path, nonce, known.age.ms(), Kind::Plain).await;
            why = put.1;
            match put.0 {
                PutAnswer::Done { .. } => return Ok(()),
                PutAnswer::ConditionFailed => match self.place.standing(key).await {
                    Standing::File { .. } => return Ok(()),
                    Standing::Absent | Standing::Unclear => (),
                },
                PutAnswer::Again | PutAnswer::Unknown => (),
                PutAnswer::Refused => break,
            }
        }
        Err(CompactError::Upload(why))
    }

    async fn delete(&self, files: Vec<(LtxKey, Known)>) -> Result<Change, CompactError> {
        let mut change = Change::default();
        for (key, known) in files {
            if known.is_to_be_looked_at(&key) {
                match self.learn(&key, known).await? {
                    Some(learned) => change.learned.push((key, learned)),
                    None => change.removed.push(key),
                }
                continue;
            }
            self.may_go_on()?;
            match self.place.store.delete(&self.place.key(&key), Condition::None).await {
                DeleteOutcome::Done => change.removed.push(key),
                DeleteOutcome::ConditionFailed | DeleteOutcome::Conflict => {
                    return Err(CompactError::Delete(format!("{}: was changed", key.name())));
                }
                DeleteOutcome::Unknown { why }
                | DeleteOutcome::Refused { why }
                | DeleteOutcome::Broken { why } => {
                    if change.removed.is_empty() {
                        return Err(CompactError::Delete(why));
                    }
                    break;
                }
            }
        }
        Ok(change)
    }

    /// What a list did not tell of a file; none when it is not there any more.
    async fn learn(&self, key: &LtxKey, known: Known) -> Result<Option<Known>, CompactError> {
        let name = self.place.key(key);
        let meta = match self.place.store.head(&name).await {
            Ok(meta) => meta,
            Err(ReadError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(RestoreError::from(error).into()),
        };
        let told = meta.metadata.get(META_TIMESTAMP).and_then(|text| parse_rfc3339(text));
        let ms = match told {
            Some(ms) => ms,
            None => header_of(&self.place.store, &name).await?.timestamp_ms,
        };
        let is_fence = Some(meta.metadata.contains_key(META_FENCE));
        Ok(Some(Known { age: Age::Of(ms), is_fence, ..known }))
    }
}

fn merge_files(paths: &[PathBuf], to: &Path, min: Txid) -> Result<Header, CompactError> {
    let mut decoders = Vec::new();
    for path in paths {
        let file = File::open(path).map_err(|error| CompactError::io(path, error))?;
        let file = BufReader::with_capacity(READ_BUFFER, file);
        decoders.push(Decoder::new(file, &path.to_string_lossy())?);
    }
    let out = File::create(to).map_err(|error| CompactError::io(to, error))?;
    let out = BufWriter::with_capacity(1 << 16, out);
    let (mut out, header, _) = merge_from(decoders, out, &to.to_string_lossy(), Some(min))?;
    out.flush().map_err(|error| CompactError::io(to, error))?;
    Ok(header)
}
