//! A store whose answers can be lost, for tests.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use dormouse_store::{
    Body, Condition, DeleteOutcome, DirectoryStore, Layout, ListPage, Meta, Metadata, Object,
    PutOutcome, ReadError, Store,
};

/// What happens to the next PUT or GET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is carried out, its answer is lost.
    AnswerLost,
    /// It never arrives.
    RequestLost,
    /// The store is down.
    Down,
    /// The store says no.
    Refuse,
}

#[derive(Clone, Debug)]
pub(crate) struct FaultyStore {
    store: DirectoryStore,
    puts: Arc<Mutex<VecDeque<Fault>>>,
    /// Keys that the next read does not find.
    vanished: Arc<Mutex<Vec<String>>>,
    pub(crate) sent: Arc<Mutex<Vec<(String, Metadata)>>>,
    counts: Arc<Mutex<Counts>>,
}

/// Requests so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) gets: u32,
    pub(crate) heads: u32,
    pub(crate) puts: u32,
    pub(crate) deletes: u32,
    pub(crate) lists: u32,
}

impl FaultyStore {
    pub(crate) fn new(store: DirectoryStore, puts: &[Fault]) -> Self {
        Self {
            store,
            puts: Arc::new(Mutex::new(puts.iter().copied().collect())),
            vanished: Arc::default(),
            sent: Arc::default(),
            counts: Arc::default(),
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        *self.counts.lock().unwrap()
    }

    pub(crate) fn lists(&self) -> u32 {
        self.counts().lists
    }

    fn count(&self, which: impl FnOnce(&mut Counts) -> &mut u32) {
        *which(&mut self.counts.lock().unwrap()) += 1;
    }

    /// The next read that names this part of a key finds nothing.
    pub(crate) fn vanish_once(&self, part: &str) {
        self.vanished.lock().unwrap().push(part.to_owned());
    }

    fn read_fault(&self, key: &str) -> Result<(), ReadError> {
        let mut vanished = self.vanished.lock().unwrap();
        match vanished.iter().position(|part| key.contains(part)) {
            Some(at) => {
                vanished.remove(at);
                Err(ReadError::NotFound { key: key.to_owned() })
            }
            None => Ok(()),
        }
    }
}

impl Store for FaultyStore {
    fn layout(&self) -> Layout {
        self.store.layout()
    }

    async fn get(&self, key: &str) -> Result<Object, ReadError> {
        self.count(|counts| &mut counts.gets);
        self.read_fault(key)?;
        self.store.get(key).await
    }

    async fn get_range(&self, key: &str, offset: u64, len: u64) -> Result<Object, ReadError> {
        self.count(|counts| &mut counts.gets);
        self.read_fault(key)?;
        self.store.get_range(key, offset, len).await
    }

    async fn head(&self, key: &str) -> Result<Meta, ReadError> {
        self.count(|counts| &mut counts.heads);
        self.store.head(key).await
    }

    async fn put(
        &self,
        key: &str,
        body: Body,
        condition: Condition,
        metadata: Metadata,
    ) -> PutOutcome {
        self.count(|counts| &mut counts.puts);
        self.sent.lock().unwrap().push((key.to_owned(), metadata.clone()));
        let fault = self.puts.lock().unwrap().pop_front();
        let why = "by test".to_owned();
        match fault {
            None => self.store.put(key, body, condition, metadata).await,
            Some(Fault::AnswerLost) => {
                drop(self.store.put(key, body, condition, metadata).await);
                PutOutcome::Unknown { why }
            }
            Some(Fault::RequestLost) => PutOutcome::Unknown { why },
            Some(Fault::Down) => PutOutcome::Broken { why },
            Some(Fault::Refuse) => PutOutcome::Refused { why },
        }
    }

    async fn delete(&self, key: &str, condition: Condition) -> DeleteOutcome {
        self.count(|counts| &mut counts.deletes);
        self.store.delete(key, condition).await
    }

    async fn list(&self, prefix: &str, start_after: Option<&str>) -> Result<ListPage, ReadError> {
        self.count(|counts| &mut counts.lists);
        self.store.list(prefix, start_after).await
    }
}
