//! The port: what every store can do, and how its answers are told apart.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use dormouse_core::ids::ETag;

use crate::layout::Layout;

/// Keys that one page of a list holds at most (the limit of S3).
pub const LIST_PAGE_KEYS: usize = 1000;

/// User metadata of an object: lower-case names without the `x-amz-meta-` of S3.
pub type Metadata = BTreeMap<String, String>;

/// What must hold for a write to happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Nothing: overwrite what is there.
    None,
    /// The key holds no object (`If-None-Match: *`).
    IfAbsent,
    /// The key holds an object with this very tag (`If-Match`).
    IfMatch(ETag),
}

/// The bytes of a PUT. Cheap to clone, so that a repeat sends the same bytes.
#[derive(Clone, Debug)]
pub enum Body {
    /// Bytes in memory.
    Bytes(Arc<[u8]>),
    /// A file that nobody changes until the PUT has ended.
    File(PathBuf),
}

impl From<Vec<u8>> for Body {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes.into())
    }
}

/// How old an object is, by the store's own clock only (milliseconds since 1970).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Age {
    /// When the object was written.
    pub last_modified_ms: i64,
    /// When the store answered.
    pub date_ms: i64,
}

/// What a store tells of an object beside its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Entity tag, quotes included.
    pub etag: ETag,
    /// Length in bytes.
    pub size: u64,
    /// User metadata.
    pub metadata: Metadata,
    /// Age by the store's clock; the directory store tells none.
    pub age: Option<Age>,
}

/// An object with its bytes (of the range that was asked for).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Tag, whole size and metadata.
    pub meta: Meta,
    /// The bytes.
    pub body: Vec<u8>,
}

/// One key of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The whole key.
    pub key: String,
    /// Length in bytes.
    pub size: u64,
}

/// One page of a list, keys ascending byte by byte.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    /// The keys of this page.
    pub entries: Vec<Listed>,
    /// Pass this as `start_after` for the next page; none at the end.
    pub next: Option<String>,
}

/// How a PUT ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum PutOutcome {
    /// Written and durable.
    Done {
        /// Tag of what was written.
        etag: ETag,
    },
    /// The condition does not hold (412); nothing was written by *this* request.
    ConditionFailed,
    /// A concurrent request won (409): read again, then decide.
    Conflict,
    /// No answer: the write may have happened, or may happen later.
    Unknown {
        /// What was seen.
        why: String,
    },
    /// The store says no for good (403, bad request): nothing was written, a repeat is useless.
    Refused {
        /// The store's words.
        why: String,
    },
    /// The store is not able (busy, disk full, I/O error): nothing was written, repeat later.
    Broken {
        /// The store's words.
        why: String,
    },
}

/// How a DELETE ended. Deleting what is absent without a condition is [`DeleteOutcome::Done`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum DeleteOutcome {
    /// The key holds nothing now.
    Done,
    /// The object is another one, or absent.
    ConditionFailed,
    /// A concurrent request won (409).
    Conflict,
    /// No answer.
    Unknown {
        /// What was seen.
        why: String,
    },
    /// The store says no for good.
    Refused {
        /// The store's words.
        why: String,
    },
    /// The store is not able.
    Broken {
        /// The store's words.
        why: String,
    },
}

/// Why a read gave nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The key holds nothing.
    #[error("no such object: {key}")]
    NotFound {
        /// The key that was asked for.
        key: String,
    },
    /// No answer in time.
    #[error("no answer for {key}: {why}")]
    Unknown {
        /// The key that was asked for.
        key: String,
        /// What was seen.
        why: String,
    },
    /// The store says no for good.
    #[error("refused for {key}: {why}")]
    Refused {
        /// The key that was asked for.
        key: String,
        /// The store's words.
        why: String,
    },
    /// The store is not able.
    #[error("store failed for {key}: {why}")]
    Broken {
        /// The key that was asked for.
        key: String,
        /// The store's words.
        why: String,
    },
}

/// A store of named objects. Every method may be called from many tasks at once.
pub trait Store: Clone + Send + Sync + 'static {
    /// How LTX files are named in this store.
    fn layout(&self) -> Layout;

    /// A whole object.
    fn get(&self, key: &str) -> impl Future<Output = Result<Object, ReadError>> + Send;

    /// Up to `len` bytes from `offset`; fewer only where the object ends.
    fn get_range(
        &self,
        key: &str,
        offset: u64,
        len: u64,
    ) -> impl Future<Output = Result<Object, ReadError>> + Send;

    /// Tag, size and metadata alone.
    fn head(&self, key: &str) -> impl Future<Output = Result<Meta, ReadError>> + Send;

    /// Writes an object if the condition holds.
    fn put(
        &self,
        key: &str,
        body: Body,
        condition: Condition,
        metadata: Metadata,
    ) -> impl Future<Output = PutOutcome> + Send;

    /// Deletes an object if the condition holds ([`Condition::IfAbsent`] never does).
    fn delete(&self, key: &str, condition: Condition)
    -> impl Future<Output = DeleteOutcome> + Send;

    /// The keys that begin with `prefix` and are greater than `start_after`, at most
    /// [`LIST_PAGE_KEYS`] of them.
    fn list(
        &self,
        prefix: &str,
        start_after: Option<&str>,
    ) -> impl Future<Output = Result<ListPage, ReadError>> + Send;
}
