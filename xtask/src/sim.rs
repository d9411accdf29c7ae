//! The simulation, built with release speed and every assert on.

use anyhow::Result;

use crate::shell::cargo;

/// Which seeds, or the exploration.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Arguments {
    /// How many seeds, from 1.
    #[arg(long, default_value_t = 1000, conflicts_with = "seed")]
    pub(crate) seeds: u64,
    /// One seed, with its whole story.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Instead of seeds: every schedule within bounds, of a small world with the same core.
    #[arg(long, conflicts_with_all = ["seed", "sabotage"])]
    pub(crate) explore: bool,
    /// The bounds that take longer.
    #[arg(long, requires = "explore")]
    pub(crate) wide: bool,
    /// Break one rule on purpose; the checkers must notice.
    #[arg(long, value_name = "NAME")]
    pub(crate) sabotage: Option<String>,
}

/// Runs the simulator.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut command = cargo(&["run", "--quiet", "--profile", "sim", "-p", "dormouse-sim", "--"]);
    match arguments.seed {
        _ if arguments.wide => command.args(["--explore", "--wide"]),
        _ if arguments.explore => command.arg("--explore"),
        Some(seed) => command.args(["--seed", &seed.to_string()]),
        None => command.args(["--seeds", &arguments.seeds.to_string()]),
    };
    if let Some(sabotage) = &arguments.sabotage {
        command.args(["--sabotage", sabotage]);
    }
    crate::shell::run(&mut command)
}
