//! The project's own commands. `cargo xtask help` lists them.
#![expect(clippy::print_stdout, reason = "these commands speak to people")]

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod check;
mod demo;
mod replay;
mod shell;
mod sim;
mod test;
mod tidy;
mod tools;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Dormouse's own commands")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Three guestbooks to play with; with --check the whole story by itself.
    Demo {
        /// Run the story, check each step, and end.
        #[arg(long)]
        check: bool,
    },
    /// Everything that CI runs.
    Test,
    /// The Debian package, in `target/dist`.
    Dist,
    /// Format, lints, tidy, licences, the bounded model check of the wake table.
    Check,
    /// The rules that no compiler checks: sizes, dependency edges, words, invariants.
    Tidy,
    /// The simulation.
    Sim(sim::Arguments),
    /// Replays an event log through the core.
    Replay {
        /// An `events.log` of an activator.
        file: std::path::PathBuf,
    },
    /// Benchmarks against peers in the same run.
    Bench(bench::Arguments),
    /// Long repetitions: `loom` (the exhaustive model check), `sim`, `explore`, `kill`, `outage`.
    Soak(test::SoakArguments),
}

fn dist() -> anyhow::Result<()> {
    let bin = shell::build("release")?;
    let file = dormouse_e2e::package::build(&shell::root(), &bin, &shell::binaries("dist"))?;
    println!("dist: {}", file.display());
    Ok(())
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Demo { check: false } => demo::play(),
        Command::Demo { check: true } => demo::check(),
        Command::Test => test::run(),
        Command::Dist => dist(),
        Command::Check => check::run(),
        Command::Tidy => tidy::run(),
        Command::Sim(arguments) => sim::run(&arguments),
        Command::Replay { file } => replay::run(&file),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Soak(arguments) => test::soak(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
