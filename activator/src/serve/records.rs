//! The store's records, as the core asks for them: time-outs, and outcomes it can tell apart.

use std::time::Duration;

use dormouse_core::effect::{Expect, RecordKey};
use dormouse_core::event::{Got, StoreProblem, Wrote};
use dormouse_core::time::Nanos;
use dormouse_store::{
    Age, AnyStore, Body, Condition, Metadata, PutOutcome, ReadError, Store, host_record_key,
    session_record_key,
};

/// Longest wait for a record; a third of the shortest sensible TTL.
const RECORD_TIMEOUT: Duration = Duration::from_secs(10);

/// Records under one prefix.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    store: AnyStore,
    prefix: String,
}

impl Records {
    pub(crate) const fn new(store: AnyStore, prefix: String) -> Self {
        Self { store, prefix }
    }

    fn key(&self, key: &RecordKey) -> String {
        match key {
            RecordKey::Session(name) => session_record_key(&self.prefix, name),
            RecordKey::Host(host) => host_record_key(&self.prefix, host),
        }
    }

    pub(crate) async fn get(&self, key: &RecordKey) -> Got {
        let key = self.key(key);
        match tokio::time::timeout(RECORD_TIMEOUT, self.store.get(&key)).await {
            Err(_) => Got::Failed(StoreProblem::Unreachable(format!("no answer for {key}"))),
            Ok(Ok(object)) => {
                let age = object.meta.age.map(age);
                Got::Found { body: object.body, etag: object.meta.etag, age }
            }
            Ok(Err(ReadError::NotFound { .. })) => Got::Absent,
            Ok(Err(error)) => Got::Failed(problem(&error)),
        }
    }

    pub(crate) async fn put(&self, key: &RecordKey, body: Vec<u8>, expect: Expect) -> Wrote {
        let key = self.key(key);
        let condition = match expect {
            Expect::Absent => Condition::IfAbsent,
            Expect::Tag(etag) => Condition::IfMatch(etag),
        };
        let put = self.store.put(&key, Body::from(body), condition, Metadata::new());
        match tokio::time::timeout(RECORD_TIMEOUT, put).await {
            // It may have been carried out: never an answer that says it was not.
            Err(_) | Ok(PutOutcome::Unknown { .. }) => Wrote::Unknown,
            Ok(PutOutcome::Done { etag }) => Wrote::Done(etag),
            Ok(PutOutcome::ConditionFailed) => Wrote::ConditionFailed,
            Ok(PutOutcome::Conflict) => Wrote::Conflict,
            Ok(PutOutcome::Refused { why }) => Wrote::Failed(StoreProblem::Refused(why)),
            Ok(PutOutcome::Broken { why }) => Wrote::Failed(StoreProblem::Broken(why)),
        }
    }
}

/// How old, by the store's own clock alone; a date before the write counts as new.
fn age(age: Age) -> Nanos {
    let ms = age.date_ms.saturating_sub(age.last_modified_ms);
    Nanos::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// A failed read, as the core knows it.
pub(crate) fn problem(error: &ReadError) -> StoreProblem {
    let text = error.to_string();
    match error {
        ReadError::NotFound { .. } | ReadError::Broken { .. } => StoreProblem::Broken(text),
        ReadError::Unknown { .. } => StoreProblem::Unreachable(text),
        ReadError::Refused { .. } => StoreProblem::Refused(text),
    }
}
