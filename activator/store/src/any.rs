//! One type for whichever store the config names.

use crate::directory::DirectoryStore;
use crate::layout::Layout;
use crate::port::{
    Body, Condition, DeleteOutcome, ListPage, Meta, Metadata, Object, PutOutcome, ReadError, Store,
};

/// The configured store. An enum, so that callers stay free of `dyn` and of type parameters.
#[derive(Clone, Debug)]
pub enum AnyStore {
    /// A directory of this machine, or of a file system that several boxes share.
    Directory(DirectoryStore),
}

impl AnyStore {
    /// What tells this store from another at the same place, where it can be told.
    #[must_use]
    pub fn identity(&self) -> Option<&str> {
        match self {
            Self::Directory(store) => Some(store.identity()),
        }
    }
}

impl Store for AnyStore {
    fn layout(&self) -> Layout {
        match self {
            Self::Directory(store) => store.layout(),
        }
    }

    async fn get(&self, key: &str) -> Result<Object, ReadError> {
        match self {
            Self::Directory(store) => store.get(key).await,
        }
    }

    async fn get_range(&self, key: &str, offset: u64, len: u64) -> Result<Object, ReadError> {
        match self {
            Self::Directory(store) => store.get_range(key, offset, len).await,
        }
    }

    async fn head(&self, key: &str) -> Result<Meta, ReadError> {
        match self {
            Self::Directory(store) => store.head(key).await,
        }
    }

    async fn put(
        &self,
        key: &str,
        body: Body,
        condition: Condition,
        metadata: Metadata,
    ) -> PutOutcome {
        match self {
            Self::Directory(store) => store.put(key, body, condition, metadata).await,
        }
    }

    async fn delete(&self, key: &str, condition: Condition) -> DeleteOutcome {
        match self {
            Self::Directory(store) => store.delete(key, condition).await,
        }
    }

    async fn list(&self, prefix: &str, start_after: Option<&str>) -> Result<ListPage, ReadError> {
        match self {
            Self::Directory(store) => store.list(prefix, start_after).await,
        }
    }
}
