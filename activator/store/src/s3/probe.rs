//! Does the end of a PUT in parts honour `If-None-Match`?

use super::S3Store;
use super::judge::Failure;
use super::write::Upload;
use crate::port::{Body, Condition, Metadata, PutOutcome, Store as _};
use crate::scratch::random_text;

/// Tried on a key of its own below `<prefix>/probe/`, which is deleted. What is not clear is no.
pub(super) async fn conditional_parts(store: &S3Store, prefix: &str) -> bool {
    let Ok(name) = random_text() else { return false };
    let key = format!("{prefix}/probe/parts-{name}");
    let standing = Body::from(b"stands".to_vec());
    let put = store.put(&key, standing, Condition::IfAbsent, Metadata::new()).await;
    let honoured = matches!(put, PutOutcome::Done { .. })
        && matches!(over(store, &key).await, Err(Failure::ConditionFailed | Failure::Conflict))
        && store.get(&key).await.is_ok_and(|object| object.body == b"stands");
    // Whatever became of it: a key that is left is below `probe/`, and nobody reads it.
    drop(store.delete(&key, Condition::None).await);
    honoured
}

/// One small part over what stands there. Must fail.
async fn over(store: &S3Store, key: &str) -> Result<(), Failure> {
    let upload: Upload = store.begin_parts(key, Metadata::new()).await?;
    let part = upload.part(Body::from(b"over".to_vec()), 1, 0, 4).await?;
    store.end_parts(upload, vec![part], &Condition::IfAbsent).await.map(drop)
}
