//! The S3 store: any store that speaks S3 and honours conditions on writes.
//!
//! Nothing is repeated here but the rest of a read that was cut, and a part of a PUT in parts: a
//! repeated write whose first answer was lost would fail against itself. Callers repeat, and know
//! their nonces.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aws_sdk_s3::Client;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::layout::{Layout, is_record_key};
use crate::ledger::{Ledger, Operation};
use crate::port::{
    Body, Condition, DeleteOutcome, LIST_PAGE_KEYS, ListPage, Listed, Meta, Metadata, Object,
    PutOutcome, ReadError, Store,
};

mod connect;
mod credentials;
mod judge;
mod probe;
mod read;
mod settings;
mod write;

pub use credentials::CredentialsFileError;
pub use settings::{Checksums, KeySource, S3Settings};

use judge::{Failure, Whereabouts};
use read::{DateSeen, meta_of_head};

/// A store in an S3 bucket. Clones share connections, bounds and ledger.
#[derive(Clone, Debug)]
pub struct S3Store {
    client: Client,
    at: Arc<Whereabouts>,
    ledger: Arc<Ledger>,
    /// Requests at a time; records do not wait for them.
    bulk: Arc<Semaphore>,
    records: Arc<Semaphore>,
    request_timeout: Duration,
    /// Whether the end of a PUT in parts honours `If-None-Match`: known by the probe.
    conditional_parts: Arc<AtomicBool>,
}

/// Requests for records at a time: a session and some hosts' leases.
const RECORDS_AT_A_TIME: usize = 64;

impl S3Store {
    /// A store by its settings. Sends nothing; a credentials file is read and checked.
    pub async fn open(
        settings: &S3Settings,
        ledger: Arc<Ledger>,
    ) -> Result<Self, CredentialsFileError> {
        let client = connect::client(settings).await?;
        Ok(Self {
            client,
            at: Arc::new(settings.whereabouts()),
            ledger,
            bulk: Arc::new(Semaphore::new(settings.requests_at_a_time.max(1))),
            records: Arc::new(Semaphore::new(RECORDS_AT_A_TIME)),
            request_timeout: settings.request_timeout,
            conditional_parts: Arc::new(AtomicBool::new(false)),
        })
    }

    /// Where it is, for people: bucket and endpoint.
    #[must_use]
    pub fn place(&self) -> String {
        format!("bucket {} at {}", self.at.bucket, self.at.endpoint)
    }

    /// Asks whether a PUT in parts can be write-once; until then large ones are sent whole.
    pub(crate) async fn probe_parts(&self, prefix: &str) -> bool {
        let honoured = probe::conditional_parts(self, prefix).await;
        self.conditional_parts.store(honoured, Ordering::Relaxed);
        honoured
    }

    /// A place among the requests on their way. Never closed, so none only at its end.
    async fn permit(&self, key: &str) -> Option<SemaphorePermit<'_>> {
        let semaphore = if is_record_key(key) { &self.records } else { &self.bulk };
        semaphore.acquire().await.ok()
    }

    /// A HEAD has no body, so a missing bucket looks like a missing key: asked for apart.
    async fn absent(&self, key: &str) -> ReadError {
        self.ledger.sent(Operation::Head, key, 0);
        let bucket = self.client.head_bucket().bucket(&self.at.bucket).send().await;
        let failure = match bucket {
            Ok(_) => Failure::NotFound,
            Err(error) => match self.at.failure(&error) {
                Failure::NotFound => self.at.answered(404, Some("NoSuchBucket"), None),
                other @ (Failure::ConditionFailed
                | Failure::Conflict
                | Failure::OutOfRange
                | Failure::Unknown(_)
                | Failure::Refused(_)
                | Failure::Broken(_)) => other,
            },
        };
        failure.of_read(key)
    }
}

impl Store for S3Store {
    fn layout(&self) -> Layout {
        Layout::S3
    }

    async fn get(&self, key: &str) -> Result<Object, ReadError> {
        let _permit = self.permit(key).await;
        self.read(key, None).await.map_err(|failure| failure.of_read(key))
    }

    async fn get_range(&self, key: &str, offset: u64, len: u64) -> Result<Object, ReadError> {
        let permit = self.permit(key).await;
        if len > 0 {
            match self.read(key, Some((offset, len))).await {
                Err(Failure::OutOfRange) => {}
                other => return other.map_err(|failure| failure.of_read(key)),
            }
        }
        drop(permit);
        Ok(Object { meta: self.head(key).await?, body: Vec::new() })
    }

    async fn head(&self, key: &str) -> Result<Meta, ReadError> {
        let _permit = self.permit(key).await;
        self.ledger.sent(Operation::Head, key, 0);
        let seen = DateSeen::default();
        let asked = self.client.head_object().bucket(&self.at.bucket).key(key).customize();
        match asked.interceptor(seen.clone()).send().await {
            Ok(answer) => Ok(meta_of_head(answer, &seen)),
            Err(error) => {
                let failure = self.at.failure(&error);
                if failure == Failure::NotFound {
                    return Err(self.absent(key).await);
                }
                Err(failure.of_read(key))
            }
        }
    }

    async fn put(
        &self,
        key: &str,
        body: Body,
        condition: Condition,
        metadata: Metadata,
    ) -> PutOutcome {
        let _permit = self.permit(key).await;
        match self.write(key, body, condition, metadata).await {
            Ok(etag) => PutOutcome::Done { etag },
            Err(failure) => failure.of_put(),
        }
    }

    async fn delete(&self, key: &str, condition: Condition) -> DeleteOutcome {
        let _permit = self.permit(key).await;
        let mut asked = self.client.delete_object().bucket(&self.at.bucket).key(key);
        let conditional = match condition {
            Condition::None => false,
            Condition::IfAbsent => return DeleteOutcome::ConditionFailed,
            Condition::IfMatch(etag) => {
                asked = asked.if_match(etag.0);
                true
            }
        };
        self.ledger.sent(Operation::Delete, key, 0);
        match asked.send().await {
            Ok(_) => DeleteOutcome::Done,
            Err(error) => {
                let failure = self.at.failure(&error);
                if conditional && failure == Failure::NotFound {
                    return DeleteOutcome::ConditionFailed;
                }
                failure.of_delete()
            }
        }
    }

    async fn list(&self, prefix: &str, start_after: Option<&str>) -> Result<ListPage, ReadError> {
        let _permit = self.permit(prefix).await;
        self.ledger.sent(Operation::List, prefix, 0);
        let page_keys = i32::try_from(LIST_PAGE_KEYS).unwrap_or(i32::MAX);
        let asked = self.client.list_objects_v2().bucket(&self.at.bucket).prefix(prefix);
        let asked = asked.max_keys(page_keys).set_start_after(start_after.map(str::to_owned));
        let answer = asked.send().await.map_err(|error| {
            let failure = self.at.failure(&error);
            // There is always a list of a bucket.
            if failure == Failure::NotFound {
                return self.at.answered(404, Some("NoSuchBucket"), None).of_read(prefix);
            }
            failure.of_read(prefix)
        })?;
        let is_truncated = answer.is_truncated().unwrap_or(false);
        let entries: Vec<Listed> = answer
            .contents
            .unwrap_or_default()
            .into_iter()
            .filter_map(|object| {
                let size = object.size.and_then(|size| u64::try_from(size).ok()).unwrap_or(0);
                Some(Listed { key: object.key?, size })
            })
            .collect();
        let next = entries.last().filter(|_| is_truncated).map(|last| last.key.clone());
        Ok(ListPage { entries, next })
    }
}
