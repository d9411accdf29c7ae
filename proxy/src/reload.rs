//! SIGHUP: the config is read again, for what comes from now on; nothing is cut.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use dormouse_link::config::{Config, changes};
use libsystemd::daemon::NotifyState;
use tokio::sync::mpsc::UnboundedSender;
use tracing::{error, info, warn};

use crate::delta::ToLoop;
use crate::settings::Settings;

/// Taken over at once; the activator tells the rest of `edge.limits`, which is a host's.
const LIVE: [&str; 3] = ["route", "edge.trusted_proxies", "edge.limits"];
/// What a proxy takes at its start and keeps.
const FIXED: [&str; 6] = [
    "edge.listen",
    "edge.loops",
    "edge.engine",
    "edge.drain",
    "edge.limits.connections",
    "box.run",
];

/// What a proxy reads again.
pub(crate) struct Reload {
    pub(crate) path: PathBuf,
    /// As it was taken over last; what is fixed, as it was at the start.
    pub(crate) config: Config,
    pub(crate) loops: Vec<UnboundedSender<ToLoop>>,
}

impl Reload {
    /// A config with an error changes nothing.
    pub(crate) fn run(&mut self) {
        if let Err(error) = self.try_run() {
            let error = format!("{error:#}");
            error!(error, "the config was not read again: everything is as it was");
        }
    }

    fn try_run(&mut self) -> Result<()> {
        let mut config = Config::load(&self.path)?;
        let mut settings = Settings::read(&config, &self.path)?;
        let changed = changes(&self.config, &config);
        let is_managed = self.config.store.is_some();
        let is_fixed = |key: &&String| {
            (key.starts_with("store") && config.store.is_some() != is_managed)
                || FIXED.iter().any(|fixed| covers(fixed, key))
        };
        let fixed: Vec<&String> = changed.iter().filter(is_fixed).collect();
        let live: Vec<&String> = changed
            .iter()
            .filter(|key| !fixed.contains(key) && LIVE.iter().any(|live| covers(live, key)))
            .collect();
        if !fixed.is_empty() {
            warn!(settings = ?fixed, "these need a restart of the proxy");
        }
        info!(settings = ?live, "the config was read again");
        settings.managed = is_managed;
        let settings = Arc::new(settings);
        for each in &self.loops {
            each.send(ToLoop::Settings(settings.clone())).ok().context("a loop has ended")?;
        }
        // Told again at each reload, until a restart.
        config.this_box.run.clone_from(&self.config.this_box.run);
        config.store.clone_from(&self.config.store);
        let connections = self.config.edge.limits.connections;
        let edge = std::mem::take(&mut self.config.edge);
        config.edge.listen = edge.listen;
        config.edge.loops = edge.loops;
        config.edge.engine = edge.engine;
        config.edge.drain = edge.drain;
        config.edge.limits.connections = connections;
        self.config = config;
        Ok(())
    }
}

/// What systemd is told first: since when, by MONOTONIC.
pub(crate) fn begins() -> Result<[NotifyState; 2]> {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?;
    let now = std::time::Duration::from(now).as_micros();
    Ok([NotifyState::Reloading, NotifyState::Other(format!("MONOTONIC_USEC={now}"))])
}

fn covers(prefix: &str, key: &str) -> bool {
    key.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}
