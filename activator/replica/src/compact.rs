//! Compaction at sleep: what keeps the next restore at a few GETs.
//!
//! Everything is built from acknowledged files only: a snapshot from the closed database, which
//! equals the newest acknowledged L0; level 1 from L0s of the store. Write-once like all uploads.
//! Of level 0 only what a higher level covers is deleted, never the newest file, never a fence.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use dormouse_core::ids::{Nonce, Txid};
use dormouse_core::upload::PutAnswer;
use dormouse_store::{Condition, DeleteOutcome, LtxKey, ReadError, Store};

use crate::ltx::{Decoder, Encoder, Encoding, Header, LtxError, PageSize, Pgno};
use crate::merge::merge;
use crate::put::{Kind, META_FENCE, Place};
use crate::restore::{Listing, RemoteFile, RestoreError, SNAPSHOT_LEVEL, Target};

/// Files that a restore may read before a compaction is worth its requests.
pub const PLAN_FILES_MAX: usize = 16;
/// A snapshot is written when the increments weigh this share of the base.
const SNAPSHOT_SHARE: u64 = 2; // one half

/// The closed database, which equals the newest acknowledged L0.
#[derive(Clone, Debug)]
pub struct Closed {
    /// The database file; nobody writes to it until the compaction has ended.
    pub database: PathBuf,
    /// The host's state directory, for temporary files.
    pub state_dir: PathBuf,
    /// What the file equals.
    pub txid: Txid,
    /// Bytes a page.
    pub page_size: PageSize,
    /// Pages.
    pub page_count: u32,
    /// Milliseconds since 1970, for headers.
    pub timestamp_ms: i64,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// The file that was written.
    pub written: Option<LtxKey>,
    /// L0 files that were deleted.
    pub deleted: u32,
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
    /// The upload did not succeed.
    #[error("upload of the compacted file: {0}")]
    Upload(String),
}

/// What to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// A restore is cheap enough.
    Nothing,
    /// A full image at level 9.
    Snapshot,
    /// These L0 files into one of level 1.
    Merge(Vec<RemoteFile>),
}

/// Chooses by names and sizes alone.
pub fn choose(listing: &Listing, txid: Txid) -> Result<Choice, CompactError> {
    let plan = listing.plan(Target::Latest)?;
    let remote = listing.tip().map_or(Txid(0), |tip| tip.key.max);
    if remote != txid {
        return Err(CompactError::Moved { remote, local: txid });
    }
    if plan.len() <= PLAN_FILES_MAX {
        return Ok(Choice::Nothing);
    }
    let base = plan.first().map_or(0, |file| file.size);
    let increments: u64 = plan.iter().skip(1).map(|file| file.size).sum();
    if increments.saturating_mul(SNAPSHOT_SHARE) >= base {
        return Ok(Choice::Snapshot);
    }
    let level = |n| listing.files.iter().filter(move |file| file.key.level == n);
    let merged = level(1).map(|file| file.key.max).max().unwrap_or(Txid(0));
    let inputs: Vec<_> = level(0).filter(|file| file.key.min > merged).copied().collect();
    let follows = inputs.windows(2).all(|pair| match pair {
        [a, b] => b.key.min == a.key.max.next(),
        _ => true,
    });
    // A hole among the L0s is covered by a snapshot: merging would put it into level 1.
    Ok(if follows && inputs.len() > 1 { Choice::Merge(inputs) } else { Choice::Snapshot })
}

/// Compacts if it is worth it.
pub async fn compact<S: Store>(
    place: &Place<S>,
    closed: &Closed,
    nonce: &Nonce,
) -> Result<Compacted, CompactError> {
    let scratch = closed.state_dir.join("compact.tmp");
    let result = compact_by(place, closed, nonce, &scratch).await;
    crate::restore::remove(&scratch)
        .map_err(|source| CompactError::Io { path: scratch, source })?;
    result
}

async fn compact_by<S: Store>(
    place: &Place<S>,
    closed: &Closed,
    nonce: &Nonce,
    scratch: &Path,
) -> Result<Compacted, CompactError> {
    let listing = Listing::read(&place.store, &place.prefix, &place.host).await?;
    let key = match choose(&listing, closed.txid)? {
        Choice::Nothing => return Ok(Compacted::default()),
        Choice::Snapshot => {
            let (from, to) = (closed.clone(), scratch.to_owned());
            blocking(scratch, move || write_snapshot(&from, &to)).await?;
            LtxKey { level: SNAPSHOT_LEVEL, min: Txid(1), max: closed.txid }
        }
        Choice::Merge(inputs) => merge_level_1(place, closed, &inputs, scratch).await?,
    };
    let (answer, why) = place.put(&key, scratch, nonce, closed.timestamp_ms, Kind::Plain).await;
    match answer {
        PutAnswer::Done { .. } => (),
        // The same TXIDs hold the same pages, whoever wrote them; deleting waits for a next time.
        PutAnswer::ConditionFailed => return Ok(Compacted::default()),
        PutAnswer::Again | PutAnswer::Unknown | PutAnswer::Refused => {
            return Err(CompactError::Upload(why));
        }
    }
    let deleted = delete_covered(place, &listing, key).await?;
    Ok(Compacted { written: Some(key), deleted })
}

fn write_snapshot(closed: &Closed, to: &Path) -> Result<(), CompactError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| CompactError::Io { path, source }
    };
    let size = closed.page_size;
    let mut header = Header::new(size, closed.page_count, Txid(1), closed.txid);
    header.timestamp_ms = closed.timestamp_ms;
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
    let (mut out, _) = encoder.finish()?;
    out.flush().map_err(io(to))
}

async fn merge_level_1<S: Store>(
    place: &Place<S>,
    closed: &Closed,
    inputs: &[RemoteFile],
    to: &Path,
) -> Result<LtxKey, CompactError> {
    let dir = closed.state_dir.join("compact.d");
    let io = |source| CompactError::Io { path: dir.clone(), source };
    fs::create_dir_all(&dir).map_err(io)?;
    let mut paths = Vec::new();
    for file in inputs {
        let object = place.store.get(&place.key(&file.key)).await.map_err(RestoreError::from)?;
        let path = dir.join(file.key.name());
        fs::write(&path, &object.body).map_err(io)?;
        paths.push(path);
    }
    let out = to.to_owned();
    let header = blocking(to, move || {
        let io = |source| CompactError::Io { path: out.clone(), source };
        let mut decoders = Vec::new();
        for path in &paths {
            let file = BufReader::new(File::open(path).map_err(io)?);
            decoders.push(Decoder::new(file, &path.to_string_lossy())?);
        }
        let file = BufWriter::with_capacity(1 << 16, File::create(&out).map_err(io)?);
        let (mut file, header, _) = merge(decoders, file, "level 1")?;
        file.flush().map_err(io)?;
        Ok(header)
    })
    .await?;
    fs::remove_dir_all(&dir).map_err(io)?;
    Ok(LtxKey { level: 1, min: header.min, max: header.max })
}

/// Deletes L0 files that `by` covers; the newest stays, and fences stay.
async fn delete_covered<S: Store>(
    place: &Place<S>,
    listing: &Listing,
    by: LtxKey,
) -> Result<u32, CompactError> {
    let newest = listing.tip().map_or(Txid(0), |tip| tip.key.max);
    let mut deleted = 0;
    for file in &listing.files {
        let key = &file.key;
        let covered = key.level == 0 && key.min >= by.min && key.max <= by.max;
        if !covered || key.max == newest {
            continue;
        }
        let name = place.key(key);
        match place.store.head(&name).await {
            Ok(meta) if meta.metadata.contains_key(META_FENCE) => continue,
            Ok(_) => (),
            Err(ReadError::NotFound { .. }) => continue,
            Err(error) => return Err(RestoreError::from(error).into()),
        }
        match place.store.delete(&name, Condition::None).await {
            DeleteOutcome::Done => deleted += 1,
            DeleteOutcome::ConditionFailed
            | DeleteOutcome::Conflict
            | DeleteOutcome::Unknown { .. }
            | DeleteOutcome::Refused { .. }
            | DeleteOutcome::Broken { .. } => return Ok(deleted),
        }
    }
    Ok(deleted)
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> Result<T, CompactError> + Send + 'static,
) -> Result<T, CompactError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => {
            Err(CompactError::Io { path: path.to_owned(), source: io::Error::other(error) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{PREFIX, World, insert};

    async fn slept(
        base_rows: u32,
        increments: u32,
    ) -> (World, Closed, Place<dormouse_store::DirectoryStore>) {
        let mut world = World::new();
        let app = world.app(4096);
        insert(&app, base_rows, 1000);
        let mut follower = world.follow(false);
        world.ship(&mut follower).await;
        for n in 0..increments {
            app.execute("UPDATE t SET a = ?1 WHERE id = 1 + ?1", [n]).unwrap();
            world.ship(&mut follower).await;
        }
        drop(app);
        let (page_size, page_count) = (follower.page_size(), follower.page_count());
        follower.close_clean().unwrap();
        let closed = Closed {
            database: world.db(),
            state_dir: world.state(),
            txid: world.txid,
            page_size,
            page_count,
            timestamp_ms: 2_000,
        };
        let place = Place {
            store: world.store.clone(),
            prefix: PREFIX.to_owned(),
            host: world.host.clone(),
        };
        (world, closed, place)
    }

    async fn l0s(world: &World) -> Vec<u64> {
        let listing = Listing::read(&world.store, PREFIX, &world.host).await.unwrap();
        listing.files.iter().filter(|f| f.key.level == 0).map(|f| f.key.max.0).collect()
    }

    #[tokio::test]
    async fn a_cheap_restore_is_left_alone() {
        let (_world, closed, place) = slept(10, 5).await;
        let done = compact(&place, &closed, &Nonce::from("c")).await.unwrap();
        assert_eq!(done, Compacted::default());
    }

    #[tokio::test]
    async fn heavy_increments_become_a_snapshot_and_the_newest_l0_stays() {
        let (world, closed, place) = slept(20, 20).await;
        let done = compact(&place, &closed, &Nonce::from("c")).await.unwrap();
        assert_eq!(done.written, Some(LtxKey { level: 9, min: Txid(1), max: Txid(21) }));
        assert_eq!(done.deleted, 20);
        assert_eq!(l0s(&world).await, [21]);
        world.assert_restore_is_identical().await;
    }

    #[tokio::test]
    async fn light_increments_become_one_file_of_level_1() {
        let (world, closed, place) = slept(2000, 20).await;
        let done = compact(&place, &closed, &Nonce::from("c")).await.unwrap();
        assert_eq!(done.written, Some(LtxKey { level: 1, min: Txid(1), max: Txid(21) }));
        assert_eq!(l0s(&world).await, [21]);
        world.assert_restore_is_identical().await;
    }

    #[tokio::test]
    async fn a_fence_is_never_deleted() {
        let (world, closed, place) = slept(20, 20).await;
        let path = world.ltx_path(0, 5, 5);
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let as_fence = world.dir.path().join("fence");
        fs::write(&as_fence, bytes).unwrap();
        let key = LtxKey { level: 0, min: Txid(5), max: Txid(5) };
        let put = place.put(&key, &as_fence, &Nonce::from("f"), 1, Kind::Fence).await.0;
        assert!(matches!(put, PutAnswer::Done { .. }));
        compact(&place, &closed, &Nonce::from("c")).await.unwrap();
        assert_eq!(l0s(&world).await, [5, 21]);
        world.assert_restore_is_identical().await;
    }

    #[tokio::test]
    async fn a_replica_that_went_on_elsewhere_is_not_compacted() {
        let (_world, mut closed, place) = slept(20, 20).await;
        closed.txid = Txid(20);
        let error = compact(&place, &closed, &Nonce::from("c")).await.unwrap_err();
        assert!(matches!(error, CompactError::Moved { remote: Txid(21), local: Txid(20) }));
    }
}
