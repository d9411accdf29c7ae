//! `restore` and `verify`: work on the store alone, with no activator running.

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use dormouse_core::ids::Host;
use dormouse_link::config::{Config, StoreKind};
use dormouse_replica::clock::system_now;
use dormouse_replica::put::{Place, rfc3339};
use dormouse_replica::restore::{Progress, Target, plan, restore_watched};
use dormouse_replica::verify;
use dormouse_store::AnyStore;

use crate::cli::{print_value, tell};
use crate::serve::paths::Paths;
use crate::serve::{open_store, random_u64};

/// How often a terminal hears of the progress.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// What is to be restored.
pub(crate) struct Wanted {
    pub(crate) host: String,
    pub(crate) target: Target,
}

async fn place(config: &Config, wanted: &Wanted) -> anyhow::Result<Place<AnyStore>> {
    let host = &wanted.host;
    if let Target::Timestamp(ms) = wanted.target {
        let now = system_now().wall.unix_ms();
        if ms > now {
            let (at, now) = (rfc3339(ms), rfc3339(now));
            bail!(
                "--at {at} is in the future, it is {now} now: for the newest state leave --at away"
            );
        }
    }
    let Some(store) = &config.store else {
        bail!("the config has no [store]: there is nothing to restore from");
    };
    if let (StoreKind::Directory, Some(path)) = (store.kind, &store.path)
        && !path.is_dir()
    {
        bail!("{}: no such directory: is the store's disk mounted?", path.display());
    }
    let prefix = store.prefix.clone();
    let (store, _) = open_store(store).await?;
    Ok(Place { store, prefix, host: Host(host.clone()) })
}

/// What cannot be done, and where it was looked for.
fn unrestored(place: &Place<AnyStore>) -> String {
    let Place { store, prefix, host } = place;
    format!("{host} cannot be restored from {}, prefix {prefix}", store.place())
}

/// `restore`, for real or not.
pub(crate) async fn restore(
    config: &Config,
    wanted: &Wanted,
    to: Option<&Path>,
    dry: bool,
    json: bool,
) -> anyhow::Result<ExitCode> {
    match (to, dry) {
        (_, true) => dry_run(config, wanted, json).await,
        (Some(to), false) => {
            // A bare name has no directory that could be synced.
            let to = std::path::absolute(to)
                .with_context(|| format!("--to {}: no such place", to.display()))?;
            to_file(config, wanted, &to, json).await
        }
        (None, false) => bail!("where to? Give --to FILE, or --dry-run"),
    }
}

/// `restore --dry-run`: what would be read, and what would be reached.
async fn dry_run(config: &Config, wanted: &Wanted, json: bool) -> anyhow::Result<ExitCode> {
    let place = place(config, wanted).await?;
    let Place { store, prefix, host } = &place;
    let plan =
        plan(store, prefix, host, wanted.target).await.with_context(|| unrestored(&place))?;
    let time = rfc3339(plan.timestamp_ms);
    if json {
        let file = |file: &dormouse_replica::restore::RemoteFile| {
            serde_json::json!({
                "level": file.key.level,
                "name": file.key.name(),
                "bytes": file.size,
            })
        };
        let value = serde_json::json!({
            "host": wanted.host,
            "txid": plan.txid.0,
            "time": time,
            "requests": plan.requests,
            "bytes": plan.bytes,
            "files": plan.files.iter().map(file).collect::<Vec<_>>(),
        });
        return print_value(&value, true);
    }
    for file in &plan.files {
        tell!("level {}  {}  {:>12} bytes", file.key.level, file.key.name(), file.size);
    }
    tell!(
        "TXID {} of {time}: {} files, {} bytes, {} requests; nothing was restored",
        plan.txid,
        plan.files.len(),
        plan.bytes,
        plan.requests
    );
    Ok(ExitCode::SUCCESS)
}

/// `restore --to FILE`.
async fn to_file(
    config: &Config,
    wanted: &Wanted,
    to: &Path,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let beside = |ending: &str| {
        let mut name = to.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    };
    for taken in [to.to_owned(), beside("-wal"), beside("-shm"), beside("-journal")] {
        if taken.symlink_metadata().is_ok() {
            bail!("{}: exists already; nothing was changed", taken.display());
        }
    }
    // Before anything is read: else a temporary name beside it would be blamed.
    if let Some(dir) = to.parent()
        && !dir.is_dir()
    {
        bail!("{}: no such directory: make it, or restore elsewhere", dir.display());
    }
    let place = place(config, wanted).await?;
    let Place { store, prefix, host } = &place;
    // A name of its own: what lies beside the file is not ours.
    let temporary = beside(&format!(".restore-{}-{:x}", std::process::id(), random_u64()?));
    let progress = Progress::default();
    let work = restore_watched(store, prefix, host, wanted.target, &temporary, &progress);
    let restored = shown(work, &progress).await;
    let restored = restored.with_context(|| unrestored(&place))?;
    if let Err(error) = restored.adopt(to, None) {
        std::fs::remove_file(&temporary).ok();
        return Err(error.into());
    }
    let value = serde_json::json!({
        "host": wanted.host,
        "file": to.display().to_string(),
        "txid": restored.txid.0,
        "time": rfc3339(restored.timestamp_ms),
        "pages": restored.page_count,
        "page_size": restored.page_size.get(),
    });
    print_value(&value, json)
}

/// `verify` ends so where the replica is not good; 1 where it could not be verified, as every command
/// that did not do its work.
const NOT_GOOD: u8 = 3;

/// `verify`: restores into a scratch file beside the hosts' own, checks it, removes it.
pub(crate) async fn verify(
    config: &Config,
    wanted: &Wanted,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let unsure = || format!("{} could not be verified", wanted.host);
    let place = place(config, wanted).await.with_context(unsure)?;
    let name = format!("verify-{}-{:x}", std::process::id(), random_u64()?);
    let scratch = scratch_dir(config).join(name);
    let progress = Progress::default();
    let paths = Paths::of(&config.this_box);
    let target = (wanted.target, paths.acknowledged(&wanted.host));
    let work = verify::verify(&place, target, &scratch, u64::MAX, &progress, system_now);
    let done = shown(work, &progress).await;
    let done = match done {
        Err(error) if error.blames_replica() => {
            let is_newest = wanted.target == Target::Latest;
            let is_marked = is_newest && paths.mark_damaged(&wanted.host).unwrap_or(false);
            let next =
                if is_marked { "; its next visit on this box uploads a whole image" } else { "" };
            let host = &wanted.host;
            // Nobody may listen.
            drop(writeln!(std::io::stderr(), "dormouse: {host} is NOT good: {error}{next}"));
            return Ok(ExitCode::from(NOT_GOOD));
        }
        done => done.with_context(|| {
            let Place { store, prefix, .. } = &place;
            format!("{} could not be verified from {}, prefix {prefix}", wanted.host, store.place())
        })?,
    };
    let value = serde_json::json!({
        "host": wanted.host,
        "good": true,
        "txid": done.restored.txid.0,
        "time": rfc3339(done.restored.timestamp_ms),
        "pages": done.restored.page_count,
        "page_size": done.restored.page_size.get(),
        "files": done.files,
        "bytes": done.bytes,
        "checksums": "every file's is right",
        "integrity_check": "ok",
        "restore_ms": done.restore_ms,
        "check_ms": done.check_ms,
    });
    print_value(&value, json)
}

/// Where databases are restored for practice; what is in it is nobody's.
pub(crate) fn scratch_dir(config: &Config) -> PathBuf {
    config.this_box.data.join(".drill")
}

/// Waits for a restore; a terminal is told how far it is.
async fn shown<T>(work: impl Future<Output = T>, progress: &Progress) -> T {
    let mut to = std::io::stderr();
    if !to.is_terminal() || !std::io::stdout().is_terminal() {
        return work.await;
    }
    let mut work = std::pin::pin!(work);
    let mut ticks = tokio::time::interval(PROGRESS_EVERY);
    loop {
        tokio::select! {
            done = &mut work => {
                // The line belongs to what is said next.
                drop(write!(to, "\r\x1b[K"));
                return done;
            }
            _ = ticks.tick() => {
                let (bytes, total) = progress.now();
                if let Some(percent) = bytes.saturating_mul(100).checked_div(total) {
                    drop(write!(to, "\r{percent:>3} % of {} KiB\x1b[K", total / 1024));
                    drop(to.flush());
                }
            }
        }
    }
}
