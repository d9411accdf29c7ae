//! Does this store honour both conditions? Asked once at start, before any host is managed.

use dormouse_core::ids::ETag;

use crate::port::{Body, Condition, DeleteOutcome, Metadata, PutOutcome, Store};
use crate::scratch::random_text;

/// What the store was seen to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// A second create of the same key failed.
    pub honours_if_absent: bool,
    /// A replace by a stale tag failed, and one by the right tag succeeded.
    pub honours_if_match: bool,
    /// A delete by a stale tag failed. Nothing depends on it; some stores ignore it.
    pub honours_conditional_delete: bool,
}

impl Probe {
    /// Both conditions on which leases and write-once uploads rest.
    #[must_use]
    pub const fn is_safe(&self) -> bool {
        self.honours_if_absent && self.honours_if_match
    }
}

/// Why the probe could not tell.
#[derive(Debug, thiserror::Error)]
#[error("the store could not be probed: {step}: {why}")]
pub struct ProbeError {
    /// What was tried.
    pub step: &'static str,
    /// What came back.
    pub why: String,
    /// Whether the store said no for good.
    pub is_refusal: bool,
}

/// Tries both conditions on a key of its own below `<prefix>/probe/`, and deletes it.
pub async fn probe<S: Store>(store: &S, prefix: &str) -> Result<Probe, ProbeError> {
    let name =
        random_text().map_err(|error| ProbeError::broken("random name", error.to_string()))?;
    let key =
        if prefix.is_empty() { format!("probe/{name}") } else { format!("{prefix}/probe/{name}") };
    let put = |text: &str, condition| {
        store.put(&key, Body::from(text.as_bytes().to_vec()), condition, Metadata::new())
    };

    let first = match put("one", Condition::IfAbsent).await {
        PutOutcome::Done { etag } => etag,
        other @ (PutOutcome::ConditionFailed
        | PutOutcome::Conflict
        | PutOutcome::Unknown { .. }
        | PutOutcome::Refused { .. }
        | PutOutcome::Broken { .. }) => return Err(unclear("create", &other)),
    };
    let honours_if_absent = failed("second create", &put("two", Condition::IfAbsent).await)?;
    let stale = ETag("\"0123456789abcdef0123456789abcdef\"".to_owned());
    let stale_failed =
        failed("stale replace", &put("three", Condition::IfMatch(stale.clone())).await)?;
    // A store that ignored a condition has a new tag by now; the right one is no longer known.
    let honours_if_match = honours_if_absent
        && stale_failed
        && !failed("replace", &put("four", Condition::IfMatch(first)).await)?;
    let honours_conditional_delete = match store.delete(&key, Condition::IfMatch(stale)).await {
        DeleteOutcome::ConditionFailed | DeleteOutcome::Conflict => true,
        DeleteOutcome::Done
        | DeleteOutcome::Unknown { .. }
        | DeleteOutcome::Refused { .. }
        | DeleteOutcome::Broken { .. } => false,
    };
    match store.delete(&key, Condition::None).await {
        DeleteOutcome::Done => (),
        DeleteOutcome::Refused { why } => {
            return Err(ProbeError { step: "clean up", why, is_refusal: true });
        }
        DeleteOutcome::Unknown { why } | DeleteOutcome::Broken { why } => {
            return Err(ProbeError::broken("clean up", why));
        }
        other @ (DeleteOutcome::ConditionFailed | DeleteOutcome::Conflict) => {
            return Err(ProbeError::broken("clean up", format!("{other:?}")));
        }
    }
    Ok(Probe { honours_if_absent, honours_if_match, honours_conditional_delete })
}

fn failed(step: &'static str, outcome: &PutOutcome) -> Result<bool, ProbeError> {
    match outcome {
        PutOutcome::ConditionFailed | PutOutcome::Conflict => Ok(true),
        PutOutcome::Done { .. } => Ok(false),
        other @ (PutOutcome::Unknown { .. }
        | PutOutcome::Refused { .. }
        | PutOutcome::Broken { .. }) => Err(unclear(step, other)),
    }
}

fn unclear(step: &'static str, outcome: &PutOutcome) -> ProbeError {
    match outcome {
        PutOutcome::Refused { why } => ProbeError { step, why: why.clone(), is_refusal: true },
        PutOutcome::Unknown { why } | PutOutcome::Broken { why } => {
            ProbeError::broken(step, why.clone())
        }
        PutOutcome::Done { .. } | PutOutcome::ConditionFailed | PutOutcome::Conflict => {
            ProbeError::broken(step, format!("{outcome:?}"))
        }
    }
}

impl ProbeError {
    fn broken(step: &'static str, why: String) -> Self {
        Self { step, why, is_refusal: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::DirectoryStore;
    use crate::layout::Layout;
    use crate::port::{ListPage, Meta, Object, ReadError};

    /// What a store does not look at.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Ignored {
        IfAbsent,
        IfMatch,
        Deletes,
    }

    /// A store that ignores one kind of condition, as some that speak S3 do.
    #[derive(Clone)]
    struct Careless(DirectoryStore, Ignored);

    impl Store for Careless {
        fn layout(&self) -> Layout {
            self.0.layout()
        }

        async fn get(&self, key: &str) -> Result<Object, ReadError> {
            self.0.get(key).await
        }

        async fn get_range(&self, key: &str, offset: u64, len: u64) -> Result<Object, ReadError> {
            self.0.get_range(key, offset, len).await
        }

        async fn head(&self, key: &str) -> Result<Meta, ReadError> {
            self.0.head(key).await
        }

        async fn put(
            &self,
            key: &str,
            body: Body,
            condition: Condition,
            metadata: Metadata,
        ) -> PutOutcome {
            let looked_at = match (&condition, self.1) {
                (Condition::IfAbsent, Ignored::IfAbsent)
                | (Condition::IfMatch(_), Ignored::IfMatch) => Condition::None,
                (Condition::None | Condition::IfAbsent | Condition::IfMatch(_), _) => condition,
            };
            self.0.put(key, body, looked_at, metadata).await
        }

        async fn delete(&self, key: &str, condition: Condition) -> DeleteOutcome {
            let ignored = self.1 == Ignored::Deletes;
            self.0.delete(key, if ignored { Condition::None } else { condition }).await
        }

        async fn list(&self, prefix: &str, after: Option<&str>) -> Result<ListPage, ReadError> {
            self.0.list(prefix, after).await
        }
    }

    #[tokio::test]
    async fn a_store_that_ignores_a_condition_on_writes_is_not_safe() {
        for (ignored, safe) in
            [(Ignored::IfAbsent, false), (Ignored::IfMatch, false), (Ignored::Deletes, true)]
        {
            let dir = tempfile::tempdir().unwrap();
            let store = Careless(DirectoryStore::open(dir.path()).unwrap(), ignored);
            let seen = probe(&store, "p").await.unwrap();
            assert_eq!(seen.is_safe(), safe, "{ignored:?}: {seen:?}");
            assert_eq!(seen.honours_conditional_delete, ignored != Ignored::Deletes, "{ignored:?}");
            assert_eq!(
                store.list("p/", None).await.unwrap().entries,
                [],
                "{ignored:?}: cleaned up"
            );
        }
    }
}
