//! What each fault of network and store is called.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dormouse_core::ids::ETag;
use dormouse_store::{
    AnyStore, Body, Condition, DeleteOutcome, Gate, KeySource, Ledger, Metadata, Operation,
    PutOutcome, ReadError, S3Settings, S3Store, Store,
};
use dormouse_test_store::{Fault, FaultProxy, SECRET_KEY, Scripted, Server};

const TIMEOUT: Duration = Duration::from_millis(700);

async fn bare(server: &Server, endpoint: &str, bucket: &str, secret: &str) -> Result<S3Store> {
    let keys = KeySource::File(server.credentials(secret)?);
    let settings = S3Settings {
        keys,
        request_timeout: TIMEOUT,
        ..S3Settings::new(bucket, "us-east-1", Some(endpoint))
    };
    Ok(S3Store::open(&settings, Arc::new(Ledger::new("p"))).await?)
}

fn text(text: &str) -> Body {
    Body::from(text.as_bytes().to_vec())
}

fn nonce(text: &str) -> Metadata {
    [("nonce".to_owned(), text.to_owned())].into()
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_of_the_network_have_their_outcomes() -> Result<()> {
    let server = Server::seaweed()?;
    server.make_bucket("tests")?;
    let proxy = FaultProxy::start(server.address())?;
    let store = bare(&server, &proxy.endpoint(), "tests", SECRET_KEY).await?;
    a_dropped_answer_is_unknown_and_the_repeat_finds_its_own_nonce(&store, &proxy).await?;
    a_cut_read_goes_on_where_it_was_cut(&store, &proxy).await?;
    a_slow_store_is_unknown(&store, &proxy).await?;
    a_store_that_nobody_listens_for_is_broken(&store, &proxy).await?;
    a_part_that_was_cut_is_sent_again_by_itself(&server, &proxy).await?;
    a_dropped_end_of_parts_is_unknown_and_a_lost_part_is_not(&server, &proxy).await?;
    a_wrong_secret_and_a_missing_bucket_are_refused(&server).await
}

async fn a_dropped_answer_is_unknown_and_the_repeat_finds_its_own_nonce(
    store: &S3Store,
    proxy: &FaultProxy,
) -> Result<()> {
    let put = || store.put("p/a/dropped", text("body"), Condition::IfAbsent, nonce("ours"));
    proxy.set(Fault::DropAnswer { method: "PUT", times: 1 });
    let before = proxy.requests().len();
    let outcome = put().await;
    ensure!(matches!(outcome, PutOutcome::Unknown { .. }), "{outcome:?}");
    ensure!(proxy.requests().len() == before + 1, "nothing is repeated by itself");
    ensure!(put().await == PutOutcome::ConditionFailed, "it was carried out");
    let meta = store.head("p/a/dropped").await?;
    ensure!(meta.metadata == nonce("ours"), "{meta:?}");
    // The same for a replace, as a lease's renewal does it.
    let swap = Condition::IfMatch(meta.etag);
    proxy.set(Fault::DropAnswer { method: "PUT", times: 1 });
    let put = || store.put("p/a/dropped", text("two"), swap.clone(), nonce("two"));
    ensure!(matches!(put().await, PutOutcome::Unknown { .. }));
    ensure!(put().await == PutOutcome::ConditionFailed);
    ensure!(store.head("p/a/dropped").await?.metadata == nonce("two"));
    proxy.set(Fault::DropAnswer { method: "DELETE", times: 1 });
    let deleted = store.delete("p/a/dropped", Condition::None).await;
    ensure!(matches!(deleted, DeleteOutcome::Unknown { .. }), "{deleted:?}");
    ensure!(matches!(store.head("p/a/dropped").await, Err(ReadError::NotFound { .. })));
    Ok(())
}

async fn a_cut_read_goes_on_where_it_was_cut(store: &S3Store, proxy: &FaultProxy) -> Result<()> {
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251).to_le_bytes()[0]).collect();
    let body = Body::from(bytes.clone());
    let put = store.put("p/a/cut", body, Condition::IfAbsent, nonce("cut")).await;
    ensure!(matches!(put, PutOutcome::Done { .. }), "{put:?}");
    proxy.set(Fault::CutAnswer { after: 1_000_000, times: 2 });
    let before = proxy.requests().len();
    let object = store.get("p/a/cut").await?;
    ensure!(object.body == bytes && object.meta.metadata == nonce("cut"));
    ensure!(proxy.requests().len() == before + 3, "the first, and two that went on");
    proxy.set(Fault::CutAnswer { after: 1_000_000, times: 1 });
    let range = store.get_range("p/a/cut", 500_000, 2_000_000).await?;
    ensure!(range.body == bytes[500_000..2_500_000] && range.meta.size == 3_000_000);
    // One that brings nothing is not repeated for ever.
    proxy.set(Fault::CutAnswer { after: 0, times: 1000 });
    let before = proxy.requests().len();
    let nothing = store.get("p/a/cut").await;
    ensure!(matches!(nothing, Err(ReadError::Unknown { .. })), "{nothing:?}");
    ensure!(proxy.requests().len() == before + 1);
    proxy.set(Fault::None);
    Ok(())
}

async fn a_slow_store_is_unknown(store: &S3Store, proxy: &FaultProxy) -> Result<()> {
    proxy.delay(Duration::from_millis(10));
    let fine = store.put("p/a/slow", text("one"), Condition::IfAbsent, nonce("1")).await;
    ensure!(matches!(fine, PutOutcome::Done { .. }), "{fine:?}");
    proxy.delay(TIMEOUT * 4);
    let put = store.put("p/a/slow", text("two"), Condition::None, nonce("2")).await;
    let PutOutcome::Unknown { why } = put else { anyhow::bail!("{put:?}") };
    ensure!(why.contains("no answer in time"), "{why}");
    let got = store.get("p/a/slow").await;
    ensure!(matches!(got, Err(ReadError::Unknown { .. })), "{got:?}");
    proxy.delay(Duration::ZERO);
    Ok(())
}

async fn a_store_that_nobody_listens_for_is_broken(
    store: &S3Store,
    proxy: &FaultProxy,
) -> Result<()> {
    proxy.set(Fault::Refuse);
    // A connection that was cut while it was idle may still be in the pool: both are no answer.
    let mut put = store.put("p/a/refused", text("one"), Condition::IfAbsent, nonce("1")).await;
    if matches!(put, PutOutcome::Unknown { .. }) {
        put = store.put("p/a/refused", text("one"), Condition::IfAbsent, nonce("1")).await;
    }
    let PutOutcome::Broken { why } = put else { anyhow::bail!("never sent: {put:?}") };
    ensure!(why.contains(&proxy.address().to_string()), "it says where: {why}");
    let got = store.list("p/a/", None).await;
    ensure!(matches!(got, Err(ReadError::Broken { .. })), "{got:?}");
    proxy.set(Fault::None);
    ensure!(store.list("p/a/", None).await.is_ok());
    Ok(())
}

/// A store through the proxy that was probed: it sends write-once files in parts.
async fn probed(server: &Server, proxy: &FaultProxy) -> Result<AnyStore> {
    let ledger = Arc::new(Ledger::new("p"));
    let keys = KeySource::File(server.credentials(SECRET_KEY)?);
    let settings =
        S3Settings { keys, ..S3Settings::new("tests", "us-east-1", Some(&proxy.endpoint())) };
    let store = S3Store::open(&settings, Arc::clone(&ledger)).await?;
    let store = AnyStore::s3(store, "p", ledger);
    ensure!(store.probe().await == Gate::Open);
    Ok(store)
}

async fn a_part_that_was_cut_is_sent_again_by_itself(
    server: &Server,
    proxy: &FaultProxy,
) -> Result<()> {
    let store = probed(server, proxy).await?;
    let bytes: Vec<u8> = (0..(5_u32 << 20)).flat_map(|n| (n % 65_521).to_le_bytes()).collect();
    let body = Body::from(bytes.clone());
    let before = proxy.requests().len();
    proxy.set(Fault::DropAnswer { method: "PUT", times: 2 });
    let put = store.put("p/cut/parts", body, Condition::IfAbsent, nonce("cut")).await;
    ensure!(matches!(put, PutOutcome::Done { .. }), "{put:?}");
    let lines = proxy.requests().split_off(before);
    ensure!(lines.iter().filter(|line| is_part(line)).count() == 5, "three, two again: {lines:?}");
    ensure!(!lines.iter().any(|line| is_abort(line)), "nothing is begun anew: {lines:?}");
    ensure!(store.ledger().read()["cut"][&Operation::Part].requests == 5, "and each is counted");
    ensure!(store.get("p/cut/parts").await?.body == bytes);
    Ok(())
}

async fn a_dropped_end_of_parts_is_unknown_and_a_lost_part_is_not(
    server: &Server,
    proxy: &FaultProxy,
) -> Result<()> {
    let store = probed(server, proxy).await?;
    let bytes = vec![7; (8 << 20) + 1];
    let put = || store.put("p/a/parts", bytes.clone().into(), Condition::IfAbsent, nonce("parts"));
    proxy.set(Fault::DropAnswer { method: "PUT", times: 1000 });
    let lost = put().await;
    ensure!(matches!(lost, PutOutcome::Broken { .. }), "no end was sent: {lost:?}");
    let given_up = proxy.requests().iter().filter(|line| is_abort(line)).count();
    ensure!(given_up >= 1, "what was begun is given up");
    proxy.set(Fault::None);
    // The first POST begins the upload, the second ends it: the first passes.
    let ends = || proxy.requests().iter().filter(|line| is_end(line)).count();
    let parts = || proxy.requests().iter().filter(|line| is_part(line)).count();
    let (before, parts_before) = (ends(), parts());
    let sending = put();
    let dropping = async {
        while parts() == parts_before {
            tokio::task::yield_now().await;
        }
        proxy.set(Fault::DropAnswer { method: "POST", times: 1 });
    };
    let (ended, ()) = tokio::join!(sending, dropping);
    ensure!(matches!(ended, PutOutcome::Unknown { .. }), "{ended:?}");
    ensure!(ends() == before + 1);
    ensure!(put().await == PutOutcome::ConditionFailed, "it was carried out");
    ensure!(store.head("p/a/parts").await?.metadata == nonce("parts"));
    Ok(())
}

fn is_part(line: &str) -> bool {
    line.starts_with("PUT") && line.contains("partNumber=")
}

fn is_end(line: &str) -> bool {
    line.starts_with("POST") && line.contains("uploadId=")
}

fn is_abort(line: &str) -> bool {
    line.starts_with("DELETE") && line.contains("uploadId=")
}

async fn a_wrong_secret_and_a_missing_bucket_are_refused(server: &Server) -> Result<()> {
    let endpoint = server.endpoint();
    let wrong = bare(server, &endpoint, "tests", "not-the-secret").await?;
    let some = Condition::IfMatch(ETag::from("\"0123456789abcdef\""));
    let all = [Condition::None, Condition::IfAbsent, some];
    refuses(&wrong, &all, "check the keys").await?;
    // This store says 403 to a writer who may not make buckets, 404 to a reader, and 412 to the
    // replace of an object that is not there.
    let missing = bare(server, &endpoint, "not-there", SECRET_KEY).await?;
    refuses(&missing, &all[..2], "bucket not-there").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_bucket_is_refused_by_its_name() -> Result<()> {
    let server = Server::ministack()?;
    let missing = bare(&server, &server.endpoint(), "not-there", SECRET_KEY).await?;
    let says = format!("bucket not-there does not exist at {}: create it", server.endpoint());
    let some = Condition::IfMatch(ETag::from("\"0123456789abcdef\""));
    refuses(&missing, &[Condition::None, Condition::IfAbsent, some], &says).await
}

/// Every operation is refused with these words, and with no secret.
async fn refuses(store: &S3Store, conditions: &[Condition], says: &str) -> Result<()> {
    for condition in conditions {
        let put = store.put("p/a/k", text("x"), condition.clone(), nonce("x")).await;
        let PutOutcome::Refused { why } = put else { anyhow::bail!("{condition:?}: {put:?}") };
        ensure!(why.contains(says) && !why.contains("not-the-secret"), "{why}");
    }
    for read in [
        store.get("p/a/k").await.map(drop),
        store.head("p/a/k").await.map(drop),
        store.list("p/a/", None).await.map(drop),
    ] {
        let Err(ReadError::Refused { why, .. }) = read else { anyhow::bail!("{read:?}") };
        ensure!(why.contains(says), "{why}");
    }
    Ok(())
}

/// A store before a server that says the same to everything.
async fn told(server: &Scripted, keys: &tempfile::TempDir) -> Result<S3Store> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = keys.path().join("keys.toml");
    std::fs::write(&path, "access_key_id = \"id\"\nsecret_access_key = \"geheim\"\n")?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    let keys = KeySource::File(path);
    let settings =
        S3Settings { keys, ..S3Settings::new("tests", "us-east-1", Some(&server.endpoint())) };
    Ok(S3Store::open(&settings, Arc::new(Ledger::new("p"))).await?)
}

#[tokio::test]
async fn each_answer_of_a_store_has_its_outcome_and_none_is_repeated() -> Result<()> {
    type Wanted = fn(&PutOutcome) -> bool;
    let broken: Wanted = |put| matches!(put, PutOutcome::Broken { .. });
    let unknown: Wanted = |put| matches!(put, PutOutcome::Unknown { .. });
    let conflict: Wanted = |put| *put == PutOutcome::Conflict;
    let failed: Wanted = |put| *put == PutOutcome::ConditionFailed;
    let clock: Wanted = |put| match put {
        PutOutcome::Refused { why } => why.contains("clock of this machine is wrong"),
        PutOutcome::Done { .. }
        | PutOutcome::ConditionFailed
        | PutOutcome::Conflict
        | PutOutcome::Unknown { .. }
        | PutOutcome::Broken { .. } => false,
    };
    let server = Scripted::start((500, None))?;
    let keys = tempfile::tempdir()?;
    let store = told(&server, &keys).await?;
    let swap = Condition::IfMatch(ETag::from("\"0123456789abcdef\""));
    for (status, code, wanted) in [
        (503, Some("SlowDown"), broken),
        (429, Some("TooManyRequests"), broken),
        (429, None, broken),
        (403, Some("RequestTimeTooSkewed"), clock),
        (409, Some("ConditionalRequestConflict"), conflict),
        (409, None, conflict),
        (412, Some("PreconditionFailed"), failed),
        (404, Some("NoSuchKey"), failed),
        (404, None, failed),
        (500, Some("InternalError"), unknown),
        (502, None, unknown),
        (503, None, unknown),
        (504, None, unknown),
    ] {
        server.say((status, code));
        let before = server.requests();
        let put = store.put("p/a/lock.json", text("x"), swap.clone(), nonce("x")).await;
        ensure!(wanted(&put), "{status} {code:?}: {put:?}");
        ensure!(server.requests() == before + 1, "{status}: one request");
    }
    server.say((404, Some("NoSuchKey")));
    ensure!(store.delete("p/a/k", swap.clone()).await == DeleteOutcome::ConditionFailed);
    ensure!(store.delete("p/a/k", Condition::None).await == DeleteOutcome::Done);
    server.say((503, Some("SlowDown")));
    let got = store.get("p/a/k").await.err().context("an error")?;
    ensure!(matches!(got, ReadError::Broken { .. }), "{got}");
    ensure!(!got.to_string().contains("geheim"));
    Ok(())
}

/// How often the part that was sent most often was sent, of this upload.
fn tries(lines: &[String], upload: u32) -> usize {
    let id = format!("uploadid=upload-{upload}");
    let sent = |number: &str| {
        let of = |line: &&String| line.starts_with("put ") && line.contains(&id);
        lines.iter().filter(of).filter(|line| line.contains(number)).count()
    };
    sent("partnumber=1").max(sent("partnumber=2"))
}

#[tokio::test]
async fn a_part_is_sent_again_for_what_passes_a_few_times_and_never_for_what_lasts() -> Result<()> {
    let server = Scripted::start((500, None))?;
    let keys = tempfile::tempdir()?;
    let store = told(&server, &keys).await?;
    let put = || store.put("p/a/k", vec![7; (8 << 20) + 1].into(), Condition::None, nonce("x"));
    let said = [
        (403, Some("AccessDenied"), 1),
        (404, Some("NoSuchUpload"), 1),
        (400, Some("InvalidPart"), 1),
        (500, Some("InternalError"), 4),
        (503, Some("SlowDown"), 4),
        (429, None, 4),
    ];
    for ((status, code, wanted), upload) in said.into_iter().zip(1..) {
        server.say((status, code));
        let outcome = put().await;
        let is_certain = matches!(outcome, PutOutcome::Broken { .. } | PutOutcome::Refused { .. });
        ensure!(is_certain, "no end was sent: {outcome:?}");
        let tries = tries(&server.lines(), upload);
        ensure!(tries == wanted, "{status} {code:?}: {tries} tries");
    }
    Ok(())
}

#[tokio::test]
async fn an_upload_that_nobody_waits_for_sends_no_part_again() -> Result<()> {
    let server = Scripted::start((500, None))?;
    let keys = tempfile::tempdir()?;
    let store = told(&server, &keys).await?;
    let put = || store.put("p/a/k", vec![7; (8 << 20) + 1].into(), Condition::None, nonce("x"));
    let until = async |is: fn(&str) -> bool| {
        let mut ticks = tokio::time::interval(Duration::from_millis(1));
        while !server.lines().iter().any(|line| is(line)) {
            ticks.tick().await;
        }
    };
    tokio::select! {
        outcome = put() => anyhow::bail!("{outcome:?}"),
        () = until(|line| line.starts_with("put ")) => {}
    }
    until(|line| line.starts_with("delete ") && line.contains("upload-1")).await;
    // As long as the tries of the first would have taken.
    ensure!(matches!(put().await, PutOutcome::Broken { .. }));
    let (first, second) = (tries(&server.lines(), 1), tries(&server.lines(), 2));
    ensure!(first < second && second == 4, "{first} tries, {second} tries");
    Ok(())
}

#[tokio::test]
async fn a_store_that_takes_every_write_is_unfit_and_named() -> Result<()> {
    let server = Scripted::start((200, None))?;
    let keys = tempfile::tempdir()?;
    let store = AnyStore::s3(told(&server, &keys).await?, "p", Arc::new(Ledger::new("p")));
    let gate = store.probe().await;
    let Gate::Unfit { why } = &gate else { anyhow::bail!("{gate:?}") };
    for says in ["bucket tests", &server.endpoint(), "If-None-Match", "Use a store"] {
        ensure!(why.contains(says), "{why}");
    }
    let put = store.put("p/a/k", text("x"), Condition::None, nonce("x")).await;
    ensure!(matches!(put, PutOutcome::Refused { .. }), "{put:?}");
    ensure!(!store.ledger().read().contains_key("a"), "nothing was sent");
    ensure!(store.ledger().read().values().all(|l| !l.contains_key(&Operation::Get)));
    Ok(())
}
