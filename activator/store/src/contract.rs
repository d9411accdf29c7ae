//! What every store must do, as one suite: run it on each implementation of the port.
//!
//! Panics with a sentence at the first breach.

#![expect(clippy::expect_used, reason = "a test suite: a breach is a panic with a sentence")]

use std::path::PathBuf;

use dormouse_core::ids::ETag;

use crate::port::{
    Body, Condition, DeleteOutcome, LIST_PAGE_KEYS, Metadata, PutOutcome, ReadError, Store,
};
use crate::scratch::random_text;

/// Runs the whole suite below `prefix`, which must be empty; races have `writers` writers.
pub async fn check<S: Store>(store: &S, prefix: &str, writers: usize) {
    round_trip(store, prefix).await;
    conditions(store, prefix).await;
    deletes(store, prefix).await;
    ranges(store, prefix).await;
    large(store, prefix).await;
    ages(store, prefix).await;
    lists(store, prefix).await;
    create_race(store, prefix, writers).await;
    swap_race(store, prefix, writers).await;
}

async fn put<S: Store>(store: &S, key: &str, text: &str, condition: Condition) -> PutOutcome {
    store.put(key, Body::from(text.as_bytes().to_vec()), condition, Metadata::new()).await
}

async fn written<S: Store>(store: &S, key: &str, text: &str, condition: Condition) -> ETag {
    let outcome = put(store, key, text, condition).await;
    match outcome {
        PutOutcome::Done { etag } => etag,
        PutOutcome::ConditionFailed
        | PutOutcome::Conflict
        | PutOutcome::Unknown { .. }
        | PutOutcome::Refused { .. }
        | PutOutcome::Broken { .. } => panic!("a write of {key} must succeed: {outcome:?}"),
    }
}

async fn round_trip<S: Store>(store: &S, prefix: &str) {
    let key = format!("{prefix}/round/trip");
    assert_eq!(
        store.get(&key).await,
        Err(ReadError::NotFound { key: key.clone() }),
        "an absent key is not found"
    );
    let metadata: Metadata = [
        ("nonce".to_owned(), "abc".to_owned()),
        ("litestream-timestamp".to_owned(), "2026-12-01T09:22:47.626Z".to_owned()),
    ]
    .into();
    let body = Body::from(b"hello".to_vec());
    let outcome = store.put(&key, body, Condition::IfAbsent, metadata.clone()).await;
    let PutOutcome::Done { etag } = outcome else { panic!("a create must succeed: {outcome:?}") };
    let object = store.get(&key).await.expect("what was written is there");
    assert_eq!(object.body, b"hello");
    assert_eq!(object.meta.etag, etag, "a read gives the tag of the write");
    assert_eq!(object.meta.metadata, metadata, "metadata makes the round trip");
    let meta = store.head(&key).await.expect("head finds what get finds");
    assert_eq!(meta.size, 5);
    assert_eq!((meta.etag, meta.metadata), (etag, metadata));
    let dir = tempfile_body(store, prefix).await;
    assert_eq!(dir, 3, "a body from a file has its length");
}

/// A name of its own: several suites run in one process.
fn scratch_file() -> PathBuf {
    let name = random_text().expect("the kernel gives random bytes");
    std::env::temp_dir().join(format!("dormouse-contract-{name}"))
}

async fn tempfile_body<S: Store>(store: &S, prefix: &str) -> u64 {
    let path = scratch_file();
    std::fs::write(&path, b"abc").expect("the temporary directory can be written");
    let key = format!("{prefix}/round/file");
    let outcome =
        store.put(&key, Body::File(path.clone()), Condition::IfAbsent, Metadata::new()).await;
    std::fs::remove_file(&path).expect("the temporary file can be removed");
    assert!(matches!(outcome, PutOutcome::Done { .. }), "a file can be put: {outcome:?}");
    store.head(&key).await.expect("the file is there").size
}

async fn conditions<S: Store>(store: &S, prefix: &str) {
    let key = format!("{prefix}/conditions");
    let none = ETag::from("\"0123456789abcdef0123456789abcdef\"");
    assert_eq!(
        put(store, &key, "x", Condition::IfMatch(none.clone())).await,
        PutOutcome::ConditionFailed,
        "a replace of nothing fails"
    );
    let first = written(store, &key, "one", Condition::IfAbsent).await;
    assert_eq!(
        put(store, &key, "two", Condition::IfAbsent).await,
        PutOutcome::ConditionFailed,
        "a second create fails"
    );
    let second = written(store, &key, "two", Condition::IfMatch(first.clone())).await;
    assert_eq!(
        put(store, &key, "three", Condition::IfMatch(first)).await,
        PutOutcome::ConditionFailed,
        "a stale replace fails"
    );
    assert_eq!(store.get(&key).await.expect("it is there").body, b"two");
    assert_eq!(store.head(&key).await.expect("it is there").etag, second);
    written(store, &key, "four", Condition::None).await;
    assert_eq!(store.get(&key).await.expect("it is there").body, b"four");
}

async fn deletes<S: Store>(store: &S, prefix: &str) {
    let key = format!("{prefix}/deletes");
    assert_eq!(
        store.delete(&key, Condition::None).await,
        DeleteOutcome::Done,
        "deleting nothing is done"
    );
    assert_eq!(
        store.delete(&key, Condition::IfMatch(ETag::from("\"0123456789abcdef\""))).await,
        DeleteOutcome::ConditionFailed,
        "a conditional delete of nothing fails"
    );
    let first = written(store, &key, "one", Condition::IfAbsent).await;
    let second = written(store, &key, "two", Condition::IfMatch(first.clone())).await;
    assert_eq!(
        store.delete(&key, Condition::IfMatch(first)).await,
        DeleteOutcome::ConditionFailed,
        "a stale delete fails"
    );
    assert!(store.head(&key).await.is_ok(), "a stale delete deletes nothing");
    assert_eq!(store.delete(&key, Condition::IfMatch(second)).await, DeleteOutcome::Done);
    assert!(matches!(store.head(&key).await, Err(ReadError::NotFound { .. })));
    written(store, &key, "again", Condition::IfAbsent).await;
}

async fn ranges<S: Store>(store: &S, prefix: &str) {
    let key = format!("{prefix}/ranges");
    written(store, &key, "0123456789", Condition::IfAbsent).await;
    let part = store.get_range(&key, 3, 4).await.expect("a range inside");
    assert_eq!(part.body, b"3456");
    assert_eq!(part.meta.size, 10, "a range tells the whole size");
    let tail = store.get_range(&key, 8, 100).await.expect("a range over the end");
    assert_eq!(tail.body, b"89", "a range ends where the object ends");
    for (offset, len) in [(10, 5), (50, 5), (3, 0)] {
        let nothing = store.get_range(&key, offset, len).await.expect("a range of nothing");
        assert_eq!((nothing.body.len(), nothing.meta.size), (0, 10), "{offset} {len}");
    }
    let absent = store.get_range(&format!("{key}-not"), 0, 1).await;
    assert!(matches!(absent, Err(ReadError::NotFound { .. })), "{absent:?}");
}

/// Over the size from which S3 stores are sent parts.
const LARGE_BYTES: usize = (8 << 20) + 12_345;

async fn large<S: Store>(store: &S, prefix: &str) {
    let path = scratch_file();
    let bytes: Vec<u8> = (0..LARGE_BYTES).map(|n| (n % 251).to_le_bytes()[0]).collect();
    std::fs::write(&path, &bytes).expect("the temporary directory can be written");
    let metadata: Metadata = [("nonce".to_owned(), "large".to_owned())].into();
    let key = format!("{prefix}/large");
    let put = || store.put(&key, Body::File(path.clone()), Condition::IfAbsent, metadata.clone());
    let outcome = put().await;
    let PutOutcome::Done { etag } = outcome else { panic!("a large create: {outcome:?}") };
    assert_eq!(put().await, PutOutcome::ConditionFailed, "a large file is written once");
    std::fs::remove_file(&path).expect("the temporary file can be removed");
    let object = store.get(&key).await.expect("a large object is read");
    assert!(object.body == bytes, "a large object comes back byte for byte");
    assert_eq!(object.meta.metadata, metadata, "a large object has its metadata");
    assert_eq!(object.meta.etag, etag, "a large object has the tag of its write");
    let middle = 8 << 20;
    let part = store.get_range(&key, middle - 100, 200).await.expect("over the parts' border");
    let from = usize::try_from(middle - 100).expect("small");
    assert_eq!(part.body, &bytes[from..from + 200]);
    assert_eq!(part.meta.size, u64::try_from(LARGE_BYTES).expect("small"));
    assert_eq!(store.delete(&key, Condition::None).await, DeleteOutcome::Done);
}

/// A store that tells an age tells both times, and none of them before the other by much.
async fn ages<S: Store>(store: &S, prefix: &str) {
    let key = format!("{prefix}/ages");
    written(store, &key, "one", Condition::IfAbsent).await;
    let from_get = store.get(&key).await.expect("it is there").meta.age;
    let from_head = store.head(&key).await.expect("it is there").age;
    assert_eq!(from_get.is_some(), from_head.is_some(), "both reads tell an age, or none does");
    for age in [from_get, from_head].into_iter().flatten() {
        let passed = age.date_ms - age.last_modified_ms;
        // Both have a resolution of a second.
        assert!((-1_000..60_000).contains(&passed), "what was just written is young: {age:?}");
    }
}

async fn lists<S: Store>(store: &S, prefix: &str) {
    let total = LIST_PAGE_KEYS + 5;
    for n in 0..total {
        written(store, &format!("{prefix}/list/{:02}/{n:05}", n % 3), "x", Condition::None).await;
    }
    // A sibling that sorts between "list/" and its children's names must not be listed.
    written(store, &format!("{prefix}/list-other"), "x", Condition::None).await;
    let mut keys = Vec::new();
    let mut after = None;
    loop {
        let page = store.list(&format!("{prefix}/list/"), after.as_deref()).await.expect("a list");
        assert!(page.entries.len() <= LIST_PAGE_KEYS, "a page is bounded");
        keys.extend(page.entries.into_iter().map(|entry| entry.key));
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    assert_eq!(keys.len(), total, "every key is listed once");
    assert!(keys.is_sorted(), "keys come in order");
    let middle = format!("{prefix}/list/01");
    let page = store.list(&format!("{prefix}/list/"), Some(&middle)).await.expect("a list");
    assert!(page.entries.iter().all(|entry| entry.key > middle), "start_after is exclusive");
    let nothing = store.list(&format!("{prefix}/nothing/"), None).await.expect("an empty list");
    assert_eq!(nothing.entries, []);
}

/// A writer never writes the same text twice: where a tag is a hash of the content, one that wrote
/// what stands there already would leave its tag, and a second one would win too.
async fn race<S: Store>(
    store: &S,
    key: &str,
    condition: &Condition,
    writers: usize,
    round: usize,
) -> usize {
    let mut tasks = Vec::new();
    for n in 0..writers {
        let (store, key, condition) = (store.clone(), key.to_owned(), condition.clone());
        let text = format!("writer {n} of round {round}");
        tasks.push(tokio::spawn(async move { put(&store, &key, &text, condition).await }));
    }
    let mut winners = 0;
    for task in tasks {
        let outcome = task.await.expect("a writer does not panic");
        match outcome {
            PutOutcome::Done { .. } => winners += 1,
            PutOutcome::ConditionFailed | PutOutcome::Conflict => (),
            PutOutcome::Unknown { .. } | PutOutcome::Refused { .. } | PutOutcome::Broken { .. } => {
                panic!("a race has clear outcomes: {outcome:?}")
            }
        }
    }
    winners
}

async fn create_race<S: Store>(store: &S, prefix: &str, writers: usize) {
    let key = format!("{prefix}/race/create");
    let winners = race(store, &key, &Condition::IfAbsent, writers, 0).await;
    assert_eq!(winners, 1, "of {writers} creates one wins");
}

async fn swap_race<S: Store>(store: &S, prefix: &str, writers: usize) {
    let key = format!("{prefix}/race/swap");
    let mut etag = written(store, &key, "first", Condition::IfAbsent).await;
    for round in 0..4 {
        let winners = race(store, &key, &Condition::IfMatch(etag), writers, round).await;
        assert_eq!(winners, 1, "of {writers} replaces one wins (round {round})");
        etag = store.head(&key).await.expect("it is there").etag;
    }
}
