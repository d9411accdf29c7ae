//! `dormouse serve`: the activator itself.
//!
//! One loop owns the core, the wake table, the registry and the journal; everything slow runs in
//! tasks that come back as events. Start-up, in order: state directory locked, store probed
//! (one that is away is probed until it is back), link
//! and admin socket up, live proxies of an earlier activator moved to the new table, and only then
//! the first event, which stops what was left running.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use dormouse_core::event::HostSeed;
use dormouse_core::{Identity, Settings, TakeoverMode};
use dormouse_instances::{Containment, Leaf, Nursery, settle_in_leaf};
use dormouse_link::config::{Config, Span, Takeover, ThisBox};
use dormouse_link::socket::Listener;
use dormouse_link::table::{SLOTS_DEFAULT, TableId};
use dormouse_registry::Registry;
use dormouse_replica::watch::Watcher;
use nix::sys::stat::Mode;
use nix::unistd::User;
use tokio::sync::mpsc;

mod admin;
mod apart;
mod ask;
mod boot;
mod by_hand;
mod commands;
mod drill;
mod driver;
mod edge;
mod effects;
mod fdstore;
mod held;
mod history;
mod journal;
mod keeper;
mod link;
mod metrics;
mod notify;
mod outside;
mod owner;
pub(crate) mod paths;
mod pressure;
mod records;
mod refusals;
mod reload;
mod replica;
mod rules;
pub(crate) mod signals;
mod start;
mod store;
mod watched;

pub(crate) use commands::{HostStatus, Status};
pub(crate) use store::open_store;

use crate::{deadline, guard, kept, lock};
use driver::{Driver, Input};
use edge::Edge;
use history::History;
use journal::{Journal, Memory};
use paths::Paths;
use records::Records;

/// How long proxies of an earlier activator are waited for before anything is stopped.
const PROXIES_TIMEOUT: Duration = Duration::from_secs(10);

/// How long tasks that block may go on after the end.
const LAST_TASKS_TIMEOUT: Duration = Duration::from_secs(2);

/// Between looks at WAL files that no event announced.
const POLL: Duration = Duration::from_secs(2);

/// Runs until a signal ends it.
pub(crate) fn run(config: Config, path: PathBuf) -> anyhow::Result<()> {
    for warning in dormouse_link::config::warnings(&config) {
        tracing::warn!(warning, "the config");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("tokio's runtime")?;
    let ended = runtime.block_on(serve(Arc::new(config), path));
    // What still reads or writes a file is cut off, as by a crash: nothing depends on it.
    runtime.shutdown_timeout(LAST_TASKS_TIMEOUT);
    ended
}

async fn serve(config: Arc<Config>, config_path: PathBuf) -> anyhow::Result<()> {
    let Some(store_config) = &config.store else {
        bail!(
            "the config has no [store]: nothing can be managed; dormouse-proxy serves the plain \
             routes by itself"
        );
    };
    let paths = directories(&config)?;
    let _lock =
        lock::take(&paths.data().join("lock"), "another activator runs on this state directory")?;
    let store = store::known(store_config, &paths.data().join("store-id")).await?;
    let settings = settings(&config, identity(&config, paths.data())?);
    let (journal, memory) = Journal::open(&paths.data().join("journal"))?;
    let history = History::open(&paths.data().join("events.log"), settings.clone())
        .context("the event log")?;
    let registry = Registry::open(&paths.data().join("registry.db"))?;
    if signals::is_started_by_systemd() {
        settle_in_leaf(Leaf::Activator).context("a cgroup of our own")?;
    }
    let nursery = Nursery::open(paths.data()).context("containment of instances")?;
    watch_by_time(config.session.takeover, paths.run())?;
    if let Containment::Scan(reason) = nursery.containment() {
        tracing::warn!(reason, "no cgroups: instances are held together by a scan of /proc");
    }
    let name = &config.this_box.name;
    let edge = Edge::new(TableId(random_u64()?), SLOTS_DEFAULT, paths.run(), name)
        .context("the wake table")?;
    let (inputs, received) = mpsc::unbounded_channel();
    let admin = admin::start(&config.this_box.admin_socket(), inputs.clone())
        .context("the admin socket")?;
    let records = Records::new(store.clone(), store_config.prefix.clone());
    let parts = driver::Parts {
        config: Arc::clone(&config),
        config_path,
        settings,
        paths,
        store,
        prefix: store_config.prefix.clone(),
        records,
        registry,
        journal,
        history,
        nursery,
        edge,
        watcher: Watcher::start(POLL).context("inotify")?,
        rules: rules::Rules::of(&config.replica),
        fd_store: fdstore::FdStore::open(),
        drills: drill::Drills::open(&config.this_box.data.join("drills.json")),
        inputs: inputs.clone(),
    };
    let mut driver = Driver::new(parts, received)?;
    let seeds = driver.load()?;
    let listener = Listener::bind(&config.this_box.link_socket(), proxy_uids(&config.this_box))
        .context("the link's socket")?;
    set_mode(&config.this_box.link_socket(), 0o666)?; // Who may connect is checked by peer.
    let linked = inputs.clone();
    link::start(listener, move |event| linked.send(Input::Link(event)).is_ok())?;
    signals::listen(inputs)?;
    serve_hosts(driver, seeds, memory).await?;
    admin.abort();
    Ok(())
}

/// From the proxies' arrival to the end.
async fn serve_hosts(
    mut driver: Driver,
    seeds: Vec<HostSeed>,
    memory: Memory,
) -> anyhow::Result<()> {
    let early = driver.await_proxies(PROXIES_TIMEOUT).await;
    if driver.is_leaving() {
        return Ok(());
    }
    driver.boot(seeds, memory, random_text()?);
    for event in early {
        driver.on_link(event);
    }
    notify::ready(driver.parts.inputs.clone());
    let drilling = drill::start(&driver.parts);
    pressure::watch(&driver.parts.config.pressure, driver.parts.inputs.clone());
    driver.run().await;
    if driver.is_leaving() {
        // As a crash: what would be let go of properly is the next activator's to find.
        std::process::exit(0);
    }
    drilling.end().await;
    driver.parts.nursery.close();
    Ok(())
}

/// Made and opened to those who must pass.
fn directories(config: &Config) -> anyhow::Result<Paths> {
    let paths = Paths::of(&config.this_box);
    // What we make is ours alone, unless it says otherwise.
    nix::sys::stat::umask(Mode::from_bits_truncate(0o077));
    paths.make().context("the box's directories")?;
    if owner::are_own(&config.instances) {
        paths.let_pass()?;
    }
    Ok(paths)
}

/// What the mode of takeover asks of this machine before anything runs.
fn watch_by_time(takeover: Takeover, run: &Path) -> anyhow::Result<()> {
    match takeover {
        // One of an earlier config would have the guard end everything.
        Takeover::Manual => deadline::forget(run).context("the deadline of an earlier config"),
        Takeover::Automatic => {
            if !guard::runs(run) {
                tracing::warn!(
                    "no guard runs: an activator that hangs past its deadline leaves its instances \
                     running; start `dormouse guard`, or dormouse-guard.service"
                );
            }
            Ok(())
        }
    }
}

/// Who may connect to the link: the numbers of the config, and those of its names.
fn proxy_uids(this_box: &ThisBox) -> Vec<u32> {
    let mut uids = this_box.proxy_uids.clone();
    for name in &this_box.proxy_users {
        match User::from_name(name) {
            Ok(Some(user)) => uids.push(user.uid.as_raw()),
            Ok(None) => {
                tracing::warn!(user = name, "box.proxy_users: no such user on this machine");
            }
            Err(error) => tracing::warn!(user = name, %error, "box.proxy_users"),
        }
    }
    uids
}

fn set_mode(path: &Path, mode: u32) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .with_context(|| path.display().to_string())
}

fn identity(config: &Config, data: &Path) -> anyhow::Result<Identity> {
    Ok(Identity {
        name: config.this_box.name.as_str().into(),
        id: box_id(&data.join("box-id"))?.as_str().into(),
        boot_id: kept::boot_id().context("the boot id")?,
    })
}

fn write_durably(path: &Path, text: &str) -> anyhow::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = File::create(&fresh).with_context(|| fresh.display().to_string())?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&fresh, path).with_context(|| path.display().to_string())
}

/// Random, made with the state directory: a copy of the name with another id is another box.
fn box_id(path: &Path) -> anyhow::Result<String> {
    if let Ok(id) = fs::read_to_string(path) {
        let id = id.trim().to_owned();
        if id.is_empty() {
            bail!("{}: empty; move it away to become another box", path.display());
        }
        return Ok(id);
    }
    let id = random_text()?;
    write_durably(path, &id)?;
    Ok(id)
}

pub(crate) fn random_u64() -> anyhow::Result<u64> {
    getrandom::u64().map_err(|error| anyhow::anyhow!("the kernel gives no random bytes: {error}"))
}

fn random_text() -> anyhow::Result<String> {
    Ok(format!("{:016x}{:016x}", random_u64()?, random_u64()?))
}

fn settings(config: &Config, identity: Identity) -> Settings {
    let nanos = |span: Span| dormouse_core::time::Nanos(span.as_nanos());
    Settings {
        ttl: nanos(config.session.ttl),
        margin: nanos(config.session.margin),
        takeover: match config.session.takeover {
            Takeover::Manual => TakeoverMode::Manual,
            Takeover::Automatic => TakeoverMode::Automatic,
        },
        wake_budget: nanos(config.wake.budget),
        backoff: nanos(config.wake.backoff),
        backoff_max: nanos(config.wake.backoff_max),
        grace: nanos(config.sleep.grace),
        proof: nanos(config.sleep.proof),
        wakes_max: config.wake.at_a_time,
        pressure_high: config.pressure.high_percent.saturating_mul(10),
        pressure_low: config.pressure.low_percent.saturating_mul(10),
        ..Settings::new(identity)
    }
}
