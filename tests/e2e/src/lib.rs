//! What end-to-end tests share: the programs under test, and the peers they are tested with.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

pub mod client;
pub mod dice;
pub mod edge;
pub mod edge_backend;
pub mod edge_cases;
pub mod edge_peer;
pub mod kills;
pub mod load;
pub mod outage;
pub mod package;
pub mod stubborn;
pub mod suspended;
pub mod systemd;
pub mod wait;
pub mod world;

/// A program of this workspace, from the target directory that the running test was built in.
pub fn binary(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe().context("where this test lies")?;
    let profile = test.parent().and_then(|deps| deps.parent()).context("a target directory")?;
    let path = profile.join(name);
    if !path.is_file() {
        bail!(
            "{} is not built; build it first: cargo build -p {name} (with this test's profile)",
            path.display()
        );
    }
    Ok(path)
}

/// The folder of the programs that a box runs: proxy, activator and guestbook.
pub fn programs() -> Result<PathBuf> {
    binary("dormouse-proxy")?;
    binary("guestbook")?;
    Ok(binary("dormouse")?.parent().map(Path::to_owned).unwrap_or_default())
}
