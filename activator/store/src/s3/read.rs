//! Reads, and the rest of a read that was cut.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use aws_sdk_s3::config::interceptors::BeforeDeserializationInterceptorContextRef;
use aws_sdk_s3::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_s3::error::BoxError;
use aws_sdk_s3::operation::get_object::GetObjectOutput;
use aws_sdk_s3::operation::head_object::HeadObjectOutput;
use aws_sdk_s3::primitives::{ByteStream, DateTime, DateTimeFormat};
use dormouse_core::ids::ETag;

use super::S3Store;
use super::judge::{Failure, chain};
use crate::ledger::Operation;
use crate::port::{Age, Meta, Metadata, Object};

/// Requests that one read takes at most: each of them brought something, or was the last.
const REQUESTS_PER_READ: u32 = 16;
/// Of the bytes that an object claims, this many are made room for before they came.
const ROOM_BYTES: u64 = 16 << 20;

/// The `Date` of an answer, which the SDK does not hand out.
#[derive(Clone, Debug)]
pub(super) struct DateSeen(Arc<AtomicI64>);

impl Default for DateSeen {
    fn default() -> Self {
        Self(Arc::new(AtomicI64::new(i64::MIN)))
    }
}

impl Intercept for DateSeen {
    fn name(&self) -> &'static str {
        "date-seen"
    }

    fn read_before_deserialization(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let date = context.response().headers().get("date");
        let parsed = date.and_then(|text| DateTime::from_str(text, DateTimeFormat::HttpDate).ok());
        if let Some(ms) = parsed.and_then(|date| date.to_millis().ok()) {
            self.0.store(ms, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl DateSeen {
    /// Both times, where the store told both.
    fn age(&self, last_modified: Option<DateTime>) -> Option<Age> {
        let date_ms = Some(self.0.load(Ordering::Relaxed)).filter(|ms| *ms != i64::MIN)?;
        let last_modified_ms = last_modified?.to_millis().ok()?;
        Some(Age { last_modified_ms, date_ms })
    }
}

/// Some stores leave the quotes out.
pub(super) fn etag(text: Option<String>) -> ETag {
    let text = text.unwrap_or_default();
    if text.starts_with('"') || text.starts_with("W/") {
        ETag(text)
    } else {
        ETag(format!("\"{text}\""))
    }
}

fn metadata(map: Option<std::collections::HashMap<String, String>>) -> Metadata {
    let lower = |(name, value): (String, String)| (name.to_ascii_lowercase(), value);
    map.unwrap_or_default().into_iter().map(lower).collect()
}

pub(super) fn meta_of_head(answer: HeadObjectOutput, seen: &DateSeen) -> Meta {
    Meta {
        size: answer.content_length.and_then(|len| u64::try_from(len).ok()).unwrap_or(0),
        age: seen.age(answer.last_modified),
        etag: etag(answer.e_tag),
        metadata: metadata(answer.metadata),
    }
}

/// A read on its way.
struct Reading {
    object: Object,
    /// First byte that is not wanted any more.
    end: u64,
    /// Offset of the first wanted byte.
    start: u64,
}

impl Reading {
    fn at(&self) -> u64 {
        self.start.saturating_add(u64::try_from(self.object.body.len()).unwrap_or(u64::MAX))
    }
}

impl S3Store {
    /// A whole object, or a range of it: `(offset, length)`.
    pub(super) async fn read(
        &self,
        key: &str,
        range: Option<(u64, u64)>,
    ) -> Result<Object, Failure> {
        let (answer, seen) = self.ask(key, range, None).await?;
        let (mut reading, mut body) = begin(answer, range, &seen)?;
        let mut requests: u32 = 1;
        loop {
            let before = reading.at();
            let cut = self.pour(key, &mut reading, body).await;
            let Err(cut) = cut else { return Ok(reading.object) };
            // Every byte came, and yet it is not whole: the SDK's checksum does not fit.
            let is_damaged = reading.at() >= reading.end;
            if is_damaged || reading.at() == before || requests >= REQUESTS_PER_READ {
                return Err(cut);
            }
            requests = requests.saturating_add(1);
            let rest = (reading.at(), reading.end.saturating_sub(reading.at()));
            let etag = &reading.object.meta.etag;
            let (answer, _) = self.ask(key, Some(rest), Some(etag)).await?;
            let offset = first_byte(&answer).unwrap_or(0);
            if offset != rest.0 {
                return Err(cut);
            }
            body = answer.body;
        }
    }

    async fn ask(
        &self,
        key: &str,
        range: Option<(u64, u64)>,
        only: Option<&ETag>,
    ) -> Result<(GetObjectOutput, DateSeen), Failure> {
        self.ledger.sent(Operation::Get, key, 0);
        let seen = DateSeen::default();
        let mut asked = self.client.get_object().bucket(&self.at.bucket).key(key);
        asked = asked.set_if_match(only.map(|etag| etag.0.clone()));
        if let Some((offset, len)) = range {
            let last = offset.saturating_add(len).saturating_sub(1);
            asked = asked.range(format!("bytes={offset}-{last}"));
        }
        let answer = asked.customize().interceptor(seen.clone()).send().await;
        Ok((answer.map_err(|error| self.at.failure(&error))?, seen))
    }

    /// Takes what comes; an error if it ends early.
    async fn pour(
        &self,
        key: &str,
        reading: &mut Reading,
        mut body: ByteStream,
    ) -> Result<(), Failure> {
        loop {
            let next = tokio::time::timeout(self.request_timeout, body.next()).await;
            let bytes = match next {
                Err(_) => return Err(Failure::Unknown("the body stopped coming".to_owned())),
                Ok(Some(Err(error))) => {
                    return Err(Failure::Unknown(format!("the body was cut: {}", chain(&error))));
                }
                Ok(None) if reading.at() < reading.end => {
                    return Err(Failure::Unknown("the body is too short".to_owned()));
                }
                Ok(None) => return Ok(()),
                Ok(Some(Ok(bytes))) => bytes,
            };
            self.ledger.received(Operation::Get, key, u64::try_from(bytes.len()).unwrap_or(0));
            let wanted = usize::try_from(reading.end.saturating_sub(reading.at()));
            let taken = bytes.get(..wanted.unwrap_or(usize::MAX).min(bytes.len()));
            reading.object.body.extend_from_slice(taken.unwrap_or_default());
        }
    }
}

/// The first answer: what the object is, and how much of it is wanted.
fn begin(
    mut answer: GetObjectOutput,
    range: Option<(u64, u64)>,
    seen: &DateSeen,
) -> Result<(Reading, ByteStream), Failure> {
    let length = answer.content_length.and_then(|len| u64::try_from(len).ok());
    let (start, end, size) = match (range, first_byte(&answer)) {
        (None, _) => {
            let size =
                length.ok_or_else(|| Failure::Broken("an answer without a length".into()))?;
            (0, size, size)
        }
        (Some((offset, len)), Some(first)) if first == offset => {
            let size = whole_size(&answer).unwrap_or_else(|| offset.saturating_add(len));
            (offset, offset.saturating_add(len).min(size), size)
        }
        (Some(_), _) => {
            let why = "the store answered a range with something else: it cannot be used";
            return Err(Failure::Refused(why.to_owned()));
        }
    };
    let body = std::mem::take(&mut answer.body);
    let room = usize::try_from(end.saturating_sub(start).min(ROOM_BYTES)).unwrap_or(0);
    let meta = Meta {
        size,
        age: seen.age(answer.last_modified),
        etag: etag(answer.e_tag),
        metadata: metadata(answer.metadata),
    };
    let object = Object { meta, body: Vec::with_capacity(room) };
    Ok((Reading { object, end, start }, body))
}

/// Of `bytes 3-6/10` (RFC 9110 section 14.4) the 3.
fn first_byte(answer: &GetObjectOutput) -> Option<u64> {
    let (first, _) = answer.content_range()?.strip_prefix("bytes ")?.split_once('-')?;
    first.parse().ok()
}

/// Of `bytes 3-6/10` the 10.
fn whole_size(answer: &GetObjectOutput) -> Option<u64> {
    answer.content_range()?.rsplit_once('/')?.1.parse().ok()
}
