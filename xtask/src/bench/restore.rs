//! What a restore costs, beside stock Litestream: both read the same replica, one after the other,
//! on the same core, and make their file durable.
//!
//! `restore/200MB/s3` and `restore/1MB/s3` belong here once the S3 store is built: a `Source` each.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use dormouse_e2e::world::{Plan, World};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use nix::unistd::Pid;
use rusqlite::Connection;

use super::cores::{self, Cores};
use super::process::{clock, memory_mib};
use super::{Row, quantile};
use crate::shell::build;
use crate::tools;

const HOST: &str = "bench.test";
const CASE: &str = "restore/200MB/dir";
const ROUNDS: usize = 7;
const ROUNDS_QUICK: usize = 5;
/// Rows of about 1 KiB, four fifths of it random: 200 MB of pages.
const DATABASE_ROWS: u32 = 180_000;

/// All cases.
pub(crate) fn run(quick: bool) -> Result<Vec<Row>> {
    let bin = build("release")?;
    let litestream = tools::program("DORMOUSE_LITESTREAM")?;
    let source = Source::directory(&bin)?;
    let cores = Cores::choose()?;
    cores::pin(cores.proxy)?;
    let rounds = if quick { ROUNDS_QUICK } else { ROUNDS };
    let (mut ours, mut theirs, mut bare) = (Vec::new(), Vec::new(), Vec::new());
    let idle = measure(&mut source.dry_run(&bin))?.rss_mib;
    for _ in 0..rounds {
        let (mine, other) = (source.path("ours.db"), source.path("stock.db"));
        ours.push(measure(&mut source.ours(&bin, &mine))?);
        theirs.push(measure(&mut source.stock(&litestream, &other))?);
        bare.push(source.copy(&mine)?);
        ensure!(fs::read(&mine)? == fs::read(&other)?, "the two restored different files");
        fs::remove_file(mine)?;
        fs::remove_file(other)?;
    }
    let median =
        |all: &[Cost], of: fn(&Cost) -> f64| quantile(&all.iter().map(of).collect::<Vec<_>>(), 0.5);
    let row = |metric: &str, unit, ours, peer| Row {
        case: CASE.to_owned(),
        metric: metric.to_owned(),
        unit,
        ours,
        peer,
    };
    let both = |metric: &str, unit, of: fn(&Cost) -> f64| {
        row(metric, unit, median(&ours, of), Some(("litestream", median(&theirs, of))))
    };
    let rows = vec![
        both("cpu_s", "s", |cost| cost.cpu_s),
        both("wall_s", "s", |cost| cost.wall_s),
        both("rss_mib", "MiB", |cost| cost.rss_mib),
        row("rss_over_idle_mib", "MiB", median(&ours, |cost| cost.rss_mib) - idle, None),
        row("bare_copy_fsync_s", "s", quantile(&bare, 0.5), None),
    ];
    source.world.stop()?;
    Ok(rows)
}

/// A replica that is restored.
struct Source {
    world: World,
}

impl Source {
    /// A host with 200 MB, slept into a directory store.
    fn directory(bin: &Path) -> Result<Self> {
        let plan = Plan { config: World::guestbook(bin, "fd"), ..Plan::default() };
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
            [DATABASE_ROWS],
        )?;
        app.close().map_err(|(_, error)| error)?;
        world.sign(HOST, "one")?;
        world.dormouse(&["sleep", HOST])?;
        world.wait_state(HOST, "asleep")?;
        Ok(Self { world })
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

    fn stock(&self, litestream: &Path, to: &Path) -> Command {
        let replica = self.path("store/dormouse").join(HOST);
        let mut command = Command::new(litestream);
        command.args(["restore", "-o"]).arg(to).arg(format!("file://{}", replica.display()));
        command.env_remove("AWS_CA_BUNDLE");
        command
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
}

/// What one restore took.
struct Cost {
    cpu_s: f64,
    wall_s: f64,
    rss_mib: f64,
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
    Ok(Cost { cpu_s: children_cpu_s()? - before, wall_s, rss_mib })
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
