//! Two hundred idle databases: requests, processor time and memory of whoever replicates them.
//!
//! Both replicators run at once and are idle at once. Requests are counted from the store's side:
//! what is opened, made or removed below the store's directory, the box's own session apart.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};
use nix::unistd::Pid;
use rusqlite::Connection;

use super::row;
use super::targets::Owned;
use crate::bench::cores::{self, Cores};
use crate::bench::process::{cpu_s, memory_mib};
use crate::bench::{Row, quantile};

pub(super) const CASE: &str = "replicate/idle-200";
const DATABASES: usize = 200;
const SLICES: u32 = 5;
const SLICE: Duration = Duration::from_secs(12); // × 5 = one minute
const SLICE_QUICK: Duration = Duration::from_secs(6);
/// Levels of the first uploads come to rest: Litestream's first two windows.
const SETTLE: Duration = Duration::from_secs(45);

pub(super) fn run(bin: &Path, litestream: &Path, cores: &Cores, quick: bool) -> Result<Vec<Row>> {
    cores::pin(cores.proxy)?;
    let plan = Plan { config: World::guestbook(bin, "fd"), ..Plan::default() };
    let world = World::started(bin, &plan)?;
    for n in 0..DATABASES {
        let host = format!("h{n}.test");
        world.add(&host, "guestbook")?;
        world.sign(&host, "one")?;
    }
    let folder = world.path("stock");
    let stock = stock(&folder, litestream)?;
    cores::pin(cores.load)?;
    let first = |n: usize| folder.join(format!("replica-{n}/ltx/0"));
    until(
        PATIENCE,
        "litestream's first uploads",
        || Ok((0..DATABASES).all(|n| first(n).is_dir())),
    )?;
    std::thread::park_timeout(SETTLE);
    let mut ours = Watched::new(world.activator_pid()?, vec![world.path("store/dormouse")])?;
    let replicas = (0..DATABASES).map(|n| folder.join(format!("replica-{n}"))).collect();
    let mut theirs = Watched::new(stock.pid()?, replicas)?;
    for _ in 0..SLICES {
        let slice = if quick { SLICE_QUICK } else { SLICE };
        let (mine, other) = (ours.begin()?, theirs.begin()?);
        std::thread::park_timeout(slice);
        ours.end(mine, slice)?;
        theirs.end(other, slice)?;
    }
    let rows = vec![
        row(CASE, "store_requests", "", ours.requests, ("litestream", theirs.requests)),
        row(CASE, "cpu_percent", "%", ours.cpu(), ("litestream", theirs.cpu())),
        row(CASE, "rss_mib", "MiB", ours.rss()?, ("litestream", theirs.rss()?)),
    ];
    drop(stock);
    world.stop()?;
    Ok(rows)
}

/// `litestream replicate` of as many databases with one row each.
fn stock(folder: &Path, litestream: &Path) -> Result<Owned> {
    fs::create_dir(folder)?;
    let mut config = "dbs:\n".to_owned();
    for n in 0..DATABASES {
        let database = folder.join(format!("{n}.db"));
        let app = Connection::open(&database)?;
        app.execute_batch(
            "PRAGMA journal_mode = wal; CREATE TABLE t (a); INSERT INTO t VALUES (randomblob(200))",
        )?;
        let (database, replica) = (database.display(), folder.join(format!("replica-{n}")));
        // Writing to a String cannot fail.
        writeln!(config, "  - path: {database}\n    replica:\n      type: file").ok();
        writeln!(config, "      path: {}", replica.display()).ok();
    }
    let path = folder.join("stock.yml");
    fs::write(&path, config)?;
    let child = Command::new(litestream)
        .args(["replicate", "-config"])
        .arg(path)
        .env_remove("AWS_CA_BUNDLE")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    Ok(Owned(child))
}

/// A replicator and the directories that are its store.
struct Watched {
    pid: Pid,
    inotify: Inotify,
    folders: BTreeMap<WatchDescriptor, PathBuf>,
    requests: f64,
    percents: Vec<f64>,
}

impl Watched {
    fn new(pid: Pid, roots: Vec<PathBuf>) -> Result<Self> {
        let inotify = Inotify::init()?;
        let mut watched =
            Self { pid, inotify, folders: BTreeMap::new(), requests: 0.0, percents: Vec::new() };
        for root in roots {
            watched.watch(&root)?;
        }
        Ok(watched)
    }

    fn watch(&mut self, folder: &Path) -> Result<()> {
        let mask = WatchMask::OPEN | WatchMask::CREATE | WatchMask::MOVED_TO | WatchMask::DELETE;
        let watch = self.inotify.watches().add(folder, mask)?;
        self.folders.insert(watch, folder.to_owned());
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() && !path.ends_with("sessions") {
                self.watch(&path)?;
            }
        }
        Ok(())
    }

    /// Drops what the watching itself has caused.
    fn begin(&mut self) -> Result<f64> {
        self.count()?;
        cpu_s(self.pid)
    }

    fn end(&mut self, before: f64, slice: Duration) -> Result<()> {
        let used = cpu_s(self.pid)? - before;
        self.percents.push(used / slice.as_secs_f64() * 100.0);
        self.requests += f64::from(self.count()?);
        Ok(())
    }

    /// Events since the last time.
    fn count(&mut self) -> Result<u32> {
        let mut count = 0_u32;
        let mut buffer = vec![0; 64 << 10];
        loop {
            match self.inotify.read_events(&mut buffer) {
                Ok(events) => {
                    for event in events {
                        let folder = self.folders.get(&event.wd);
                        let is_session = event.name.is_some_and(|name| name == "sessions")
                            || folder.is_some_and(|folder| folder.ends_with("sessions"));
                        let is_lost = event.mask.contains(EventMask::Q_OVERFLOW);
                        anyhow::ensure!(!is_lost, "more events than the kernel keeps");
                        count = count.saturating_add(u32::from(!is_session));
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(count),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn cpu(&self) -> f64 {
        quantile(&self.percents, 0.5)
    }

    fn rss(&self) -> Result<f64> {
        memory_mib(self.pid, "VmRSS")
    }
}
