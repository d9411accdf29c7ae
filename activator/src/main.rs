//! The activator, and the command line that talks to it.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use dormouse_link::config::Config;

mod cli;
mod cost;
mod deadline;
mod guard;
mod http;
mod kept;
mod lock;
mod restore;
mod serve;

/// Runs many small apps, and only those that someone is talking to.
#[derive(Debug, Parser)]
#[command(name = "dormouse", version, about)]
struct Arguments {
    /// The config file.
    #[arg(long, global = true, value_name = "FILE", default_value = "/etc/dormouse/dormouse.toml")]
    config: PathBuf,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the activator.
    Serve,
    /// Kill the instances at the session's deadline when the activator does not; a process of its own.
    Guard {
        /// Only free the cgroup for the next start, after the guard has ended (`ExecStopPost=`): until then
        /// the limits of instances are not enforced.
        #[arg(long)]
        let_go: bool,
    },
    /// Serve a host by an app of the config.
    Add {
        /// The host's name.
        host: String,
        /// The app's name in the config.
        #[arg(long)]
        app: String,
    },
    /// Put a host to sleep, give its lease back, and forget its route; its data stays.
    Rm {
        /// The host's name.
        host: String,
    },
    /// List the hosts.
    List,
    /// Show this box, or one host.
    Status {
        /// The host's name.
        host: Option<String>,
        /// What the store was asked since the activator's start, by host and operation.
        #[arg(long)]
        cost: bool,
    },
    /// Wake a host, and wait until it is awake; ends with an error and the reason when it is not woken.
    Wake {
        /// The host's name.
        host: String,
    },
    /// Put a host to sleep now, whatever is in flight, and wait until it is asleep; an error when it is
    /// on another box, or outside.
    Sleep {
        /// The host's name.
        host: String,
        /// Only begin it.
        #[arg(long)]
        no_wait: bool,
    },
    /// Wait until a host is in a state.
    Wait {
        /// The host's name.
        host: String,
        /// awake, asleep, backoff, unproven, … as `status` shows it.
        #[arg(long)]
        state: String,
        /// Give up after this many seconds.
        #[arg(long, default_value_t = 60)]
        timeout_s: u64,
    },
    /// Restore a host's database from the store into a file; needs no running activator.
    #[command(
        override_usage = "dormouse restore [OPTIONS] (--to <FILE> | --dry-run) [--at <TIME> | --txid <TXID>] <HOST>"
    )]
    Restore {
        /// The host's name.
        host: String,
        /// The file to write; it must not exist.
        #[arg(long, value_name = "FILE", required_unless_present = "dry_run")]
        to: Option<PathBuf>,
        /// Only show what would be read, and what would be reached.
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        from: From,
    },
    /// Restore a host's database into a scratch file and check it: every checksum, and `SQLite`'s
    /// own integrity check.
    ///
    /// Exit codes: 0 it is good; 3 it is NOT good; 1 it could not be verified (the store is away, the
    /// scratch disk is full, nothing is there, …): it may be good.
    Verify {
        /// The host's name.
        host: String,
        #[command(flatten)]
        from: From,
    },
    /// Hand a host to an outside supervisor, or take it back.
    #[command(group(clap::ArgGroup::new("way").required(true).args(["off", "on"])))]
    Hibernate {
        /// The host's name.
        host: String,
        /// Put it to sleep, upload everything, and let no box wake it: an outside supervisor runs
        /// it from now on, on this box's file.
        #[arg(long)]
        off: bool,
        /// Take it back: this box's file is the truth, and is uploaded whole. The outside
        /// supervisor must have stopped it.
        #[arg(long)]
        on: bool,
    },
    /// Say that a box is gone for good, so that its hosts can be taken.
    Takeover {
        /// The box's name.
        #[arg(value_name = "BOX")]
        name: String,
    },
    /// Have the running activator read the config again: apps, idle times, limits. Cuts nothing.
    ///
    /// A config with an error changes nothing. What needs a restart is told by name. The proxy reads
    /// its own part at SIGHUP (`systemctl reload dormouse-proxy`).
    Reload,
    /// Work on the config file.
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
}

/// Which state of a database.
#[derive(Debug, clap::Args)]
struct From {
    /// Exactly this TXID, instead of the newest.
    #[arg(long, conflicts_with = "at")]
    txid: Option<u64>,
    /// The state at this time: RFC 3339 (2026-12-01T09:22:47Z), or Unix seconds.
    #[arg(long, value_name = "TIME")]
    at: Option<Moment>,
}

/// The end of the year 9999.
const SECONDS_MAX: i64 = 253_402_300_799;

/// A point in time, milliseconds since 1970.
#[derive(Clone, Copy, Debug)]
struct Moment(i64);

impl std::str::FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let seconds = text.parse::<i64>().ok();
        if seconds.is_some_and(|seconds| seconds > SECONDS_MAX) {
            return Err("Unix seconds after the year 9999: are these milliseconds?".to_owned());
        }
        let millis = seconds.and_then(|seconds| seconds.checked_mul(1000));
        millis.or_else(|| dormouse_replica::put::parse_rfc3339(text)).map(Self).ok_or_else(|| {
            "not a time; allowed: RFC 3339 with a zone, as 2026-12-01T09:22:47Z, or Unix seconds"
                .to_owned()
        })
    }
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Check it, and show it with all defaults.
    Check,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments) {
        Ok(code) => code,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "the command line speaks here")]
            {
                eprintln!("dormouse: {}", dormouse_link::told(error.chain()));
            }
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let config = Config::load(&arguments.config)?;
    if matches!(arguments.command, Command::Serve) {
        log_to_stderr();
        serve::run(config, arguments.config)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Command::Guard { let_go } = arguments.command {
        log_to_stderr();
        if let_go {
            guard::let_go(&config)?;
        } else {
            guard::run(&config)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("tokio's runtime")?;
    runtime.block_on(cli::run(config, arguments.command, arguments.json))
}

/// Filtered by `DORMOUSE_LOG` (default `info`); JSON where `DORMOUSE_LOG_FORMAT=json`.
fn log_to_stderr() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("DORMOUSE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        // A log that nobody can read any more is no reason to stop.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    if std::env::var("DORMOUSE_LOG_FORMAT").is_ok_and(|format| format == "json") {
        log.json().init();
    } else {
        log.init();
    }
}
