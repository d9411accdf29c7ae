//! How many requests are on their way, and what becomes of those that are overtaken.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use dormouse_store::{
    AnyStore, Body, Condition, Gate, KeySource, Ledger, Metadata, PutOutcome, ReadError,
    S3Settings, S3Store, Store,
};
use dormouse_test_store::{Fault, FaultProxy, SECRET_KEY, Server};

const EACH_WAY: Duration = Duration::from_millis(150);

async fn opened(server: &Server, proxy: &FaultProxy) -> Result<AnyStore> {
    let ledger = Arc::new(Ledger::new("p"));
    let keys = KeySource::File(server.credentials(SECRET_KEY)?);
    let settings = S3Settings {
        keys,
        requests_at_a_time: 2,
        ..S3Settings::new("tests", "us-east-1", Some(&proxy.endpoint()))
    };
    let store = AnyStore::s3(S3Store::open(&settings, Arc::clone(&ledger)).await?, "p", ledger);
    let gate = store.probe().await;
    ensure!(gate == Gate::Open, "{gate:?}");
    Ok(store)
}

fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "bounds are measured in real time")]
    Instant::now()
}

async fn put(store: &AnyStore, key: &str, body: Vec<u8>) -> PutOutcome {
    store.put(key, Body::from(body), Condition::IfAbsent, Metadata::new()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_bounded_and_records_do_not_wait_for_them() -> Result<()> {
    let server = Server::ministack()?;
    server.make_bucket("tests")?;
    let proxy = FaultProxy::start(server.address())?;
    let store = opened(&server, &proxy).await?;
    proxy.delay(EACH_WAY);
    let begin = now();
    let bulk = (0..6).map(|n| {
        let store = store.clone();
        tokio::spawn(async move { put(&store, &format!("p/a.test/0000/{n}"), vec![1]).await })
    });
    let bulk: Vec<_> = bulk.collect();
    for key in ["p/a.test/lock.json", "p/sessions/box-1.json"] {
        let record = put(&store, key, vec![2]).await;
        ensure!(matches!(record, PutOutcome::Done { .. }), "{record:?}");
    }
    let records = now() - begin;
    for task in bulk {
        let outcome = task.await?;
        ensure!(matches!(outcome, PutOutcome::Done { .. }), "{outcome:?}");
    }
    let all = now() - begin;
    ensure!(all >= EACH_WAY * 2 * 3, "six requests, two at a time: {all:?}");
    ensure!(records < all, "records went first: {records:?} of {all:?}");
    ensure!(proxy.connections() <= 8, "{}", proxy.connections());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_nobody_waits_for_any_more_is_given_up() -> Result<()> {
    let server = Server::ministack()?;
    server.make_bucket("tests")?;
    let proxy = FaultProxy::start(server.address())?;
    let store = opened(&server, &proxy).await?;
    let given_up = || {
        let requests = proxy.requests();
        requests
            .iter()
            .filter(|line| line.starts_with("DELETE") && line.contains("uploadId="))
            .count()
    };
    let before = given_up();
    proxy.delay(EACH_WAY);
    let large = put(&store, "p/a.test/0009/large", vec![3; (8 << 20) + 1]);
    // Begun after a round trip, and ended after three at the earliest.
    ensure!(tokio::time::timeout(EACH_WAY * 3, large).await.is_err());
    let end = now() + Duration::from_secs(10);
    while given_up() == before {
        ensure!(now() < end, "not given up: {:?}", proxy.requests());
        tokio::task::yield_now().await;
    }
    proxy.delay(Duration::ZERO);
    ensure!(store.head("p/a.test/0009/large").await.is_err(), "nothing was written");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_read_of_what_was_replaced_meanwhile_is_never_put_together() -> Result<()> {
    let server = Server::ministack()?;
    server.make_bucket("tests")?;
    let proxy = FaultProxy::start(server.address())?;
    let direct = FaultProxy::start(server.address())?;
    let (store, other) = (opened(&server, &proxy).await?, opened(&server, &direct).await?);
    let written = put(&store, "p/a.test/0001/x", vec![1; 2_000_000]).await;
    ensure!(matches!(written, PutOutcome::Done { .. }), "{written:?}");
    let before = proxy.requests().len();
    proxy.delay(EACH_WAY);
    proxy.set(Fault::CutAnswer { after: 1_000_000, times: 1 });
    let replacing = async {
        // The second request is on its way: it takes a delay until the store hears of it.
        while proxy.requests().len() < before + 2 {
            tokio::task::yield_now().await;
        }
        let body = Body::from(vec![2; 2_000_000]);
        other.put("p/a.test/0001/x", body, Condition::None, Metadata::new()).await
    };
    let (read, replaced) = tokio::join!(store.get("p/a.test/0001/x"), replacing);
    ensure!(matches!(replaced, PutOutcome::Done { .. }), "{replaced:?}");
    let Err(ReadError::Broken { why, .. }) = &read else {
        anyhow::bail!("{:?}", read.map(|object| object.meta));
    };
    ensure!(why.contains("changed while it was read"), "{why}");
    Ok(())
}
