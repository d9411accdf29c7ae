//! The contract on real servers, and what the start-up probe finds there.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use dormouse_store::{
    AnyStore, Body, Checksums, Condition, Gate, KeySource, Ledger, Metadata, Operation, PutOutcome,
    S3Settings, S3Store, Store, contract,
};
use dormouse_test_store::{SECRET_KEY, Server};

async fn opened(server: &Server, checksums: Checksums) -> Result<AnyStore> {
    let ledger = Arc::new(Ledger::new("p"));
    let keys = KeySource::File(server.credentials(SECRET_KEY)?);
    let endpoint = server.endpoint();
    let settings =
        S3Settings { keys, checksums, ..S3Settings::new("tests", "us-east-1", Some(&endpoint)) };
    Ok(AnyStore::s3(S3Store::open(&settings, Arc::clone(&ledger)).await?, "p", ledger))
}

/// The contract, and that a large write-once file was sent in parts.
async fn keeps_the_contract(server: &Server, writers: usize, checksums: Checksums) -> Result<()> {
    server.make_bucket("tests")?;
    let store = opened(server, checksums).await?;
    let gate = store.probe().await;
    ensure!(gate == Gate::Open, "{gate:?}");
    let left = store.list("p/probe/", None).await?.entries;
    ensure!(left.is_empty(), "the probe cleans up: {left:?}");
    let account = format!("contract-{checksums:?}");
    contract::check(&store, &format!("p/{account}"), writers).await;
    let reading = store.ledger().read();
    let lines = reading.get(&account).context("an account")?;
    let parts = lines.get(&Operation::Part).map_or(0, |count| count.requests);
    ensure!(parts == 4, "two tries of two parts: {lines:?}");
    ensure!(lines.get(&Operation::Put).is_some_and(|count| count.requests > 1000), "{lines:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn seaweedfs_keeps_the_contract_with_four_writers() -> Result<()> {
    let server = Server::seaweed()?;
    keeps_the_contract(&server, 4, Checksums::WhenSupported).await
}

#[tokio::test(flavor = "multi_thread")]
async fn ministack_keeps_the_contract_with_thirty_two_writers() -> Result<()> {
    let server = Server::ministack()?;
    keeps_the_contract(&server, 32, Checksums::WhenSupported).await?;
    // And without the checksums that some stores fail on.
    keeps_the_contract(&server, 4, Checksums::WhenRequired).await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_writers_of_one_body_have_one_tag_and_are_told_apart_by_metadata() -> Result<()> {
    let server = Server::ministack()?;
    server.make_bucket("tests")?;
    let store = opened(&server, Checksums::WhenSupported).await?;
    ensure!(store.probe().await == Gate::Open);
    let put = |key: &'static str, nonce: &str| {
        let metadata = Metadata::from([("nonce".to_owned(), nonce.to_owned())]);
        store.put(key, Body::from(b"same".to_vec()), Condition::IfAbsent, metadata)
    };
    let (one, two) = (put("p/a/1", "n1").await, put("p/a/2", "n2").await);
    let (PutOutcome::Done { etag: one }, PutOutcome::Done { etag: two }) = (&one, &two) else {
        anyhow::bail!("{one:?} {two:?}");
    };
    ensure!(one == two, "tags are content hashes here: {one:?} {two:?}");
    ensure!(store.head("p/a/1").await?.metadata != store.head("p/a/2").await?.metadata);
    Ok(())
}
