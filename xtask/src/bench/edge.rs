//! What a request costs in the proxy, beside nginx, haproxy, and a relay on the same ring.
//!
//! All run at once, each on the same core, and one after the other is asked: ours, nginx, haproxy,
//! relay, ours on the other engine, and again. Clients and upstream have the other core. The rows
//! are of the engine that `auto` takes; the other one's figures are only printed.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::cores::{self, Cores};
use super::{Row, quantile};
use crate::shell::{cargo, run as run_command};
use crate::tools;

mod load;
mod peers;
mod upstream;

use load::Load;
use peers::{Place, Target};
use upstream::Upstream;

const HOST: &str = "bench.test";
const OURS: &str = "ours";
const OTHER_ENGINE: &str = "ours on epoll";

const ROUNDS: usize = 7;
const ROUNDS_QUICK: usize = 3;
/// Before each span that is measured: connections are made, buffers and pools have grown.
const WARM: Duration = Duration::from_millis(300);
const SPAN: Duration = Duration::from_secs(3);
const SPAN_QUICK: Duration = Duration::from_millis(1500);

/// One kind of load.
struct Case {
    name: &'static str,
    connections: u16,
    size: u32,
    /// Requests come at half the rate that ours reached in the first case.
    is_paced: bool,
}

const CASES: [Case; 4] = [
    Case { name: "edge/c64/512B", connections: 64, size: 512, is_paced: false },
    Case { name: "edge/c1/512B", connections: 1, size: 512, is_paced: false },
    Case { name: "edge/c64/64KiB", connections: 64, size: 64 * 1024, is_paced: false },
    Case { name: "edge/rate-half/512B", connections: 64, size: 512, is_paced: true },
];

const METRICS: [(&str, &str); 5] = [
    ("cpu_us_per_request", "us"),
    ("requests_per_s", "1/s"),
    ("busy_percent", "%"),
    ("p50_us", "us"),
    ("p99_us", "us"),
];

/// Figures of one span, in the order of [`METRICS`].
type Figures = [f64; METRICS.len()];

/// All cases.
pub(crate) fn run(quick: bool) -> Result<Vec<Row>> {
    tools::for_benches()?;
    let build = ["build", "--quiet", "--release", "-p", "dormouse-proxy", "--bins"];
    run_command(&mut cargo(&build))?;
    let build = ["build", "--quiet", "--release", "-p", "dormouse-ring", "--example", "relay"];
    run_command(&mut cargo(&build))?;
    let dir = tempfile::Builder::new().prefix("dm.").tempdir()?;
    let socket = dir.path().join("app.sock");
    let cores = Cores::choose()?;
    let _upstream = Upstream::start(&socket, cores.load)?;
    cores::pin(cores.proxy)?;
    let targets = start(&Place { dir: dir.path(), upstream: &socket })?;
    cores::pin(cores.load)?;
    let (rounds, span) = if quick { (ROUNDS_QUICK, SPAN_QUICK) } else { (ROUNDS, SPAN) };
    let mut rows = Vec::new();
    let mut half = None;
    for case in &CASES {
        let rate = if case.is_paced { half } else { None };
        let medians = measure(case, &targets, rounds, span, rate)?;
        if let Some([_, reached, ..]) = medians.get(OURS) {
            half = half.or(Some(reached / 2.0));
        }
        rows.extend(rows_of(case, &medians));
    }
    Ok(rows)
}

/// Starts all that are measured.
fn start(place: &Place<'_>) -> Result<Vec<Target>> {
    let (ours, engine) = place.ours(OURS, "auto")?;
    let mut targets = vec![ours, place.nginx()?, place.haproxy()?, place.relay(&engine)?];
    println!("edge: auto takes {engine}");
    if engine != "epoll" {
        targets.push(place.ours(OTHER_ENGINE, "epoll")?.0);
    }
    Ok(targets)
}

/// The medians of all rounds, by target.
fn measure(
    case: &Case,
    targets: &[Target],
    rounds: usize,
    span: Duration,
    rate: Option<f64>,
) -> Result<BTreeMap<&'static str, Figures>> {
    let mut seen: BTreeMap<&'static str, Vec<Figures>> = BTreeMap::new();
    for _ in 0..rounds {
        for target in targets {
            let figures = once(case, target, span, rate)
                .with_context(|| format!("{} with {}", case.name, target.name))?;
            seen.entry(target.name).or_default().push(figures);
        }
    }
    let median = |all: &Vec<Figures>| {
        std::array::from_fn(|index| {
            let column: Vec<f64> = all.iter().filter_map(|one| one.get(index).copied()).collect();
            quantile(&column, 0.5)
        })
    };
    Ok(seen.iter().map(|(name, all)| (*name, median(all))).collect())
}

fn once(case: &Case, target: &Target, span: Duration, rate: Option<f64>) -> Result<Figures> {
    let mut load = Load::connect(target.address, case.connections, case.size)?;
    load.run(WARM, rate)?;
    let before = target.cpu()?;
    let tally = load.run(span, rate)?;
    let cpu = target.cpu()?.saturating_sub(before).as_secs_f64();
    let elapsed = tally.elapsed.as_secs_f64();
    Ok([
        cpu * 1e6 / tally.requests(),
        tally.requests() / elapsed,
        cpu / elapsed * 100.0,
        quantile(&tally.latencies_us, 0.5),
        quantile(&tally.latencies_us, 0.99),
    ])
}

/// A row for each metric and peer; the other engine's figures go to the screen alone.
fn rows_of(case: &Case, medians: &BTreeMap<&'static str, Figures>) -> Vec<Row> {
    let mut rows = Vec::new();
    let figure = |name: &str, index: usize| {
        medians.get(name).and_then(|figures| figures.get(index).copied()).unwrap_or(f64::NAN)
    };
    for (index, (metric, unit)) in METRICS.into_iter().enumerate() {
        let row = |name: &str, ours, peer| Row {
            case: name.to_owned(),
            metric: metric.to_owned(),
            unit,
            ours,
            peer,
        };
        let ours = figure(OURS, index);
        for peer in ["nginx", "haproxy", "relay"] {
            rows.push(row(case.name, ours, Some((peer, figure(peer, index)))));
        }
        if medians.contains_key(OTHER_ENGINE) {
            row(&format!("{} on epoll", case.name), figure(OTHER_ENGINE, index), None).show();
        }
    }
    rows
}
