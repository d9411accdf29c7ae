//! The contract suite of the real stores, on the objects of the simulated one.

#![expect(clippy::unwrap_used, reason = "a test's own store: a failure is a panic")]

use std::sync::{Arc, Mutex, PoisonError};

use dormouse_sim::objects::{self, Objects, Tags};
use dormouse_sim::rng::mix;
use dormouse_store::{
    Age, Body, Condition, DeleteOutcome, LIST_PAGE_KEYS, Layout, ListPage, Listed, Meta, Metadata,
    Object, PutOutcome, ReadError, Store, contract,
};

type Simulated = Objects<String, (Vec<u8>, Metadata)>;

/// The simulated store behind the port of the real ones.
#[derive(Clone, Debug)]
struct Port(Arc<Mutex<Simulated>>);

impl Port {
    fn new(tags: Tags) -> Self {
        Self(Arc::new(Mutex::new(Objects::new(tags))))
    }

    fn with<T>(&self, act: impl FnOnce(&mut Simulated) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn read(&self, key: &str) -> Result<Object, ReadError> {
        self.with(|objects| {
            let found = objects.get(&key.to_owned());
            let object = found.ok_or_else(|| ReadError::NotFound { key: key.to_owned() })?;
            let (body, metadata) = object.value.clone();
            let meta = Meta {
                etag: object.etag.clone(),
                size: u64::try_from(body.len()).unwrap(),
                metadata,
                age: Some(Age { last_modified_ms: 0, date_ms: 0 }),
            };
            Ok(Object { meta, body })
        })
    }
}

fn condition(condition: &Condition) -> objects::Condition<'_> {
    match condition {
        Condition::None => objects::Condition::None,
        Condition::IfAbsent => objects::Condition::Absent,
        Condition::IfMatch(tag) => objects::Condition::Tag(tag),
    }
}

impl Store for Port {
    fn layout(&self) -> Layout {
        Layout::S3
    }

    async fn get(&self, key: &str) -> Result<Object, ReadError> {
        self.read(key)
    }

    async fn get_range(&self, key: &str, offset: u64, len: u64) -> Result<Object, ReadError> {
        let Object { meta, body } = self.read(key)?;
        let start = usize::try_from(offset).unwrap().min(body.len());
        let end = start.saturating_add(usize::try_from(len).unwrap()).min(body.len());
        Ok(Object { meta, body: body[start..end].to_vec() })
    }

    async fn head(&self, key: &str) -> Result<Meta, ReadError> {
        self.read(key).map(|object| object.meta)
    }

    async fn put(
        &self,
        key: &str,
        body: Body,
        wanted: Condition,
        metadata: Metadata,
    ) -> PutOutcome {
        let bytes = match body {
            Body::Bytes(bytes) => bytes.to_vec(),
            Body::File(path) => std::fs::read(path).unwrap(),
        };
        let content = bytes.iter().fold(3, |hash, byte| mix(hash, u64::from(*byte)));
        let put = self.with(|objects| {
            objects.put(key.to_owned(), (bytes, metadata), content, condition(&wanted), 0)
        });
        put.map_or(PutOutcome::ConditionFailed, |etag| PutOutcome::Done { etag })
    }

    async fn delete(&self, key: &str, wanted: Condition) -> DeleteOutcome {
        let done = self.with(|objects| objects.delete(&key.to_owned(), condition(&wanted)));
        if done { DeleteOutcome::Done } else { DeleteOutcome::ConditionFailed }
    }

    async fn list(&self, prefix: &str, start_after: Option<&str>) -> Result<ListPage, ReadError> {
        self.with(|objects| {
            let after = start_after.unwrap_or("").to_owned();
            let wanted = |key: &&String| key.starts_with(prefix) && **key > after;
            let keys: Vec<String> =
                objects.keys().filter(wanted).take(LIST_PAGE_KEYS + 1).cloned().collect();
            let more = keys.len() > LIST_PAGE_KEYS;
            let entries: Vec<Listed> = keys
                .into_iter()
                .take(LIST_PAGE_KEYS)
                .map(|key| {
                    let size = objects.get(&key).map_or(0, |object| object.value.0.len());
                    Listed { key, size: u64::try_from(size).unwrap() }
                })
                .collect();
            let next = entries.last().filter(|_| more).map(|entry| entry.key.clone());
            Ok(ListPage { entries, next })
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_simulated_store_keeps_the_contract_of_the_real_ones() {
    for tags in [Tags::Random, Tags::Content] {
        contract::check(&Port::new(tags), "p", 32).await;
    }
}
