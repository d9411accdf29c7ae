//! What a restore costs, beside stock Litestream: both read the same replica, one after the other,
//! on the same core, and make their file durable. Requests to an S3 server are counted by a proxy
//! before it, which adds no delay.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use dormouse_test_store::FaultProxy;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use nix::unistd::Pid;
use rusqlite::Connection;

use super::cores::{self, Cores};
use super::process::{clock, memory_mib};
use super::stores::{BUCKET, Remote, litestream_command, litestream_config};
use super::{Bench, Row, quantile};
use crate::shell::build;
use crate::tools;

const HOST: &str = "bench.test";
const ROUNDS: usize = 7;
/// Rows of about 1 KiB, four fifths of it random.
const ROWS_200MB: u32 = 180_000;
const ROWS_1MB: u32 = 900;
/// Commits of an awake host, each uploaded by itself.
const UPLOADS: u32 = 8;

/// All cases that are wanted.
pub(crate) fn run(bench: &Bench) -> Result<Vec<Row>> {
    let bin = build("release")?;
    let litestream = tools::program("DORMOUSE_LITESTREAM")?;
    let mut rows = Vec::new();
    if bench.wants("restore/200MB/dir") {
        let source = Source::new(&bin, "restore/200MB/dir", ROWS_200MB, None)?;
        rows.extend(source.measure(&bin, &litestream, bench)?);
    }
    let s3 = [("restore/200MB/s3", ROWS_200MB), ("restore/1MB/s3", ROWS_1MB)];
    for (case, count) in s3.into_iter().filter(|(case, _)| bench.wants(case)) {
        let remote = Remote::start()?;
        let source = Source::new(&bin, case, count, Some(&remote))?;
        rows.extend(source.measure(&bin, &litestream, bench)?);
    }
    Ok(rows)
}

/// A replica that is restored.
struct Source<'a> {
    case: &'static str,
    world: World,
    /// The server that it lies in, and what counts the requests; none: a directory.
    remote: Option<(&'a Remote, FaultProxy)>,
}

impl<'a> Source<'a> {
    /// A host with so many rows, slept into the store.
    fn new(bin: &Path, case: &'static str, rows: u32, remote: Option<&'a Remote>) -> Result<Self> {
        let mut plan = Plan { config: World::guestbook(bin, "fd"), ..Plan::default() };
        let remote = match remote {
            Some(remote) => Some((remote, remote.behind(Duration::ZERO)?)),
            None => None,
        };
        if let Some((remote, proxy)) = &remote {
            plan.store_section =
                Some(remote.server.section(&proxy.endpoint(), BUCKET, "dormouse")?);
        }
        let world = World::started(bin, &plan)?;
        world.add(HOST, "guestbook")?;
        let app = Connection::open(world.database(HOST))?;
        app.execute_batch(
            "PRAGMA journal_mode = wal; PRAGMA synchronous = off;
             CREATE TABLE bench (id INTEGER PRIMARY KEY, a, b)",
        )?;
        app.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
             INSERT INTO bench (a, b) SELECT randomblob(840), printf('%0240d', i) FROM n",
            [rows],
        )?;
        app.close().map_err(|(_, error)| error)?;
        world.sign(HOST, "one")?;
        sleep(&world)?;
        Ok(Self { case, world, remote })
    }

    /// Rounds of both, one after the other.
    fn measure(self, bin: &Path, litestream: &Path, bench: &Bench) -> Result<Vec<Row>> {
        let cores = Cores::choose()?;
        cores::pin(cores.proxy)?;
        let (mut ours, mut theirs, mut bare) = (Vec::new(), Vec::new(), Vec::new());
        let (mine, other) = (self.path("ours.db"), self.path("stock.db"));
        let mut stock = self.stock(litestream, &other)?;
        // Its memory is read while it runs, and it may end before its peak was seen: the largest.
        let mut idle = 0.0_f64;
        for _ in 0..bench.rounds(ROUNDS) {
            idle = idle.max(self.take(&mut self.dry_run(bin))?.rss_mib);
        }
        for _ in 0..bench.rounds(ROUNDS) {
            ours.push(self.take(&mut self.ours(bin, &mine))?);
            theirs.push(self.take(&mut stock)?);
            bare.push(self.copy(&mine)?);
            ensure!(fs::read(&mine)? == fs::read(&other)?, "the two restored different files");
            fs::remove_file(&mine)?;
            fs::remove_file(&other)?;
        }
        let mut rows = self.rows(&ours, &theirs);
        let over = median(&ours, |cost| cost.rss_mib) - idle;
        rows.push(self.row("rss_over_idle_mib", "MiB", over, None));
        rows.push(self.row("bare_copy_fsync_s", "s", quantile(&bare, 0.5), None));
        if let Some((_, proxy)) = &self.remote {
            rows.extend(self.wakes(bin, proxy)?);
        }
        self.world.stop()?;
        Ok(rows)
    }

    fn rows(&self, ours: &[Cost], theirs: &[Cost]) -> Vec<Row> {
        let both = |metric, unit, of: fn(&Cost) -> f64| {
            self.row(metric, unit, median(ours, of), Some(("litestream", median(theirs, of))))
        };
        let mut rows = vec![
            both("cpu_s", "s", |cost| cost.cpu_s),
            both("wall_s", "s", |cost| cost.wall_s),
            both("rss_mib", "MiB", |cost| cost.rss_mib),
        ];
        if self.remote.is_some() {
            rows.push(both("store_requests", "", |cost| cost.requests));
        }
        rows
    }

    /// What is read of the store when the local copy of a sleeping host is lost; and, once it is
    /// awake and has made some uploads, by a restore elsewhere.
    fn wakes(&self, bin: &Path, proxy: &FaultProxy) -> Result<Vec<Row>> {
        self.world.lose_copy(HOST)?;
        let before = reads(proxy);
        self.world.get(HOST, "/api/count")?;
        let woken = reads(proxy) - before;
        for n in 0..UPLOADS {
            let before = uploads(proxy);
            self.world.sign(HOST, &n.to_string())?;
            until(PATIENCE, "an upload", || Ok(uploads(proxy) > before))?;
        }
        let awake = self.take(&mut self.ours(bin, &self.path("awake.db")))?.requests;
        Ok(vec![
            self.row("wake_reads", "", woken, None),
            self.row("store_requests_awake", "", awake, None),
        ])
    }

    fn row(
        &self,
        metric: &str,
        unit: &'static str,
        ours: f64,
        peer: Option<(&'static str, f64)>,
    ) -> Row {
        Row { case: self.case.to_owned(), metric: metric.to_owned(), unit, ours, peer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.world.path(name)
    }

    fn dormouse(&self, bin: &Path) -> Command {
        let mut command = Command::new(bin.join("dormouse"));
        command.arg("--config").arg(self.world.config()).args(["restore", HOST]);
        command
    }

    fn dry_run(&self, bin: &Path) -> Command {
        let mut command = self.dormouse(bin);
        command.arg("--dry-run");
        command
    }

    fn ours(&self, bin: &Path, to: &Path) -> Command {
        let mut command = self.dormouse(bin);
        command.arg("--to").arg(to);
        command
    }

    fn stock(&self, litestream: &Path, to: &Path) -> Result<Command> {
        let mut command = litestream_command(litestream);
        command.args(["restore", "-o"]).arg(to);
        if let Some((_, proxy)) = &self.remote {
            let (database, prefix) = (self.path("any.db"), format!("dormouse/{HOST}"));
            let folder = self.world.folder();
            let config = litestream_config(folder, &database, &proxy.endpoint(), &prefix)?;
            command.arg("-config").arg(config).arg(database);
        } else {
            let replica = self.path("store/dormouse").join(HOST);
            command.arg(format!("file://{}", replica.display()));
        }
        Ok(command)
    }

    /// The same bytes by the system's own copy, made durable: seconds.
    fn copy(&self, from: &Path) -> Result<f64> {
        let to = self.path("copy.db");
        let begun = clock();
        fs::copy(from, &to)?;
        fs::File::open(&to)?.sync_all()?;
        let taken = begun.elapsed().as_secs_f64();
        fs::remove_file(to)?;
        Ok(taken)
    }

    /// Runs one restore to its end.
    fn take(&self, command: &mut Command) -> Result<Cost> {
        let asked = || self.remote.as_ref().map_or(0.0, |(_, proxy)| replica_requests(proxy));
        let before = asked();
        let cost = measure(command)?;
        Ok(Cost { requests: asked() - before, ..cost })
    }
}

fn sleep(world: &World) -> Result<()> {
    world.dormouse(&["sleep", HOST])?;
    world.wait_state(HOST, "asleep")
}

fn median(all: &[Cost], of: fn(&Cost) -> f64) -> f64 {
    quantile(&all.iter().map(of).collect::<Vec<_>>(), 0.5)
}

/// Requests until now, those for the box's own session left out.
fn replica_requests(proxy: &FaultProxy) -> f64 {
    count(proxy.requests().iter().filter(|line| !line.contains("/sessions/")))
}

/// GETs and lists of a host's files until now.
fn reads(proxy: &FaultProxy) -> f64 {
    let is_read = |line: &&String| line.starts_with("GET ") && !line.contains("/sessions/");
    count(proxy.requests().iter().filter(is_read))
}

/// Uploads of level 0 that were answered until now.
fn uploads(proxy: &FaultProxy) -> f64 {
    let is_upload = |line: &&String| line.starts_with("PUT ") && line.contains("/0000/");
    count(proxy.answered().iter().filter(is_upload))
}

fn count<'a>(lines: impl Iterator<Item = &'a String>) -> f64 {
    lines.fold(0.0, |sum, _| sum + 1.0)
}

/// What one restore took.
struct Cost {
    cpu_s: f64,
    wall_s: f64,
    rss_mib: f64,
    requests: f64,
}

fn measure(command: &mut Command) -> Result<Cost> {
    let before = children_cpu_s()?;
    let begun = clock();
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn()?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let mut rss_mib: f64 = 0.0;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        // The most it ever had, as long as it can be asked.
        rss_mib = memory_mib(pid, "VmHWM").map_or(rss_mib, |now| now.max(rss_mib));
        std::thread::park_timeout(Duration::from_millis(2));
    };
    let wall_s = begun.elapsed().as_secs_f64();
    ensure!(status.success(), "{command:?}: {status}");
    Ok(Cost { cpu_s: children_cpu_s()? - before, wall_s, rss_mib, requests: 0.0 })
}

/// Processor time of all children that have ended.
fn children_cpu_s() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let seconds = |time: TimeVal| {
        Duration::from_secs(u64::try_from(time.tv_sec()).unwrap_or(0)).as_secs_f64()
            + Duration::from_micros(u64::try_from(time.tv_usec()).unwrap_or(0)).as_secs_f64()
    };
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}
