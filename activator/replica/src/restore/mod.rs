//! Restoring a replica into a file that is complete, verified and durable, or not there.
//!
//! List, plan, read ahead, apply in order. Every file's checksum is verified, also that of pages
//! which a later file overwrites. The file keeps its temporary name until [`Restored::adopt`]:
//! the caller may have to fence first.

mod apply;
mod error;
mod fetch;
mod plan;
mod progress;
mod search;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dormouse_core::ids::{ETag, Host, Txid};
use dormouse_store::Store;

pub use error::RestoreError;
pub(crate) use fetch::to_file;
pub use plan::{Listing, RemoteFile, SNAPSHOT_LEVEL, Target};
pub use progress::Progress;

use crate::follow::wal_path;
use crate::ltx::{HEADER_LEN, Header, LtxError, PageSize};
use crate::spool::sync_dir;

/// Plans that are tried when files vanish under the reader.
const PLANS_MAX: u32 = 5;
/// A page of the database that stands for an empty remote.
const EMPTY_PAGE_SIZE: u32 = 4096;

/// A restored database under its temporary name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// The temporary file.
    pub path: PathBuf,
    /// What it holds; 0 for the empty database over an empty remote.
    pub txid: Txid,
    /// Tag of the L0 `txid`; unknown when another level's file, which ends there too, came last.
    pub etag: Option<ETag>,
    /// Bytes a page.
    pub page_size: PageSize,
    /// Pages.
    pub page_count: u32,
    /// Time of the last file, milliseconds since 1970.
    pub timestamp_ms: i64,
}

/// What a restore would read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The files, in order.
    pub files: Vec<RemoteFile>,
    /// What is reached.
    pub txid: Txid,
    /// Requests of the plan and of the restore.
    pub requests: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Time of the last file, milliseconds since 1970.
    pub timestamp_ms: i64,
}

/// Says what [`restore`] would read, and reads nothing but names and headers.
pub async fn plan<S: Store>(
    store: &S,
    prefix: &str,
    host: &Host,
    target: Target,
) -> Result<Plan, RestoreError> {
    let mut tries = 1;
    loop {
        match plan_once(store, prefix, host, target).await {
            Err(error) if error.is_stale_list() && tries < PLANS_MAX => tries += 1,
            result => return result,
        }
    }
}

async fn plan_once<S: Store>(
    store: &S,
    prefix: &str,
    host: &Host,
    target: Target,
) -> Result<Plan, RestoreError> {
    let (files, requests) = files_for(store, prefix, host, target).await?;
    let Some(last) = files.last() else { return Err(RestoreError::Empty) };
    let header = header_of(store, &store.layout().ltx_key(prefix, host, &last.key)).await?;
    Ok(Plan {
        txid: last.key.max,
        requests: requests.saturating_add(files.iter().map(fetch::requests).sum()),
        bytes: files.iter().map(|file| file.size).sum(),
        timestamp_ms: header.timestamp_ms,
        files,
    })
}

/// Lists and chooses; with the number of requests that took.
async fn files_for<S: Store>(
    store: &S,
    prefix: &str,
    host: &Host,
    target: Target,
) -> Result<(Vec<RemoteFile>, u64), RestoreError> {
    let mut listing = Listing::read(store, prefix, host).await?;
    let keys = u64::try_from(listing.files.len()).unwrap_or(u64::MAX);
    let page = u64::try_from(dormouse_store::LIST_PAGE_KEYS).unwrap_or(u64::MAX);
    let mut requests = keys.div_ceil(page).max(1);
    if let Target::Timestamp(ms) = target {
        requests += search::keep_until(store, prefix, host, &mut listing, ms).await?;
    }
    Ok((listing.plan(target)?, requests))
}

/// Restores into `temporary`, which is overwritten; removed again when it fails.
pub async fn restore<S: Store>(
    store: &S,
    prefix: &str,
    host: &Host,
    target: Target,
    temporary: &Path,
) -> Result<Restored, RestoreError> {
    restore_watched(store, prefix, host, target, temporary, &Progress::default()).await
}

/// As [`restore`], for someone who watches.
pub async fn restore_watched<S: Store>(
    store: &S,
    prefix: &str,
    host: &Host,
    target: Target,
    temporary: &Path,
    progress: &Progress,
) -> Result<Restored, RestoreError> {
    let mut tries = 1;
    let result = loop {
        let applied = async {
            let (files, _) = files_for(store, prefix, host, target).await?;
            progress.begin(files.iter().map(|file| file.size).sum());
            let chunks = fetch::start(store, prefix, host, &files);
            let (path, progress) = (temporary.to_owned(), progress.clone());
            let work = move || {
                let target = apply::Target::create(&path)?;
                apply_files(target, &path, &files, chunks, &progress)
            };
            blocking(temporary, work).await
        };
        match applied.await {
            // Compacted away under us.
            Err(error) if error.is_stale_list() && tries < PLANS_MAX => tries += 1,
            result => break result,
        }
    };
    if result.is_err() {
        // What it broke off must not fill the disk; the first error is the one to tell.
        drop(remove(temporary));
    }
    result
}

/// The header of a file in the store.
pub(crate) async fn header_of<S: Store>(store: &S, key: &str) -> Result<Header, RestoreError> {
    let len = u64::try_from(HEADER_LEN).unwrap_or(u64::MAX);
    let object = store.get_range(key, 0, len).await?;
    let Some(head) = object.body.first_chunk::<HEADER_LEN>() else {
        return Err(RestoreError::Misfit { file: key.to_owned(), why: "shorter than a header" });
    };
    Ok(Header::decode(head).map_err(|fault| LtxError { file: key.into(), offset: 0, fault })?)
}

fn apply_files(
    mut target: apply::Target,
    path: &Path,
    plan: &[RemoteFile],
    mut chunks: fetch::Chunks,
    progress: &Progress,
) -> Result<Restored, RestoreError> {
    let mut last = None;
    for file in plan {
        let name = format!("level {} file {}", file.key.level, file.key.name());
        let mut reader = fetch::FileReader::new(&mut chunks, progress, file.size);
        let applied = target.apply(&mut reader, &name);
        let (etag, failed) = (reader.etag.take(), reader.failed.take());
        if let Some(error) = failed {
            return Err(error.into());
        }
        let header = applied?;
        if (header.min, header.max) != (file.key.min, file.key.max) {
            let why = "its header has other TXIDs than its name";
            return Err(RestoreError::Misfit { file: name, why });
        }
        last = Some((header, etag.filter(|_| file.key.level == 0)));
    }
    let Some((header, etag)) = last else { return Err(RestoreError::Empty) };
    let (page_size, page_count) = target.finish()?;
    Ok(Restored {
        path: path.to_owned(),
        txid: header.max,
        etag,
        page_size,
        page_count,
        timestamp_ms: header.timestamp_ms,
    })
}

impl Restored {
    /// The database that stands for an empty remote: one empty page in WAL mode.
    pub async fn empty(temporary: &Path) -> Result<Self, RestoreError> {
        let path = temporary.to_owned();
        blocking(temporary, move || {
            let io = |error: io::Error| RestoreError::io(&path, error);
            remove(&path).map_err(io)?;
            make_empty(&path).map_err(|error| io(io::Error::other(error)))?;
            fs::File::open(&path).and_then(|file| file.sync_all()).map_err(io)?;
            let page_size = PageSize::new(EMPTY_PAGE_SIZE).ok_or(RestoreError::Empty)?;
            let made =
                Self { path, txid: Txid(0), etag: None, page_size, page_count: 1, timestamp_ms: 0 };
            Ok(made)
        })
        .await
    }

    /// Applies the L0 after this one, which another writer put there, to the unfinished file.
    pub async fn apply_one<S: Store>(
        &mut self,
        store: &S,
        prefix: &str,
        host: &Host,
    ) -> Result<(), RestoreError> {
        let next = self.txid.next();
        let key = dormouse_store::LtxKey::l0(next);
        let size = store.head(&store.layout().ltx_key(prefix, host, &key)).await?.size;
        let plan = vec![RemoteFile { key, size }];
        let chunks = fetch::start(store, prefix, host, &plan);
        let (path, page_size, page_count) = (self.path.clone(), self.page_size, self.page_count);
        // TXID 1 is complete by itself, whatever page size stood for the empty remote.
        let is_first = next == Txid(1);
        *self = blocking(&self.path, move || {
            let target = if is_first {
                apply::Target::create(&path)?
            } else {
                apply::Target::reopen(&path, page_size, page_count)?
            };
            apply_files(target, &path, &plan, chunks, &Progress::default())
        })
        .await?;
        Ok(())
    }

    /// Gives the file its name: stale `-wal` and `-shm` go first. Blocks.
    ///
    /// `owner` is the user and group of the app.
    pub fn adopt(&self, database: &Path, owner: Option<(u32, u32)>) -> Result<(), RestoreError> {
        let io = |error: io::Error| RestoreError::io(database, error);
        let parent = database.parent().unwrap_or(Path::new("/"));
        if let Some((uid, gid)) = owner {
            std::os::unix::fs::chown(&self.path, Some(uid), Some(gid)).map_err(io)?;
        }
        for stale in side_files(database) {
            remove(&stale).map_err(io)?;
        }
        sync_dir(parent).map_err(io)?;
        fs::rename(&self.path, database).map_err(io)?;
        sync_dir(parent).map_err(io)
    }
}

/// `-wal`, `-shm` and `-journal` of a database.
pub(crate) fn side_files(database: &Path) -> [PathBuf; 3] {
    let with = |suffix: &str| {
        let mut name = database.as_os_str().to_owned();
        name.push(suffix);
        PathBuf::from(name)
    };
    [wal_path(database), with("-shm"), with("-journal")]
}

fn make_empty(path: &Path) -> rusqlite::Result<()> {
    let conn = rusqlite::Connection::open(path)?;
    conn.pragma_update(None, "page_size", EMPTY_PAGE_SIZE)?;
    conn.pragma_update(None, "journal_mode", "wal")?;
    conn.close().map_err(|(_conn, error)| error)
}

pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> Result<T, RestoreError> + Send + 'static,
) -> Result<T, RestoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(RestoreError::io(path, io::Error::other(error))),
    }
}

#[cfg(test)]
mod tests;
