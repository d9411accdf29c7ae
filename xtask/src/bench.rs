//! Benchmarks side by side with a peer in the same run (DESIGN section 14).
//!
//! Every bench interleaves its rounds (ours, theirs, ours, theirs) and reports medians; the rows go
//! to a JSON list whose shape never changes.

use std::path::PathBuf;

use anyhow::{Result, bail};
use serde_json::Value;

mod cores;
mod edge;
mod process;
mod replicate;
mod restore;
mod stores;
mod wake;

/// Their names begin with that of their benchmark; what `--only` is held against.
const CASES: [&str; 13] = [
    "edge/c64/512B",
    "edge/c1/512B",
    "edge/c64/64KiB",
    "edge/rate-half/512B",
    "replicate/20k-single",
    "replicate/idle-200",
    "replicate/latency-20ms",
    "replicate/latency-dir",
    "restore/1MB/s3",
    "restore/200MB/dir",
    "restore/200MB/s3",
    "wake/dir",
    "wake/frozen",
];

/// Which benchmarks, and where the rows go.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// `wake`, `edge`, `replicate`, `restore`.
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Fewer rounds, for a first look.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Only cases whose names begin so, as `replicate/idle`.
    #[arg(long, value_name = "CASE")]
    pub(crate) only: Option<String>,
    /// Where the JSON list of rows goes.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// How it is measured.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) quick: bool,
    only: Option<String>,
}

impl Bench {
    /// Rounds of a quick run, the fewest whose median means something.
    const ROUNDS_QUICK: usize = 5;

    fn wants(&self, case: &str) -> bool {
        self.only.as_ref().is_none_or(|only| case.starts_with(only.as_str()))
    }

    const fn rounds(&self, whole: usize) -> usize {
        if self.quick { Self::ROUNDS_QUICK } else { whole }
    }
}

/// One figure.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) case: String,
    pub(crate) metric: String,
    pub(crate) unit: &'static str,
    pub(crate) ours: f64,
    /// The peer and its figure, where there is one.
    pub(crate) peer: Option<(&'static str, f64)>,
}

impl Row {
    fn json(&self) -> Value {
        let ratio = self.peer.map(|(_, theirs)| self.ours / theirs);
        serde_json::json!({
            "case": self.case,
            "metric": self.metric,
            "unit": self.unit,
            "ours": self.ours,
            "peer": self.peer.map(|(name, _)| name),
            "theirs": self.peer.map(|(_, theirs)| theirs),
            "ratio": ratio,
        })
    }

    fn show(&self) {
        let Self { case, metric, unit, ours, peer } = self;
        match peer {
            None => println!("{case:<28} {metric:<24} {ours:>10.3} {unit}"),
            Some((name, theirs)) => {
                let ratio = ours / theirs;
                println!(
                    "{case:<28} {metric:<24} {ours:>10.3} {unit:<6} {name} {theirs:.3} ratio {ratio:.2}"
                );
            }
        }
    }
}

/// Runs the benchmarks in order.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let bench = Bench { quick: arguments.quick, only: arguments.only.clone() };
    let named = |case: &&str| arguments.names.iter().any(|name| case.starts_with(name.as_str()));
    let cases: Vec<&str> = CASES.into_iter().filter(named).collect();
    if !cases.is_empty() && !cases.iter().any(|case| bench.wants(case)) {
        let only = arguments.only.as_deref().unwrap_or_default();
        bail!("no case begins with {only:?}; there are {}", cases.join(", "));
    }
    let mut rows = Vec::new();
    for name in &arguments.names {
        rows.extend(match name.as_str() {
            "edge" => edge::run(arguments.quick)?,
            "replicate" => replicate::run(&bench)?,
            "restore" => restore::run(&bench)?,
            "wake" => wake::run(&bench)?,
            _ => bail!("no benchmark {name:?}; allowed: wake, edge, replicate, restore"),
        });
    }
    rows.retain(|row| bench.wants(&row.case));
    rows.iter().for_each(Row::show);
    if let Some(file) = &arguments.json {
        let list = Value::Array(rows.iter().map(Row::json).collect());
        std::fs::write(file, serde_json::to_vec_pretty(&list)?)?;
    }
    Ok(())
}

/// The value below which that share of the samples lies.
pub(crate) fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index into a few thousand samples"
    )]
    let index = ((sorted.len().saturating_sub(1)) as f64 * share).round() as usize;
    sorted.get(index).copied().unwrap_or(f64::NAN)
}
