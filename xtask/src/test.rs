//! Everything that CI runs, counted: the last line is `N passed, N failed`.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::shell::{build, cargo, run as run_command};
use crate::{check, demo, sim, tools};

/// Long repetitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Soak {
    /// The wake table's model check without a bound.
    Loom,
    /// The simulation with many seeds.
    Sim,
    /// The exhaustive exploration within wide bounds.
    Explore,
    /// Kills under write load.
    Kill,
    /// Two minutes without a store, under writes.
    Outage,
    /// Activators that are suspended past their deadline.
    Guard,
    /// Stops of an app that ignores them.
    Stop,
}

/// Which long repetition, and how long.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SoakArguments {
    /// Which one.
    name: Soak,
    /// `kill` on SeaweedFS instead of a directory.
    #[arg(long)]
    s3: bool,
    /// Seed of `kill` and `guard`.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Rounds: 200 of `kill`, 100 of `stop`, 50 of `guard`, unless told otherwise.
    #[arg(long)]
    rounds: Option<u32>,
    /// Seeds of `sim`.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
}

/// Runs one long repetition.
pub(crate) fn soak(arguments: &SoakArguments) -> Result<()> {
    match arguments.name {
        Soak::Loom => check::model(None),
        Soak::Kill => {
            let weed = arguments.s3.then(|| tools::program("DORMOUSE_WEED")).transpose()?;
            let bin = build("release")?;
            let report = dormouse_e2e::kills::rounds(
                &bin,
                weed.as_deref(),
                arguments.rounds.unwrap_or(200),
                arguments.seed,
            )?;
            println!("soak: {report:?}");
            Ok(())
        }
        Soak::Stop => {
            let rounds = arguments.rounds.unwrap_or(100);
            let report = dormouse_e2e::stubborn::rounds(&build("release")?, rounds)?;
            println!("soak: {report:?}");
            Ok(())
        }
        Soak::Guard => {
            let rounds = arguments.rounds.unwrap_or(50);
            let bin = build("release")?;
            let report = dormouse_e2e::suspended::rounds(&bin, rounds, arguments.seed)?;
            println!("soak: {report:?}");
            Ok(())
        }
        Soak::Outage => {
            let weed = tools::program("DORMOUSE_WEED")?;
            let two_minutes = Duration::from_mins(2);
            let report = dormouse_e2e::outage::run(&build("release")?, &weed, two_minutes)?;
            println!("soak: {report:?}");
            Ok(())
        }
        Soak::Sim => {
            sim::run(&sim::Arguments { seeds: arguments.seeds, ..sim::Arguments::default() })
        }
        Soak::Explore => {
            let wide = sim::Arguments { explore: true, wide: true, ..Default::default() };
            sim::run(&wide)
        }
    }
}

/// What passed and what failed.
#[derive(Debug, Default)]
struct Tally {
    passed: u64,
    failed: u64,
    failures: Vec<String>,
}

impl Tally {
    fn part(&mut self, name: &str, result: &Result<()>) {
        match result {
            Ok(()) => {
                println!("test: {name}: good");
                self.passed += 1;
            }
            Err(error) => {
                println!("test: {name}: {error:#}");
                self.failed += 1;
                self.failures.push(name.to_owned());
            }
        }
    }
}

/// `cargo xtask test`.
pub(crate) fn run() -> Result<()> {
    tools::for_tests()?;
    let mut tally = Tally::default();
    for (name, result) in check::run_all() {
        tally.part(name, &result);
    }
    tally.part("programs", &build("dev").map(drop));
    let suites = suites(&mut tally);
    tally.part("suites", &suites);
    let seeds = sim::Arguments { seeds: 1000, ..Default::default() };
    tally.part("simulation, 1000 seeds", &sim::run(&seeds));
    let small = sim::Arguments { explore: true, ..Default::default() };
    tally.part("every schedule of a small world", &sim::run(&small));
    tally.part("demo", &demo::check());
    for failure in &tally.failures {
        println!("test: failed: {failure}");
    }
    println!("{} passed, {} failed", tally.passed, tally.failed);
    if tally.failed > 0 {
        bail!("something failed");
    }
    Ok(())
}

/// Every test of the workspace, its outcome lines counted.
fn suites(tally: &mut Tally) -> Result<()> {
    let programs = tools::variables()?;
    let mut command = cargo(&["test", "--workspace", "--locked", "--no-fail-fast"]);
    command.envs(programs);
    run_command(&mut cargo(&["test", "--quiet", "--workspace", "--locked", "--no-run"]))?;
    count(&mut command, tally)
}

/// Streams a test run's output and reads libtest's closing lines.
fn count(command: &mut Command, tally: &mut Tally) -> Result<()> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.take().context("a pipe")?;
    let mut closing_lines = 0;
    for line in BufReader::new(output).lines() {
        let line = line?;
        println!("{line}");
        let Some(counts) = line.strip_prefix("test result: ") else { continue };
        closing_lines += 1;
        tally.passed += counted(counts, "passed").unwrap_or(0);
        tally.failed += counted(counts, "failed").unwrap_or(0);
        // A test that was left out is not one that passed.
        if counted(counts, "ignored").is_none_or(|ignored| ignored > 0) {
            bail!("a test is ignored: {line}");
        }
    }
    let status = child.wait()?;
    if closing_lines == 0 {
        bail!("no suite ran");
    }
    if !status.success() {
        bail!("a suite failed: {status}");
    }
    Ok(())
}

fn counted(counts: &str, what: &str) -> Option<u64> {
    let before = counts.split(what).next()?;
    before.split_whitespace().next_back()?.parse().ok()
}
