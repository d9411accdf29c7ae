//! PUTs: whole, or in parts where that can be done under the same condition.

use std::io::Read as _;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::Config;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::primitives::{ByteStream, Length};
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use dormouse_core::ids::ETag;
use tokio::task::JoinSet;

use super::S3Store;
use super::judge::{Failure, chain};
use super::read::etag;
use crate::ledger::Operation;
use crate::port::{Body, Condition, Metadata};

/// Larger bodies are sent in parts of this size.
const PART_BYTES: u64 = 8 << 20;
/// S3's bound; parts are larger where this many do not suffice.
const PARTS_MAX: u64 = 10_000;
/// S3's bound for one request.
const WHOLE_BYTES_MAX: u64 = 5 << 30;
/// Parts on their way at a time, one upload.
const PARTS_AT_A_TIME: usize = 4; // × 8 MiB, read from the file as they are sent
/// One part is sent so often before its upload is given up.
const PART_TRIES: u32 = 4; // pauses of 0.2, 0.4 and 0.8 s, each up to half longer: 2.1 s at most
/// Before a part's second try; doubles with each further one.
const PART_PAUSE: Duration = Duration::from_millis(200);
/// A body is given this long beside the time of the request itself.
const SLOWEST_BYTES_PER_S: u64 = 256 << 10;

impl S3Store {
    pub(super) async fn write(
        &self,
        key: &str,
        body: Body,
        condition: Condition,
        metadata: Metadata,
    ) -> Result<ETag, Failure> {
        let size = size_of(&body).await.map_err(Failure::Broken)?;
        let parts_can = match condition {
            Condition::None => true,
            Condition::IfAbsent => self.conditional_parts.load(Ordering::Relaxed),
            Condition::IfMatch(_) => false,
        };
        if size > PART_BYTES && parts_can {
            return self.write_parts(key, body, size, &condition, metadata).await;
        }
        if size > WHOLE_BYTES_MAX {
            return Err(Failure::Refused(format!(
                "{size} bytes are more than one request takes, and this store does not honour \
                 If-None-Match at the end of a PUT in parts: use another store"
            )));
        }
        self.write_whole(key, body, size, condition, metadata).await
    }

    async fn write_whole(
        &self,
        key: &str,
        body: Body,
        size: u64,
        condition: Condition,
        metadata: Metadata,
    ) -> Result<ETag, Failure> {
        let is_replace = matches!(condition, Condition::IfMatch(_));
        let body = piece(&body, 0, size).await.map_err(Failure::Broken)?;
        let mut asked = self.client.put_object().bucket(&self.at.bucket).key(key).body(body);
        asked = asked.set_metadata(Some(metadata.into_iter().collect()));
        asked = match condition {
            Condition::None => asked,
            Condition::IfAbsent => asked.if_none_match("*"),
            Condition::IfMatch(etag) => asked.if_match(etag.0),
        };
        self.ledger.sent(Operation::Put, key, size);
        match asked.customize().config_override(self.patience(size)).send().await {
            Ok(answer) => Ok(etag(answer.e_tag)),
            Err(error) => {
                let failure = self.at.failure(&error);
                // AWS says 404 of a replace of nothing.
                let is_nothing = is_replace && failure == Failure::NotFound;
                Err(if is_nothing { Failure::ConditionFailed } else { failure })
            }
        }
    }

    async fn write_parts(
        &self,
        key: &str,
        body: Body,
        size: u64,
        condition: &Condition,
        metadata: Metadata,
    ) -> Result<ETag, Failure> {
        let upload = self.begin_parts(key, metadata).await?;
        let parts = match self.send_parts(&upload, &body, size).await {
            Ok(parts) => parts,
            Err(failure) => {
                upload.give_up().await;
                // Whatever became of a part: without the end there is no object.
                return Err(failure.certain());
            }
        };
        self.end_parts(upload, parts, condition).await
    }

    pub(super) async fn begin_parts(
        &self,
        key: &str,
        metadata: Metadata,
    ) -> Result<Upload, Failure> {
        self.ledger.sent(Operation::Multipart, key, 0);
        let asked = self.client.create_multipart_upload().bucket(&self.at.bucket).key(key);
        let asked = asked.set_metadata(Some(metadata.into_iter().collect()));
        let answer = asked.send().await.map_err(|error| self.at.failure(&error).certain())?;
        let id = answer
            .upload_id
            .ok_or_else(|| Failure::Broken("a PUT in parts was begun without an id".to_owned()))?;
        Ok(Upload { store: self.clone(), key: key.to_owned(), id, open: true })
    }

    async fn send_parts(
        &self,
        upload: &Upload,
        body: &Body,
        size: u64,
    ) -> Result<Vec<CompletedPart>, Failure> {
        let part_bytes = part_bytes(size);
        let mut parts = Vec::new();
        let mut on_their_way = JoinSet::new();
        let mut offset = 0;
        let mut number = 0;
        loop {
            while offset < size && on_their_way.len() < PARTS_AT_A_TIME {
                number += 1;
                let len = part_bytes.min(size.saturating_sub(offset));
                on_their_way.spawn(upload.part(body.clone(), number, offset, len));
                offset = offset.saturating_add(len);
            }
            match on_their_way.join_next().await {
                None => break,
                Some(Ok(part)) => parts.push(part?),
                Some(Err(error)) => return Err(Failure::Broken(error.to_string())),
            }
        }
        parts.sort_by_key(CompletedPart::part_number);
        Ok(parts)
    }

    pub(super) async fn end_parts(
        &self,
        mut upload: Upload,
        parts: Vec<CompletedPart>,
        condition: &Condition,
    ) -> Result<ETag, Failure> {
        let whole = CompletedMultipartUpload::builder().set_parts(Some(parts)).build();
        let asked = self.client.complete_multipart_upload().bucket(&self.at.bucket);
        let mut asked = asked.key(&upload.key).upload_id(&upload.id).multipart_upload(whole);
        if matches!(condition, Condition::IfAbsent) {
            asked = asked.if_none_match("*");
        }
        self.ledger.sent(Operation::Multipart, &upload.key, 0);
        // From here on the end may come late: giving up could race it.
        upload.open = false;
        let asked = asked.customize().config_override(self.patience(0));
        match asked.send().await {
            Ok(answer) => Ok(etag(answer.e_tag)),
            Err(error) => {
                let failure = self.at.failure(&error);
                if matches!(failure, Failure::Unknown(_)) {
                    return Err(failure);
                }
                upload.open = true;
                upload.give_up().await;
                Err(failure.certain())
            }
        }
    }

    /// Time-outs of one request with a body of so many bytes.
    fn patience(&self, size: u64) -> aws_sdk_s3::config::Builder {
        let body = Duration::from_secs(size / SLOWEST_BYTES_PER_S);
        let whole = self.request_timeout.saturating_add(body);
        let timeouts = TimeoutConfig::builder().operation_attempt_timeout(whole).build();
        Config::builder().timeout_config(timeouts)
    }
}

/// A PUT in parts that was begun. Dropped while it is open, it is given up.
pub(super) struct Upload {
    store: S3Store,
    key: String,
    id: String,
    open: bool,
}

impl Upload {
    /// Sends a part, and again by itself where it failed for a passing reason: one that arrives
    /// twice replaces itself, and what has arrived of the others is not sent anew for it. Its place
    /// among the parts on their way is kept meanwhile, the bytes are not. Dropped, it sends nothing
    /// more.
    pub(super) fn part(
        &self,
        body: Body,
        number: i32,
        offset: u64,
        len: u64,
    ) -> impl Future<Output = Result<CompletedPart, Failure>> + Send + 'static {
        let (store, key, id) = (self.store.clone(), self.key.clone(), self.id.clone());
        async move {
            let mut pause = PART_PAUSE;
            let mut tries_left = PART_TRIES;
            loop {
                tries_left = tries_left.saturating_sub(1);
                // A file that cannot be read is no failure of the store.
                let bytes = piece(&body, offset, len).await.map_err(Failure::Broken)?;
                match send_part(&store, &key, &id, number, bytes, len).await {
                    Err(failure) if failure.passes() && tries_left > 0 => (),
                    ended => return ended,
                }
                tokio::time::sleep(jittered(pause)).await;
                pause = pause.saturating_mul(2);
            }
        }
    }

    async fn give_up(mut self) {
        self.open = false;
        abort(self.store.clone(), self.key.clone(), self.id.clone()).await;
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.open
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            // Who waited for it is gone.
            runtime.spawn(abort(self.store.clone(), self.key.clone(), self.id.clone()));
        }
    }
}

async fn send_part(
    store: &S3Store,
    key: &str,
    id: &str,
    number: i32,
    bytes: ByteStream,
    len: u64,
) -> Result<CompletedPart, Failure> {
    let asked = store.client.upload_part().bucket(&store.at.bucket).key(key);
    let asked = asked.upload_id(id).part_number(number).body(bytes);
    store.ledger.sent(Operation::Part, key, len);
    let asked = asked.customize().config_override(store.patience(len));
    let sent = asked.send().await.map_err(|error| store.at.failure(&error))?;
    Ok(CompletedPart::builder()
        .part_number(number)
        .set_e_tag(sent.e_tag)
        .set_checksum_crc32(sent.checksum_crc32)
        .set_checksum_crc32_c(sent.checksum_crc32_c)
        .set_checksum_crc64_nvme(sent.checksum_crc64_nvme)
        .build())
}

/// Up to half longer: parts that failed together do not return together.
fn jittered(pause: Duration) -> Duration {
    // Without random bytes they do.
    let sixteenths = getrandom::u32().map_or(0, |random| random % 8);
    pause.saturating_add((pause / 16).saturating_mul(sixteenths))
}

/// Parts of an upload that is not ended cost money. One that cannot be given up now is left to the
/// bucket's rule for such uploads.
async fn abort(store: S3Store, key: String, id: String) {
    store.ledger.sent(Operation::Multipart, &key, 0);
    let client: &Client = &store.client;
    let asked = client.abort_multipart_upload().bucket(&store.at.bucket).key(key).upload_id(id);
    drop(asked.send().await);
}

/// Parts are as large as it takes to need no more than S3 allows.
fn part_bytes(size: u64) -> u64 {
    size.div_ceil(PARTS_MAX).max(PART_BYTES)
}

async fn size_of(body: &Body) -> Result<u64, String> {
    match body {
        Body::Bytes(bytes) => Ok(u64::try_from(bytes.len()).unwrap_or(u64::MAX)),
        Body::File(path) => {
            let path = path.clone();
            let len = tokio::task::spawn_blocking(move || {
                std::fs::metadata(&path)
                    .map(|file| file.len())
                    .map_err(|error| format!("{}: {error}", path.display()))
            });
            len.await.map_err(|error| error.to_string())?
        }
    }
}

/// A piece of a body, as the SDK sends it.
async fn piece(body: &Body, offset: u64, len: u64) -> Result<ByteStream, String> {
    match body {
        Body::Bytes(bytes) => {
            let from = usize::try_from(offset).unwrap_or(usize::MAX);
            let to = usize::try_from(offset.saturating_add(len)).unwrap_or(usize::MAX);
            let piece = bytes.get(from..to).ok_or("a piece behind the body's end")?;
            Ok(ByteStream::from(piece.to_vec()))
        }
        Body::File(path) if len <= PART_BYTES => {
            let path = path.clone();
            let read = tokio::task::spawn_blocking(move || {
                bytes_of(&path, offset, len).map_err(|error| format!("{}: {error}", path.display()))
            });
            Ok(ByteStream::from(read.await.map_err(|error| error.to_string())??))
        }
        Body::File(path) => {
            let piece = ByteStream::read_from().path(path).offset(offset);
            let piece = piece.length(Length::Exact(len)).build().await;
            piece.map_err(|error| format!("{}: {}", path.display(), chain(&error)))
        }
    }
}

/// Read whole, so that it is signed and summed in one piece: no trailer, which some stores lack.
fn bytes_of(path: &Path, offset: u64, len: u64) -> std::io::Result<Vec<u8>> {
    use std::io::Seek as _;
    let mut file = std::fs::File::open(path)?;
    file.seek(std::io::SeekFrom::Start(offset))?;
    let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
    file.take(len).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).ok() != Some(len) {
        return Err(std::io::Error::other("the file is shorter than it was"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_as_many_as_s3_allows() {
        assert_eq!(part_bytes(PART_BYTES + 1), PART_BYTES);
        let huge: u64 = 5 << 40;
        assert!(huge.div_ceil(part_bytes(huge)) <= PARTS_MAX);
    }
}
