//! What replication costs, and how soon a commit is durable, beside stock Litestream and nothing.
//!
//! One writer commits to three databases in turn: of a host of a real activator, of a
//! `litestream replicate`, and of nobody. The replicating processes have one core, the writer the
//! other; while one is measured the other replicator is stopped. All on one disk, with the same
//! settings, and nothing that waits to be written from before.
//!
//! `replicate/latency-20ms` is a real S3 server behind a proxy that adds 20 ms a round trip; an
//! upload counts when its answer has passed the proxy.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::cores::{self, Cores};
use super::process::{bare_fsync_ms, clock, cpu_s, millis};
use super::stores::Remote;
use super::{Bench, Row, quantile};
use crate::shell::build;
use crate::tools;

mod idle;
mod targets;

use targets::{Target, Targets};

const LATENCY_DIR: &str = "replicate/latency-dir";
const LATENCY_20MS: &str = "replicate/latency-20ms";
const BUSY: &str = "replicate/20k-single";
const ROUNDS_LATENCY: usize = 7;
const ROUNDS_BUSY: usize = 9;
/// Rows of one busy round, each a transaction of its own.
const BUSY_ROWS: u32 = 20_000;
/// Commits of one round: fewer than the burst that a host may upload at once.
const COMMITS: u32 = 6;

/// A round trip to a store in the same country.
const ROUND_TRIP: Duration = Duration::from_millis(20);

/// All cases that are wanted.
pub(crate) fn run(bench: &Bench) -> Result<Vec<Row>> {
    let bin = build("release")?;
    let litestream = tools::program("DORMOUSE_LITESTREAM")?;
    let cores = Cores::choose()?;
    let mut rows = Vec::new();
    if bench.wants(LATENCY_DIR) || bench.wants(BUSY) {
        cores::pin(cores.proxy)?;
        let targets = Targets::start(&bin, &litestream)?;
        cores::pin(cores.load)?;
        if bench.wants(LATENCY_DIR) {
            rows.extend(latency(&targets, LATENCY_DIR, bench.rounds(ROUNDS_LATENCY))?);
            let bare = bare_fsync_ms(targets.folder())?;
            rows.push(alone(LATENCY_DIR, "bare_fsync_ms_p50", bare));
        }
        if bench.wants(BUSY) {
            rows.extend(busy(&targets, bench.rounds(ROUNDS_BUSY))?);
        }
        targets.stop()?;
    }
    if bench.wants(LATENCY_20MS) {
        cores::pin(cores.load)?;
        let remote = Remote::start()?;
        cores::pin(cores.proxy)?;
        let targets = Targets::start_remote(&bin, &litestream, &remote, ROUND_TRIP)?;
        cores::pin(cores.load)?;
        rows.extend(latency(&targets, LATENCY_20MS, bench.rounds(ROUNDS_LATENCY))?);
        let rtt = remote.bare_put_ms(ROUND_TRIP)?;
        rows.push(alone(LATENCY_20MS, "rtt", rtt));
        targets.stop()?;
    }
    if bench.wants(idle::CASE) {
        rows.extend(idle::run(&bin, &litestream, &cores, bench.quick)?);
    }
    Ok(rows)
}

fn alone(case: &str, metric: &str, ours: f64) -> Row {
    Row { case: case.to_owned(), metric: metric.to_owned(), unit: "ms", ours, peer: None }
}

fn row(case: &str, metric: &str, unit: &'static str, ours: f64, peer: (&'static str, f64)) -> Row {
    Row { case: case.to_owned(), metric: metric.to_owned(), unit, ours, peer: Some(peer) }
}

/// From the return of a commit to the end of its upload.
fn latency(targets: &Targets, case: &str, rounds: usize) -> Result<Vec<Row>> {
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
                while !target.is_durable(&next)? {
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
    Ok(rows)
}

/// Twenty thousand transactions as fast as they go.
fn busy(targets: &Targets, rounds: usize) -> Result<Vec<Row>> {
    let mut cpu = [Vec::new(), Vec::new()];
    let mut rate = [Vec::new(), Vec::new(), Vec::new()];
    // One round more, of which nothing is kept: files have their first length, caches are warm.
    for round in 0..=rounds {
        let mut order: Vec<_> = targets.all().into_iter().enumerate().collect();
        // Nobody always comes after the same other one.
        order.rotate_left(round % 3);
        for (index, target) in order {
            targets.only(target)?;
            target.settle()?;
            // What was written before is not written out at the expense of what is measured.
            nix::unistd::sync();
            let before = target.cpu()?;
            let begun = clock();
            target.insert(BUSY_ROWS)?;
            let taken = begun.elapsed().as_secs_f64();
            target.settle()?;
            if round == 0 {
                continue;
            }
            if let Some(rates) = rate.get_mut(index) {
                rates.push(f64::from(BUSY_ROWS) / taken);
            }
            if let Some(samples) = cpu.get_mut(index) {
                samples.push(target.cpu()? - before);
            }
        }
    }
    let median = |samples: &[f64]| quantile(samples, 0.5);
    let [our_cpu, their_cpu] = cpu;
    let [our_rate, their_rate, off_rate] = rate;
    Ok(vec![
        row(BUSY, "cpu_s", "s", median(&our_cpu), ("litestream", median(&their_cpu))),
        row(BUSY, "app_tx_per_s", "1/s", median(&our_rate), ("off", median(&off_rate))),
        row(BUSY, "app_tx_per_s", "1/s", median(&our_rate), ("litestream", median(&their_rate))),
    ])
}

impl Target {
    /// Processor time of whoever replicates it.
    fn cpu(&self) -> Result<f64> {
        self.pid.map_or(Ok(0.0), |pid| cpu_s(pid).context(self.name))
    }
}
