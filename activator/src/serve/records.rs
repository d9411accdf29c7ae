//! The store's records, as the core asks for them: time-outs, and outcomes it can tell apart.
//!
//! A session is renewed all the time, so what came of the newest of these requests says how the store
//! is: for `status`, and for the log when it changes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dormouse_core::effect::{Expect, RecordKey};
use dormouse_core::event::{Got, StoreProblem, Wrote};
use dormouse_core::time::{Mono, Nanos, SECOND_NS};
use dormouse_replica::clock::system_now;
use dormouse_store::{
    Age, AnyStore, Body, Condition, Metadata, PutOutcome, ReadError, Store, host_record_key,
    session_record_key,
};

/// Longest wait for a record; a third of the shortest sensible TTL.
const RECORD_TIMEOUT: Duration = Duration::from_secs(10);

/// It did not answer, or failed inside.
const AWAY: &str = "away";
/// It will not.
const REFUSED: &str = "refused";

/// Records under one prefix.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    store: AnyStore,
    prefix: String,
    trouble: Arc<Mutex<Option<Trouble>>>,
}

/// What the newest request came to, where that was nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// Since the first request that failed.
    since: Mono,
    /// [`AWAY`] or [`REFUSED`].
    word: &'static str,
    why: String,
}

impl Trouble {
    /// For people: `away: why (for 12 s)`.
    pub(crate) fn told(&self, now: Mono) -> String {
        let Self { since, word, why } = self;
        format!("{word}: {why} (for {} s)", now.since(*since).0 / SECOND_NS)
    }
}

impl Records {
    pub(crate) fn new(store: AnyStore, prefix: String) -> Self {
        Self { store, prefix, trouble: Arc::default() }
    }

    /// What is in the way of the store's use now, as far as records tell.
    pub(crate) fn trouble(&self) -> Option<Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes how the newest request ended; a word and why where it failed.
    fn note(&self, failed: Option<(&'static str, &str)>, now: Mono) {
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let former = trouble.as_ref();
        let since = former.map_or(now, |former| former.since);
        if let Some((word, why)) = failed {
            if former.is_none_or(|former| former.word != word) {
                let store = self.store.place();
                tracing::warn!(store, why, "the store cannot be used: {word}");
            }
        } else if former.is_some() {
            let store = self.store.place();
            let after_s = now.since(since).0 / SECOND_NS;
            tracing::info!(store, after_s, "the store answers again");
        }
        *trouble = failed.map(|(word, why)| Trouble { since, word, why: why.to_owned() });
    }

    fn key(&self, key: &RecordKey) -> String {
        match key {
            RecordKey::Session(name) => session_record_key(&self.prefix, name),
            RecordKey::Host(host) => host_record_key(&self.prefix, host),
        }
    }

    pub(crate) async fn get(&self, key: &RecordKey) -> Got {
        let got = self.ask(key).await;
        let failed = match &got {
            Got::Found { .. } | Got::Absent => None,
            Got::Failed(problem) => Some(failure(problem)),
        };
        self.note(failed, system_now().mono);
        got
    }

    async fn ask(&self, key: &RecordKey) -> Got {
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
        let outcome = tokio::time::timeout(RECORD_TIMEOUT, put).await.unwrap_or_else(|_| {
            // It may have been carried out: never an answer that says it was not.
            PutOutcome::Unknown { why: format!("no answer for {key}") }
        });
        let failed = match &outcome {
            PutOutcome::Done { .. } | PutOutcome::ConditionFailed | PutOutcome::Conflict => None,
            PutOutcome::Unknown { why } | PutOutcome::Broken { why } => Some((AWAY, why.as_str())),
            PutOutcome::Refused { why } => Some((REFUSED, why.as_str())),
        };
        self.note(failed, system_now().mono);
        match outcome {
            PutOutcome::Done { etag } => Wrote::Done(etag),
            PutOutcome::ConditionFailed => Wrote::ConditionFailed,
            PutOutcome::Conflict => Wrote::Conflict,
            PutOutcome::Unknown { .. } => Wrote::Unknown,
            PutOutcome::Refused { why } => Wrote::Failed(StoreProblem::Refused(why)),
            PutOutcome::Broken { why } => Wrote::Failed(StoreProblem::Broken(why)),
        }
    }
}

/// A word for it, and why.
fn failure(problem: &StoreProblem) -> (&'static str, &str) {
    let word = match problem {
        StoreProblem::Unreachable(_) | StoreProblem::Broken(_) => AWAY,
        StoreProblem::Refused(_) => REFUSED,
    };
    (word, problem.detail())
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

#[cfg(test)]
mod tests {
    use dormouse_store::DirectoryStore;

    use super::*;

    #[tokio::test]
    async fn a_store_that_goes_away_is_told_until_it_is_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        std::fs::create_dir(&path).unwrap();
        let store = AnyStore::directory(DirectoryStore::open(&path).unwrap(), "p");
        store.probe().await;
        let records = Records::new(store, "p".to_owned());
        let key = RecordKey::Session("box-1".into());
        let put = || records.put(&key, b"{}".to_vec(), Expect::Absent);
        assert!(matches!(put().await, Wrote::Done(_)));
        assert_eq!(records.trouble(), None);
        // Its disk is not mounted any more.
        let aside = dir.path().join("aside");
        std::fs::rename(&path, &aside).unwrap();
        drop(put().await);
        let first = records.trouble().unwrap();
        assert!(first.told(first.since).contains(" (for 0 s)"), "{first:?}");
        assert!(first.told(first.since + Nanos::from_secs(9)).contains(" (for 9 s)"));
        drop(records.get(&key).await);
        assert_eq!(records.trouble().unwrap().since, first.since);
        std::fs::rename(&aside, &path).unwrap();
        assert!(matches!(put().await, Wrote::ConditionFailed), "an answer, and a definite one");
        assert_eq!(records.trouble(), None);
    }
}
