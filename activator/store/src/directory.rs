//! The directory store: one file an object, safe against crashes and concurrent writers.
//!
//! A new object is a temporary file with its tag and metadata in an extended attribute, fsynced,
//! then *linked* (create: the link fails where a name exists) or *renamed* under a lock file
//! (replace: tag compared and name moved by one holder at a time). File times mean nothing.
//! Files that another tool put there get a tag from inode, size and change time.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dormouse_core::ids::ETag;
use serde::{Deserialize, Serialize};

use crate::layout::Layout;
use crate::port::{
    Body, Condition, DeleteOutcome, LIST_PAGE_KEYS, ListPage, Listed, Meta, Metadata, Object,
    PutOutcome, ReadError, Store,
};
use crate::scratch::{Scratch, random_text, sweep};

const ATTRIBUTE: &str = "user.dormouse";
/// Names that begin so are ours and never keys.
const PRIVATE: &str = ".dormouse-store";
const LOCK_FILES: u64 = 64;

/// Name of the store's identity inside [`PRIVATE`].
const ID: &str = "id";

/// A store in a directory. Clones share it.
#[derive(Clone, Debug)]
pub struct DirectoryStore {
    root: Arc<Path>,
    id: Arc<str>,
}

/// Why a directory cannot be a store.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// Extended attributes are refused.
    #[error(
        "{} is on a file system without user extended attributes: put the store on ext4, xfs, \
         btrfs or an overlay of one (tmpfs needs Linux 6.6), or mount with user_xattr",
        path.display()
    )]
    NoAttributes {
        /// The store's directory.
        path: PathBuf,
    },
    /// Hard links are refused.
    #[error("{} is on a file system without hard links, which creating objects needs", path.display())]
    NoLinks {
        /// The store's directory.
        path: PathBuf,
    },
    /// Anything else.
    #[error("store directory {}: {source}", path.display())]
    Io {
        /// The store's directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

#[derive(Debug, Serialize, Deserialize)]
struct Attribute {
    etag: ETag,
    metadata: Metadata,
}

impl DirectoryStore {
    /// Opens (and makes) the directory, sweeps what crashed writers left, and checks that the
    /// file system has what the store needs. Blocks.
    pub fn open(root: &Path) -> Result<Self, DirectoryError> {
        let io = |source| DirectoryError::Io { path: root.to_owned(), source };
        let scratch_dir = root.join(PRIVATE).join("tmp");
        fs::create_dir_all(&scratch_dir).map_err(io)?;
        fs::create_dir_all(root.join(PRIVATE).join("locks")).map_err(io)?;
        sweep(&scratch_dir).map_err(io)?;
        let scratch = Scratch::create(&scratch_dir).map_err(io)?;
        if let Err(error) = xattr::set(&scratch.path, ATTRIBUTE, b"probe") {
            return Err(if error.kind() == io::ErrorKind::Unsupported {
                DirectoryError::NoAttributes { path: root.to_owned() }
            } else {
                io(error)
            });
        }
        let link = Scratch {
            path: scratch_dir.join(random_text().map_err(io)?),
            file: scratch.file.try_clone().map_err(io)?,
        };
        fs::hard_link(&scratch.path, &link.path)
            .map_err(|_| DirectoryError::NoLinks { path: root.to_owned() })?;
        let id = identity(&root.join(PRIVATE), &scratch).map_err(io)?;
        Ok(Self { root: root.into(), id: id.into() })
    }

    /// Random, made with the store: a directory whose disk is not mounted is another store.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.id
    }

    /// Where it is, for people.
    #[must_use]
    pub fn place(&self) -> String {
        self.root.display().to_string()
    }

    /// Whether the directory still is this store. An absent disk must never look like absent keys.
    fn check_present(&self) -> io::Result<()> {
        match fs::read_to_string(self.root.join(PRIVATE).join(ID)) {
            Ok(id) if id == *self.id => Ok(()),
            Ok(_) | Err(_) => Err(io::Error::other(format!(
                "{} is not the store that was opened: is its disk mounted?",
                self.root.display()
            ))),
        }
    }

    /// Where a key is; every operation comes through here.
    fn path(&self, key: &str) -> io::Result<PathBuf> {
        self.check_present()?;
        let clean = !key.is_empty()
            && key.split('/').all(|part| {
                !matches!(part, "" | "." | "..") && part != PRIVATE && !part.contains('\0')
            });
        if clean {
            Ok(self.root.join(key))
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidInput, format!("not a key: {key:?}")))
        }
    }

    fn read(&self, key: &str, range: Option<(u64, u64)>) -> io::Result<Object> {
        let mut file = File::open(self.path(key)?)?;
        let meta = meta_of(&file)?;
        let mut body = Vec::new();
        match range {
            None => drop(file.read_to_end(&mut body)?),
            Some((offset, len)) => {
                file.seek(SeekFrom::Start(offset))?;
                file.take(len).read_to_end(&mut body)?;
            }
        }
        Ok(Object { meta, body })
    }

    fn write(
        &self,
        key: &str,
        body: &Body,
        condition: &Condition,
        metadata: Metadata,
    ) -> io::Result<PutOutcome> {
        let path = self.path(key)?;
        // Cheap refusals first: nothing is written for a condition that already fails.
        match condition {
            Condition::IfAbsent if path.symlink_metadata().is_ok() => {
                return Ok(PutOutcome::ConditionFailed);
            }
            Condition::IfMatch(expected) if current_tag(&path)?.as_ref() != Some(expected) => {
                return Ok(PutOutcome::ConditionFailed);
            }
            Condition::None | Condition::IfAbsent | Condition::IfMatch(_) => (),
        }
        let mut scratch = Scratch::create(&self.root.join(PRIVATE).join("tmp"))?;
        match body {
            Body::Bytes(bytes) => scratch.file.write_all(bytes)?,
            Body::File(source) => drop(io::copy(&mut File::open(source)?, &mut scratch.file)?),
        }
        let etag = ETag(format!("\"{}\"", random_text()?));
        let attribute = serde_json::to_vec(&Attribute { etag: etag.clone(), metadata })?;
        xattr::set(&scratch.path, ATTRIBUTE, &attribute)?;
        scratch.file.sync_all()?;
        let parent = path.parent().unwrap_or(&self.root);
        make_dirs(&self.root, parent)?;
        let placed = match condition {
            Condition::IfAbsent => match fs::hard_link(&scratch.path, &path) {
                Ok(()) => true,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
                Err(error) => return Err(error),
            },
            Condition::None => {
                let _lock = self.lock(key)?;
                fs::rename(&scratch.path, &path)?;
                true
            }
            Condition::IfMatch(expected) => {
                let _lock = self.lock(key)?;
                let same = current_tag(&path)?.as_ref() == Some(expected);
                if same {
                    fs::rename(&scratch.path, &path)?;
                }
                same
            }
        };
        if !placed {
            return Ok(PutOutcome::ConditionFailed);
        }
        if let Err(error) = sync_dir(parent) {
            // The name is there but may not survive a power loss: neither done nor failed.
            return Ok(PutOutcome::Unknown { why: format!("fsync of the directory: {error}") });
        }
        Ok(PutOutcome::Done { etag })
    }

    fn remove(&self, key: &str, condition: &Condition) -> io::Result<DeleteOutcome> {
        let path = self.path(key)?;
        let _lock = self.lock(key)?;
        match condition {
            Condition::None => (),
            Condition::IfAbsent => return Ok(DeleteOutcome::ConditionFailed),
            Condition::IfMatch(expected) => {
                if current_tag(&path)?.as_ref() != Some(expected) {
                    return Ok(DeleteOutcome::ConditionFailed);
                }
            }
        }
        match fs::remove_file(&path) {
            Ok(()) => sync_dir(path.parent().unwrap_or(&self.root))?,
            Err(error) if is_absent(&error) => (),
            Err(error) => return Err(error),
        }
        Ok(DeleteOutcome::Done)
    }

    /// One of a fixed set of lock files; keys that share one only wait for each other.
    fn lock(&self, key: &str) -> io::Result<File> {
        let sum = key.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let path = self.root.join(PRIVATE).join("locks").join((sum % LOCK_FILES).to_string());
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        file.lock()?;
        Ok(file)
    }

    fn walk(&self, prefix: &str, start_after: Option<&str>) -> io::Result<ListPage> {
        self.check_present()?;
        let mut page = ListPage::default();
        let mut walk = Walk { prefix, start_after, page: &mut page };
        walk.dir(&self.root, "")?;
        if page.entries.len() > LIST_PAGE_KEYS {
            page.entries.truncate(LIST_PAGE_KEYS);
            page.next = page.entries.last().map(|last| last.key.clone());
        }
        Ok(page)
    }
}

struct Walk<'a> {
    prefix: &'a str,
    start_after: Option<&'a str>,
    page: &'a mut ListPage,
}

impl Walk<'_> {
    /// Depth first in key order; a directory that cannot hold a wanted key is not entered.
    fn dir(&mut self, dir: &Path, at: &str) -> io::Result<()> {
        let mut names = Vec::new();
        let entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(error) if is_absent(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name == PRIVATE {
                continue;
            }
            let slash = if entry.file_type()?.is_dir() { "/" } else { "" };
            names.push(format!("{at}{name}{slash}"));
        }
        names.sort_unstable();
        for key in names {
            if self.page.entries.len() > LIST_PAGE_KEYS {
                return Ok(());
            }
            let path = child(dir, &key);
            if key.ends_with('/') {
                let wanted = key.starts_with(self.prefix) || self.prefix.starts_with(&key);
                let passed = self.start_after.is_some_and(|s| s > &*key && !s.starts_with(&key));
                if wanted && !passed {
                    self.dir(&path, &key)?;
                }
            } else if key.starts_with(self.prefix) && self.start_after.is_none_or(|s| &*key > s) {
                match path.metadata() {
                    Ok(meta) => self.page.entries.push(Listed { key, size: meta.len() }),
                    Err(error) if is_absent(&error) => (),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

fn child(dir: &Path, key: &str) -> PathBuf {
    dir.join(key.trim_end_matches('/').rsplit('/').next().unwrap_or(key))
}

fn meta_of(file: &File) -> io::Result<Meta> {
    let stat = file.metadata()?;
    if stat.is_dir() {
        return Err(io::Error::from(io::ErrorKind::NotFound));
    }
    let attribute = match xattr::FileExt::get_xattr(file, ATTRIBUTE)? {
        Some(bytes) => serde_json::from_slice(&bytes)?,
        None => Attribute {
            etag: ETag(format!(
                "\"file-{:x}-{:x}-{:x}-{:x}\"",
                stat.ino(),
                stat.len(),
                stat.ctime(),
                stat.ctime_nsec()
            )),
            metadata: Metadata::new(),
        },
    };
    Ok(Meta { etag: attribute.etag, size: stat.len(), metadata: attribute.metadata, age: None })
}

fn current_tag(path: &Path) -> io::Result<Option<ETag>> {
    match File::open(path).and_then(|file| meta_of(&file)) {
        Ok(meta) => Ok(Some(meta.etag)),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Makes missing directories and makes their names durable, from the top.
fn make_dirs(root: &Path, dir: &Path) -> io::Result<()> {
    if dir == root || dir.is_dir() {
        return Ok(());
    }
    let parent = dir.parent().unwrap_or(root);
    make_dirs(root, parent)?;
    match fs::create_dir(dir) {
        Ok(()) => (),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => (),
        Err(error) => return Err(error),
    }
    sync_dir(parent)
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// The identity that is there, or a new one; of two makers one wins.
fn identity(private: &Path, scratch: &Scratch) -> io::Result<String> {
    let path = private.join(ID);
    if !path.exists() {
        fs::write(&scratch.path, random_text()?)?;
        scratch.file.sync_all()?;
        match fs::hard_link(&scratch.path, &path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => sync_dir(private)?,
        }
    }
    fs::read_to_string(path)
}

/// Full disks and faults heal; a key that cannot be one, or missing rights, do not.
fn is_refusal(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidInput
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::NotADirectory
    )
}

fn read_error(key: &str, error: &io::Error) -> ReadError {
    let (key, why) = (key.to_owned(), error.to_string());
    if is_absent(error) {
        ReadError::NotFound { key }
    } else if is_refusal(error) {
        ReadError::Refused { key, why }
    } else {
        ReadError::Broken { key, why }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(io::Error::other(error)),
    }
}

impl Store for DirectoryStore {
    fn layout(&self) -> Layout {
        Layout::Directory
    }

    async fn get(&self, key: &str) -> Result<Object, ReadError> {
        let (store, owned) = (self.clone(), key.to_owned());
        blocking(move || store.read(&owned, None)).await.map_err(|error| read_error(key, &error))
    }

    async fn get_range(&self, key: &str, offset: u64, len: u64) -> Result<Object, ReadError> {
        let (store, owned) = (self.clone(), key.to_owned());
        let range = Some((offset, len));
        blocking(move || store.read(&owned, range)).await.map_err(|error| read_error(key, &error))
    }

    async fn head(&self, key: &str) -> Result<Meta, ReadError> {
        let (store, owned) = (self.clone(), key.to_owned());
        blocking(move || meta_of(&File::open(store.path(&owned)?)?))
            .await
            .map_err(|error| read_error(key, &error))
    }

    async fn put(
        &self,
        key: &str,
        body: Body,
        condition: Condition,
        metadata: Metadata,
    ) -> PutOutcome {
        let (store, key) = (self.clone(), key.to_owned());
        match blocking(move || store.write(&key, &body, &condition, metadata)).await {
            Ok(outcome) => outcome,
            Err(error) if is_refusal(&error) => PutOutcome::Refused { why: error.to_string() },
            Err(error) => PutOutcome::Broken { why: error.to_string() },
        }
    }

    async fn delete(&self, key: &str, condition: Condition) -> DeleteOutcome {
        let (store, key) = (self.clone(), key.to_owned());
        match blocking(move || store.remove(&key, &condition)).await {
            Ok(outcome) => outcome,
            Err(error) if is_refusal(&error) => DeleteOutcome::Refused { why: error.to_string() },
            Err(error) => DeleteOutcome::Broken { why: error.to_string() },
        }
    }

    async fn list(&self, prefix: &str, start_after: Option<&str>) -> Result<ListPage, ReadError> {
        let (store, owned) = (self.clone(), prefix.to_owned());
        let after = start_after.map(str::to_owned);
        blocking(move || store.walk(&owned, after.as_deref()))
            .await
            .map_err(|error| read_error(prefix, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract;

    fn store() -> (tempfile::TempDir, DirectoryStore) {
        let dir = tempfile::tempdir().unwrap();
        let store = DirectoryStore::open(dir.path()).unwrap();
        (dir, store)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_directory_store_keeps_the_contract() {
        let (_dir, store) = store();
        contract::check(&store, "contract", 32).await;
    }

    #[tokio::test]
    async fn the_probe_finds_both_conditions_honoured() {
        let (_dir, store) = store();
        let probe = crate::probe(&store, "p").await.unwrap();
        assert!(probe.is_safe() && probe.honours_conditional_delete);
        assert_eq!(store.list("", None).await.unwrap().entries, []);
    }

    #[tokio::test]
    async fn what_a_crashed_writer_left_is_swept_and_never_listed() {
        let (dir, store) = store();
        let left = dir.path().join(PRIVATE).join("tmp").join("left-behind");
        fs::write(&left, b"half").unwrap();
        assert_eq!(store.list("", None).await.unwrap().entries, []);
        DirectoryStore::open(dir.path()).unwrap();
        assert!(!left.exists());
    }

    #[tokio::test]
    async fn a_store_whose_disk_is_gone_never_looks_empty() {
        let (dir, store) = store();
        let root = dir.path().join("root");
        let aside = dir.path().join("aside");
        drop(store);
        let store = DirectoryStore::open(&root).unwrap();
        fs::rename(&root, &aside).unwrap();
        for _ in 0..2 {
            let got = store.get("k").await.unwrap_err();
            assert!(
                matches!(&got, ReadError::Broken { why, .. } if why.contains("mounted")),
                "{got}"
            );
            assert!(matches!(store.list("", None).await, Err(ReadError::Broken { .. })));
            let put = store.put("k", Body::from(vec![1]), Condition::None, Metadata::new());
            assert!(matches!(put.await, PutOutcome::Broken { .. }));
            // The second time another store is there.
            let other = DirectoryStore::open(&root).unwrap();
            assert_ne!(other.identity(), store.identity());
        }
        fs::remove_dir_all(&root).unwrap();
        fs::rename(&aside, &root).unwrap();
        assert!(matches!(store.get("k").await, Err(ReadError::NotFound { .. })));
    }

    #[tokio::test]
    async fn a_temporary_file_in_use_is_not_swept() {
        let (dir, _store) = store();
        let scratch = Scratch::create(&dir.path().join(PRIVATE).join("tmp")).unwrap();
        DirectoryStore::open(dir.path()).unwrap();
        assert!(scratch.path.exists());
    }

    #[tokio::test]
    async fn a_file_of_another_tool_can_be_read_and_replaced() {
        let (dir, store) = store();
        fs::write(dir.path().join("foreign"), b"hello").unwrap();
        let object = store.get("foreign").await.unwrap();
        assert_eq!(object.body, b"hello");
        let swap = Condition::IfMatch(object.meta.etag.clone());
        let done = store.put("foreign", Body::from(b"x".to_vec()), swap.clone(), Metadata::new());
        assert!(matches!(done.await, PutOutcome::Done { .. }));
        let stale = store.put("foreign", Body::from(b"y".to_vec()), swap, Metadata::new()).await;
        assert_eq!(stale, PutOutcome::ConditionFailed);
    }

    #[tokio::test]
    async fn keys_that_leave_the_directory_are_refused() {
        let (_dir, store) = store();
        for key in ["../x", "a//b", "", "/etc/passwd", ".dormouse-store/tmp/x"] {
            let outcome =
                store.put(key, Body::from(vec![1]), Condition::None, Metadata::new()).await;
            assert!(matches!(outcome, PutOutcome::Refused { .. }), "{key}");
        }
    }
}
