//! One type for whichever store the config names, with its ledger and its gate.
//!
//! The gate lets no write through until the probe has seen that the store honours conditions: a
//! store that is away when the activator starts is probed when it is back.

use std::sync::{Arc, PoisonError, RwLock};

use crate::directory::DirectoryStore;
use crate::layout::Layout;
use crate::ledger::{Ledger, Operation};
use crate::port::{
    Body, Condition, DeleteOutcome, ListPage, Meta, Metadata, Object, PutOutcome, ReadError, Store,
};
use crate::probe::probe;
use crate::s3::S3Store;

/// Whether the store may be written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gate {
    /// The probe saw both conditions honoured.
    Open,
    /// Nobody could tell yet: not asked, or away.
    Unknown {
        /// What was seen.
        why: String,
    },
    /// The store says no: somebody must change something.
    Refused {
        /// What, where, and what to do.
        why: String,
    },
    /// The store does not honour conditions: another one must be used.
    Unfit {
        /// Which, what it ignores, and what to use.
        why: String,
    },
}

#[derive(Clone, Debug)]
enum Kind {
    /// A directory of this machine, or of a file system that several boxes share.
    Directory(DirectoryStore),
    /// An S3 bucket.
    S3(S3Store),
}

/// The configured store. An enum inside, so that callers stay free of `dyn` and of type parameters.
#[derive(Clone, Debug)]
pub struct AnyStore {
    kind: Kind,
    prefix: Arc<str>,
    ledger: Arc<Ledger>,
    gate: Arc<RwLock<Gate>>,
}

impl AnyStore {
    /// A directory store for keys below `prefix`.
    #[must_use]
    pub fn directory(store: DirectoryStore, prefix: &str) -> Self {
        Self::new(Kind::Directory(store), prefix, Arc::new(Ledger::new(prefix)))
    }

    /// An S3 store for keys below `prefix`, with the ledger that it was opened with.
    #[must_use]
    pub fn s3(store: S3Store, prefix: &str, ledger: Arc<Ledger>) -> Self {
        Self::new(Kind::S3(store), prefix, ledger)
    }

    fn new(kind: Kind, prefix: &str, ledger: Arc<Ledger>) -> Self {
        let why = "the store has not answered yet whether it honours conditions".to_owned();
        let gate = Arc::new(RwLock::new(Gate::Unknown { why }));
        Self { kind, prefix: prefix.into(), ledger, gate }
    }

    /// What was asked of it.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Whether it may be written to, as the last probe saw it.
    #[must_use]
    pub fn gate(&self) -> Gate {
        self.gate.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where it is, for people.
    #[must_use]
    pub fn place(&self) -> String {
        match &self.kind {
            Kind::Directory(store) => store.place(),
            Kind::S3(store) => store.place(),
        }
    }

    /// Asks the store whether it honours conditions, and opens or shuts the gate by the answer.
    pub async fn probe(&self) -> Gate {
        let gate = match probe(&self.kind, &self.prefix).await {
            Ok(seen) if seen.is_safe() => {
                if let Kind::S3(store) = &self.kind {
                    store.probe_parts(&self.prefix).await;
                }
                Gate::Open
            }
            Ok(seen) => {
                let ignored = match (seen.honours_if_absent, seen.honours_if_match) {
                    (false, false) => "If-None-Match and If-Match",
                    (false, true) => "If-None-Match",
                    (true, _) => "If-Match",
                };
                Gate::Unfit {
                    why: format!(
                        "{} ignores {ignored} on writes: two boxes could write to one host. Use \
                         a store that honours both, as AWS S3 and SeaweedFS do, or a directory",
                        self.place()
                    ),
                }
            }
            Err(error) if error.is_refusal => Gate::Refused { why: error.why },
            Err(error) => Gate::Unknown { why: error.to_string() },
        };
        *self.gate.write().unwrap_or_else(PoisonError::into_inner) = gate.clone();
        gate
    }

    /// S3 counts its own requests, which may be several an operation.
    fn count(&self, operation: Operation, key: &str, sent: u64) {
        if matches!(self.kind, Kind::Directory(_)) {
            self.ledger.sent(operation, key, sent);
        }
    }

    fn count_read(&self, key: &str, result: &Result<Object, ReadError>) {
        if let (Kind::Directory(_), Ok(object)) = (&self.kind, result) {
            let bytes = u64::try_from(object.body.len()).unwrap_or(u64::MAX);
            self.ledger.received(Operation::Get, key, bytes);
        }
    }
}

/// So many bytes; of a file that is not there, none.
fn bytes_of(body: &Body) -> u64 {
    match body {
        Body::Bytes(bytes) => u64::try_from(bytes.len()).unwrap_or(u64::MAX),
        Body::File(path) => std::fs::metadata(path).map_or(0, |file| file.len()),
    }
}

impl Store for AnyStore {
    fn layout(&self) -> Layout {
        self.kind.layout()
    }

    async fn get(&self, key: &str) -> Result<Object, ReadError> {
        self.count(Operation::Get, key, 0);
        let object = self.kind.get(key).await;
        self.count_read(key, &object);
        object
    }

    async fn get_range(&self, key: &str, offset: u64, len: u64) -> Result<Object, ReadError> {
        self.count(Operation::Get, key, 0);
        let object = self.kind.get_range(key, offset, len).await;
        self.count_read(key, &object);
        object
    }

    async fn head(&self, key: &str) -> Result<Meta, ReadError> {
        self.count(Operation::Head, key, 0);
        self.kind.head(key).await
    }

    async fn put(
        &self,
        key: &str,
        body: Body,
        condition: Condition,
        metadata: Metadata,
    ) -> PutOutcome {
        match self.gate() {
            Gate::Open => {}
            Gate::Unknown { why } => return PutOutcome::Broken { why },
            Gate::Refused { why } | Gate::Unfit { why } => return PutOutcome::Refused { why },
        }
        self.count(Operation::Put, key, bytes_of(&body));
        self.kind.put(key, body, condition, metadata).await
    }

    async fn delete(&self, key: &str, condition: Condition) -> DeleteOutcome {
        match self.gate() {
            Gate::Open => {}
            Gate::Unknown { why } => return DeleteOutcome::Broken { why },
            Gate::Refused { why } | Gate::Unfit { why } => return DeleteOutcome::Refused { why },
        }
        self.count(Operation::Delete, key, 0);
        self.kind.delete(key, condition).await
    }

    async fn list(&self, prefix: &str, start_after: Option<&str>) -> Result<ListPage, ReadError> {
        self.count(Operation::List, prefix, 0);
        self.kind.list(prefix, start_after).await
    }
}

impl Store for Kind {
    fn layout(&self) -> Layout {
        match self {
            Self::Directory(store) => store.layout(),
            Self::S3(store) => store.layout(),
        }
    }

    async fn get(&self, key: &str) -> Result<Object, ReadError> {
        match self {
            Self::Directory(store) => store.get(key).await,
            Self::S3(store) => store.get(key).await,
        }
    }

    async fn get_range(&self, key: &str, offset: u64, len: u64) -> Result<Object, ReadError> {
        match self {
            Self::Directory(store) => store.get_range(key, offset, len).await,
            Self::S3(store) => store.get_range(key, offset, len).await,
        }
    }

    async fn head(&self, key: &str) -> Result<Meta, ReadError> {
        match self {
            Self::Directory(store) => store.head(key).await,
            Self::S3(store) => store.head(key).await,
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
            Self::S3(store) => store.put(key, body, condition, metadata).await,
        }
    }

    async fn delete(&self, key: &str, condition: Condition) -> DeleteOutcome {
        match self {
            Self::Directory(store) => store.delete(key, condition).await,
            Self::S3(store) => store.delete(key, condition).await,
        }
    }

    async fn list(&self, prefix: &str, start_after: Option<&str>) -> Result<ListPage, ReadError> {
        match self {
            Self::Directory(store) => store.list(prefix, start_after).await,
            Self::S3(store) => store.list(prefix, start_after).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract;

    fn store() -> (tempfile::TempDir, AnyStore) {
        let dir = tempfile::tempdir().unwrap();
        let store = AnyStore::directory(DirectoryStore::open(dir.path()).unwrap(), "p");
        (dir, store)
    }

    #[tokio::test]
    async fn nothing_is_written_before_the_probe_has_opened_the_gate() {
        let (_dir, store) = store();
        let put = || {
            store.put(
                "p/a.test/lock.json",
                Body::from(vec![1, 2]),
                Condition::None,
                Metadata::new(),
            )
        };
        assert!(matches!(put().await, PutOutcome::Broken { .. }));
        assert!(matches!(store.head("p/a.test/lock.json").await, Err(ReadError::NotFound { .. })));
        assert_eq!(store.probe().await, Gate::Open);
        assert!(matches!(put().await, PutOutcome::Done { .. }));
        assert_eq!(store.ledger().read()["a.test"][&Operation::Put].sent_bytes, 2);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_wrapped_store_keeps_the_contract() {
        let (_dir, store) = store();
        assert_eq!(store.probe().await, Gate::Open);
        contract::check(&store, "p/contract", 8).await;
    }
}
