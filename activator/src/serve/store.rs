//! The configured store: opened, known again, and probed before it is written to.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use dormouse_link::config::{Checksums as ConfigChecksums, Store as Config, StoreKind};
use dormouse_store::{
    AnyStore, Checksums, DirectoryStore, Gate, KeySource, Ledger, S3Settings, S3Store,
};

use super::records::Records;
use super::write_durably;
use dormouse_replica::clock::system_now;

/// How long a start waits for the store's first answer.
const FIRST_PROBE: Duration = Duration::from_secs(5);
/// Between probes of a store that is away, doubled up to the longest.
const PROBE_AGAIN: Duration = Duration::from_secs(1);
/// Also the longest that a store which is back, or was put right, stays unused.
const PROBE_AGAIN_MAX: Duration = Duration::from_secs(5);

/// What tells a store from another.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoreIdentity {
    text: String,
    /// What to look at where it is not the one that was.
    hint: &'static str,
}

/// Opens the store that this box has used until now, and asks it whether it can fence at all.
pub(crate) async fn known(config: &Config, path: &Path) -> anyhow::Result<AnyStore> {
    let (store, identity) = open_store(config).await?;
    is_known(&identity, path)?;
    probe_until_open(&store).await?;
    Ok(store)
}

/// Opens the configured store. It can be read from; writes wait for [`AnyStore::probe`].
pub(crate) async fn open_store(config: &Config) -> anyhow::Result<(AnyStore, StoreIdentity)> {
    match (config.kind, &config.path, &config.bucket) {
        (StoreKind::Directory, Some(path), _) => {
            let store = DirectoryStore::open(path).context("the directory store")?;
            let hint = "is its disk mounted?";
            let identity = StoreIdentity { text: store.identity().to_owned(), hint };
            Ok((AnyStore::directory(store, &config.prefix), identity))
        }
        (StoreKind::S3, _, Some(bucket)) => {
            let settings = s3_settings(config, bucket);
            let ledger = Arc::new(Ledger::new(&config.prefix));
            let store = S3Store::open(&settings, Arc::clone(&ledger)).await?;
            let text = format!("{} {}", settings.identity(), config.prefix);
            let hint = "are store.endpoint, store.bucket and store.prefix what they were?";
            let identity = StoreIdentity { text, hint };
            Ok((AnyStore::s3(store, &config.prefix, ledger), identity))
        }
        (StoreKind::Directory, None, _) => bail!("store.path is missing: set it"),
        (StoreKind::S3, _, None) => bail!("store.bucket is missing: set it"),
    }
}

fn s3_settings(config: &Config, bucket: &str) -> S3Settings {
    let by_default =
        S3Settings::new(bucket, config.region_or_default(), config.endpoint.as_deref());
    S3Settings {
        path_style: config.path_style.unwrap_or(by_default.path_style),
        keys: config.credentials.clone().map_or(KeySource::Chain, KeySource::File),
        connect_timeout: config.connect_timeout.duration(),
        request_timeout: config.request_timeout.duration(),
        checksums: match config.checksums {
            ConfigChecksums::WhenSupported => Checksums::WhenSupported,
            ConfigChecksums::WhenRequired => Checksums::WhenRequired,
        },
        requests_at_a_time: usize::try_from(config.requests_at_a_time).unwrap_or(1),
        ..by_default
    }
}

/// A box goes on with the store that it began with: another one, or one whose disk is not mounted,
/// would look like a store where every replica is gone.
fn is_known(store: &StoreIdentity, path: &Path) -> anyhow::Result<()> {
    match fs::read_to_string(path) {
        Ok(known) if known == store.text => Ok(()),
        Ok(_) => bail!(
            "this is not the store that this box has used until now: {} Remove {} to go on with \
             another store",
            store.hint,
            path.display()
        ),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            write_durably(path, &store.text)
        }
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Probes the store, and goes on in the background while it does not open: the activator starts
/// without it, holds what it must, and says why. A store that ignores conditions is an error.
async fn probe_until_open(store: &AnyStore) -> anyhow::Result<()> {
    // A store that does not answer must not hold up proxies that wait for this activator.
    let first = tokio::time::timeout(FIRST_PROBE, store.probe()).await;
    match first.unwrap_or_else(|_| store.gate()) {
        Gate::Open => return Ok(()),
        Gate::Unfit { why } => bail!("{why}"),
        Gate::Unknown { why } | Gate::Refused { why } => {
            tracing::error!(store = store.place(), why, "the store cannot be used: tried again");
        }
    }
    let store = store.clone();
    tokio::spawn(async move {
        let mut pause = PROBE_AGAIN;
        loop {
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(PROBE_AGAIN_MAX);
            match store.probe().await {
                Gate::Open => {
                    tracing::info!(store = store.place(), "the store can be used now");
                    return;
                }
                Gate::Unknown { why } | Gate::Refused { why } | Gate::Unfit { why } => {
                    tracing::warn!(store = store.place(), why, "the store still cannot be used");
                }
            }
        }
    });
    Ok(())
}

/// The store as `status` tells it: as the probe saw it, and since then as its records tell.
pub(crate) fn told(store: &AnyStore, records: &Records) -> String {
    match trouble(store, records) {
        None => store.place(),
        Some(trouble) => format!("{}: {trouble}", store.place()),
    }
}

/// What is in the way of the store's use: a word, and why.
pub(crate) fn trouble(store: &AnyStore, records: &Records) -> Option<String> {
    match store.gate() {
        Gate::Open => records.trouble().map(|trouble| trouble.told(system_now().mono)),
        Gate::Unknown { why } => Some(format!("away: {why}")),
        Gate::Refused { why } => Some(format!("refused: {why}")),
        Gate::Unfit { why } => Some(format!("unfit: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_box_goes_on_with_the_store_that_it_began_with() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store-id");
        let identity = |text: &str| StoreIdentity { text: text.to_owned(), hint: "is it?" };
        is_known(&identity("s3 http://e b p"), &path).unwrap();
        is_known(&identity("s3 http://e b p"), &path).unwrap();
        let error = is_known(&identity("s3 http://e b q"), &path).unwrap_err().to_string();
        assert!(error.contains("is it?") && error.contains("store-id"), "{error}");
    }

    #[tokio::test]
    async fn a_credentials_file_that_others_can_read_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let keys = dir.path().join("keys.toml");
        fs::write(&keys, "access_key_id = \"a\"\nsecret_access_key = \"geheim\"\n").unwrap();
        let config = Config {
            bucket: Some("bbb".to_owned()),
            endpoint: Some("http://127.0.0.1:1".to_owned()),
            credentials: Some(keys),
            ..Config::new(StoreKind::S3)
        };
        let error = open_store(&config).await.unwrap_err().to_string();
        assert!(error.contains("keys.toml") && error.contains("chmod 600"), "{error}");
        assert!(!error.contains("geheim"), "{error}");
    }
}
