//! Benchmarks side by side with a peer in the same run (DESIGN section 14).

use std::path::PathBuf;

use anyhow::{Result, bail};

/// Which benchmarks, and where the rows go.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// `wake`, `edge`.
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Fewer rounds, for a first look.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Where the JSON list of rows goes.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Runs the benchmarks in order.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    bail!("no benchmark {:?}; allowed: wake, edge", arguments.names)
}
