//! What replication costs, and how soon a commit is durable, beside stock Litestream and nothing.
//!
//! One writer commits to three databases in turn: of a host of a real activator, of a
//! `litestream replicate`, and of nobody. The replicating processes have one core, the writer the
//! other; while one is measured the other replicator is stopped. All on a disk.
//!
//! `replicate/latency-20ms` belongs here once a store with a round trip is built: a third
//! `Target` beside the two of `Targets::start`.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::cores::{self, Cores};
use super::process::{bare_fsync_ms, clock, cpu_s, millis};
use super::{Row, quantile};
use crate::shell::build;
use crate::tools;

mod idle;
mod targets;

use targets::{Target, Targets};

const ROUNDS_LATENCY: usize = 7;
const ROUNDS_BUSY: usize = 9;
const ROUNDS_QUICK: usize = 5;
/// Rows of one busy round, each a transaction of its own.
const BUSY_ROWS: u32 = 20_000;
/// Commits of one round: fewer than the burst that a host may upload at once.
const COMMITS: u32 = 6;

/// All cases.
pub(crate) fn run(quick: bool) -> Result<Vec<Row>> {
    let bin = build("release")?;
    let litestream = tools::program("DORMOUSE_LITESTREAM")?;
    let cores = Cores::choose()?;
    cores::pin(cores.proxy)?;
    let targets = Targets::start(&bin, &litestream)?;
    cores::pin(cores.load)?;
    let mut rows = latency(&targets, if quick { ROUNDS_QUICK } else { ROUNDS_LATENCY })?;
    rows.extend(busy(&targets, if quick { ROUNDS_QUICK } else { ROUNDS_BUSY })?);
    targets.stop()?;
    rows.extend(idle::run(&bin, &litestream, &cores, quick)?);
    Ok(rows)
}

fn row(case: &str, metric: &str, unit: &'static str, ours: f64, peer: (&'static str, f64)) -> Row {
    Row { case: case.to_owned(), metric: metric.to_owned(), unit, ours, peer: Some(peer) }
}

/// From the return of a commit to the file's name in the store.
fn latency(targets: &Targets, rounds: usize) -> Result<Vec<Row>> {
    let case = "replicate/latency-dir";
    let mut seen = [Vec::new(), Vec::new()];
    let both = [&targets.ours, &targets.litestream];
    for _ in 0..rounds {
        for (target, samples) in both.into_iter().zip(&mut seen) {
            targets.only(target)?;
            target.settle()?;
            for n in 0..COMMITS {
                let next = target.next_l0()?;
                // Not in step with whoever polls.
                std::thread::park_timeout(Duration::from_millis(u64::from(37 + 61 * n)));
                target.insert(1)?;
                let begun = clock();
                while !next.exists() {
                    std::thread::park_timeout(Duration::from_micros(100));
                    anyhow::ensure!(begun.elapsed() < Duration::from_secs(30), "{}", target.name);
                }
                samples.push(millis(begun));
            }
        }
    }
    let [ours, theirs] = seen;
    let mut rows = Vec::new();
    for (metric, share) in [("commit_to_durable_ms_p50", 0.5), ("commit_to_durable_ms_p99", 0.99)] {
        let peer = ("litestream", quantile(&theirs, share));
        rows.push(row(case, metric, "ms", quantile(&ours, share), peer));
    }
    rows.push(Row {
        case: case.to_owned(),
        metric: "bare_fsync_ms_p50".to_owned(),
        unit: "ms",
        ours: bare_fsync_ms(targets.folder())?,
        peer: None,
    });
    Ok(rows)
}

/// Twenty thousand transactions as fast as they go.
fn busy(targets: &Targets, rounds: usize) -> Result<Vec<Row>> {
    let case = "replicate/20k-single";
    let mut cpu = [Vec::new(), Vec::new()];
    let mut rate = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (index, target) in targets.all().into_iter().enumerate() {
            targets.only(target)?;
            target.settle()?;
            let before = target.cpu()?;
            let begun = clock();
            target.insert(BUSY_ROWS)?;
            let taken = begun.elapsed().as_secs_f64();
            if let Some(rates) = rate.get_mut(index) {
                rates.push(f64::from(BUSY_ROWS) / taken);
            }
            target.settle()?;
            if let Some(samples) = cpu.get_mut(index) {
                samples.push(target.cpu()? - before);
            }
        }
    }
    let median = |samples: &[f64]| quantile(samples, 0.5);
    let [our_cpu, their_cpu] = cpu;
    let [our_rate, their_rate, off_rate] = rate;
    Ok(vec![
        row(case, "cpu_s", "s", median(&our_cpu), ("litestream", median(&their_cpu))),
        row(case, "app_tx_per_s", "1/s", median(&our_rate), ("off", median(&off_rate))),
        row(case, "app_tx_per_s", "1/s", median(&our_rate), ("litestream", median(&their_rate))),
    ])
}

impl Target {
    /// Processor time of whoever replicates it.
    fn cpu(&self) -> Result<f64> {
        self.pid.map_or(Ok(0.0), |pid| cpu_s(pid).context(self.name))
    }
}
