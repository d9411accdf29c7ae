//! `cargo xtask sim`: many seeds, or one with its whole story.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Parser;
use dormouse_sim::explore::{BOUNDS, BREAKS, Bounds, Report, WIDE_BOUNDS, explore, found};
use dormouse_sim::sabotage::{SABOTAGES, Sabotage};
use dormouse_sim::story::Told;
use dormouse_sim::{Outcome, run};

/// Lines of the story that a failure shows.
const LINES: usize = 60;

/// Simulates boxes around the real core.
#[derive(Debug, Parser)]
struct Arguments {
    /// How many seeds, from 1.
    #[arg(long, default_value_t = 1000, conflicts_with = "seed")]
    seeds: u64,
    /// One seed, with its whole story.
    #[arg(long)]
    seed: Option<u64>,
    /// Instead of seeds: every schedule within bounds, of a small world with the same core.
    #[arg(long, conflicts_with_all = ["seed", "sabotage"])]
    explore: bool,
    /// The bounds that take longer.
    #[arg(long, requires = "explore")]
    wide: bool,
    /// States after which an exploration gives up.
    #[arg(long, default_value_t = 100_000_000, requires = "explore")]
    states: usize,
    /// Break one rule on purpose; the checkers must notice.
    #[arg(long, value_name = "NAME")]
    sabotage: Option<String>,
}

fn main() -> io::Result<ExitCode> {
    let arguments = Arguments::parse();
    let mut out = io::stdout().lock();
    let sabotage = match arguments.sabotage.as_deref().map(|name| (name, Sabotage::named(name))) {
        None => None,
        Some((_, Some(sabotage))) => Some(sabotage),
        Some((name, None)) => {
            let known: Vec<&str> = SABOTAGES.iter().map(|(_, name, _)| *name).collect();
            writeln!(out, "sim: no sabotage {name:?}; there are {}", known.join(", "))?;
            return Ok(ExitCode::from(2));
        }
    };
    // A panic of the core is reported as the violation that it is.
    std::panic::set_hook(Box::new(|_| {}));
    if arguments.explore {
        let bounds = if arguments.wide { &WIDE_BOUNDS } else { &BOUNDS };
        let explored = explore_all(&mut out, bounds, arguments.states)?;
        return if explored { find_breaks(&mut out) } else { Ok(ExitCode::FAILURE) };
    }
    if let Some(seed) = arguments.seed {
        let outcome = run(seed, sabotage, Told::All);
        return conclude(&mut out, seed, &outcome, 1);
    }
    let mut steps = 0;
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 1..=arguments.seeds {
        let outcome = run(seed, sabotage, Told::Nothing);
        if outcome.violation.is_some() {
            let told = run(seed, sabotage, Told::Last(LINES));
            return conclude(&mut out, seed, &told, seed);
        }
        steps += outcome.steps;
        for (name, count) in outcome.counts {
            *counts.entry(name).or_default() += count;
        }
    }
    writeln!(out, "{steps} steps, {counts:?}")?;
    writeln!(out, "sim: {} seeds clean", arguments.seeds)?;
    Ok(ExitCode::SUCCESS)
}

/// Each of the bounds, with its count of states.
fn explore_all(
    out: &mut impl io::Write,
    all: &[(&str, Bounds)],
    states_max: usize,
) -> io::Result<bool> {
    for (name, bounds) in all {
        let report = explore(&Bounds { states_max, ..*bounds });
        if let Some((what, way)) = &report.violation {
            writeln!(out, "explore: {name}: {what}, after {way:?}")?;
            return Ok(false);
        }
        let how = if report.complete { "complete" } else { "NOT complete" };
        let Report { states, moves, depth, .. } = report;
        writeln!(out, "explore: {name}: {states} states, {moves} moves, depth {depth}, {how}")?;
        out.flush()?;
        if !report.complete {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Each broken rule must be noticed.
fn find_breaks(out: &mut impl io::Write) -> io::Result<ExitCode> {
    for (sabotage, budget, invariants) in BREAKS {
        match found(sabotage, budget, invariants) {
            Ok(report) => {
                writeln!(out, "explore: {sabotage:?}: found in {} states", report.states)?;
            }
            Err(why) => {
                writeln!(out, "explore: {why}")?;
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn conclude(
    out: &mut impl io::Write,
    seed: u64,
    outcome: &Outcome,
    seeds: u64,
) -> io::Result<ExitCode> {
    for line in &outcome.story {
        writeln!(out, "{line}")?;
    }
    match &outcome.violation {
        None => {
            writeln!(out, "{} steps, {:?}", outcome.steps, outcome.counts)?;
            writeln!(out, "sim: {seeds} seeds clean")?;
            Ok(ExitCode::SUCCESS)
        }
        Some(violation) => {
            writeln!(out, "sim: seed {seed}, step {}: {}", violation.step, violation.message)?;
            Ok(ExitCode::FAILURE)
        }
    }
}
