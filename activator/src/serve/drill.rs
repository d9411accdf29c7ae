//! Drills: every so often one host's replica is restored for practice, the one whose drill is
//! longest ago. A replica that was never restored is a hope.
//!
//! A task beside the driver, which it asks for nothing but a name. One drill at a time, within a
//! budget; what it restores is thrown away. The outcomes are kept in `<data>/drills.json`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dormouse_core::ids::Host;
use dormouse_replica::clock::system_now;
use dormouse_replica::put::Place;
use dormouse_replica::restore::{Progress, Target};
use dormouse_replica::verify::{Verified, verify};
use dormouse_store::AnyStore;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::commands::{Ask, Command};
use super::driver::{Input, Parts};
use super::paths::Paths;
use super::replica::wall_ms;
use crate::restore::scratch_dir;

/// How a host's last drill ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DrillStatus {
    /// When it ended, Unix milliseconds.
    pub(crate) at_ms: i64,
    pub(crate) outcome: Outcome,
    /// Milliseconds of restore and check.
    pub(crate) took_ms: u64,
    /// What was reached, or what is wrong.
    pub(crate) detail: String,
}

/// How a drill ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    /// Restored, and every check passed.
    Good,
    /// It cannot be restored, or what comes out is damaged.
    Bad,
    /// Not tried to the end: nothing there, too large, the store or this disk in the way.
    Skipped,
}

impl Outcome {
    pub(crate) const ALL: [Self; 3] = [Self::Good, Self::Bad, Self::Skipped];

    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Bad => "bad",
            Self::Skipped => "skipped",
        }
    }
}

/// The outcomes of all hosts' last drills. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Drills {
    path: PathBuf,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    last: BTreeMap<String, DrillStatus>,
    counts: BTreeMap<Outcome, u64>,
}

impl Drills {
    /// A file that cannot be read is as none: the drills begin anew.
    pub(crate) fn open(path: &Path) -> Self {
        let last = fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let shared = Shared { last: last.unwrap_or_default(), counts: BTreeMap::new() };
        Self { path: path.to_owned(), shared: Arc::new(Mutex::new(shared)) }
    }

    pub(crate) fn of(&self, host: &str) -> Option<DrillStatus> {
        self.shared().last.get(host).cloned()
    }

    /// Drills of this process.
    pub(crate) fn count(&self, outcome: Outcome) -> u64 {
        self.shared().counts.get(&outcome).copied().unwrap_or(0)
    }

    /// The one whose drill is longest ago.
    pub(crate) fn next<'a>(&self, hosts: impl Iterator<Item = &'a String>) -> Option<String> {
        let shared = self.shared();
        hosts.min_by_key(|host| shared.last.get(*host).map(|drill| drill.at_ms)).cloned()
    }

    fn newest_ms(&self) -> Option<i64> {
        self.shared().last.values().map(|drill| drill.at_ms).max()
    }

    fn note(&self, host: &str, drill: DrillStatus) {
        let mut shared = self.shared();
        let count = shared.counts.entry(drill.outcome).or_default();
        *count = count.saturating_add(1);
        shared.last.insert(host.to_owned(), drill);
    }

    fn save(&self) -> io::Result<()> {
        let bytes = serde_json::to_vec(&self.shared().last)?;
        let fresh = self.path.with_extension("json.tmp");
        fs::write(&fresh, bytes)?;
        fs::rename(fresh, &self.path)
    }

    fn shared(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Task {
    store: (AnyStore, String),
    drills: Drills,
    inputs: mpsc::UnboundedSender<Input>,
    every: Duration,
    budget: Duration,
    bytes_max: u64,
    scratch: PathBuf,
    paths: Paths,
}

/// The drills of this box, if the config asks for them.
#[derive(Debug)]
pub(crate) struct Drilling(Option<JoinHandle<()>>);

impl Drilling {
    /// Cuts a drill off; its scratch files go with it.
    pub(crate) async fn end(self) {
        if let Some(task) = self.0 {
            task.abort();
            // Cut off is what was asked for.
            task.await.ok();
        }
    }
}

/// Starts the drills; what an earlier process left of one is removed.
pub(crate) fn start(parts: &Parts) -> Drilling {
    let config = &parts.config;
    let scratch = scratch_dir(config).join("scheduled");
    // Absent is as good as removed.
    fs::remove_dir_all(&scratch).ok();
    let task = config.drill.every.map(|every| Task {
        store: (parts.store.clone(), parts.prefix.clone()),
        drills: parts.drills.clone(),
        inputs: parts.inputs.clone(),
        every: every.duration(),
        budget: config.drill.budget.duration(),
        bytes_max: u64::from(config.drill.max_mib) << 20,
        scratch,
        paths: parts.paths.clone(),
    });
    Drilling(task.map(|task| tokio::spawn(task.run())))
}

impl Task {
    async fn run(self) {
        loop {
            tokio::time::sleep(self.wait()).await;
            let (reply, next) = oneshot::channel();
            let command = Command { ask: Ask::NextDrill(reply), reply: oneshot::channel().0 };
            if self.inputs.send(Input::Command(command)).is_err() {
                return;
            }
            match next.await {
                Ok(Some(host)) => self.drill(&host).await,
                // No host yet.
                Ok(None) => tokio::time::sleep(self.every).await,
                Err(_) => return,
            }
        }
    }

    /// Until the next one: a restart does not begin the count anew.
    fn wait(&self) -> Duration {
        let Some(newest) = self.drills.newest_ms() else { return self.every };
        let since = u64::try_from(wall_ms().saturating_sub(newest)).unwrap_or(0);
        self.every.saturating_sub(Duration::from_millis(since))
    }

    /// Its next visit mends it, if the copy on this box is the newest.
    async fn mark(&self, host: &str) {
        let (paths, named) = (self.paths.clone(), host.to_owned());
        let marked = tokio::task::spawn_blocking(move || paths.mark_damaged(&named));
        if let Ok(Err(error)) = marked.await {
            tracing::warn!(host, %error, "the host cannot be marked to be mended");
        }
    }

    async fn drill(&self, host: &str) {
        let (store, prefix) = self.store.clone();
        let place = Place { store, prefix, host: Host(host.to_owned()) };
        let begun = system_now().mono;
        let progress = Progress::default();
        let target = (Target::Latest, self.paths.acknowledged(host));
        let drill = verify(&place, target, &self.scratch, self.bytes_max, &progress, system_now);
        let done = tokio::time::timeout(self.budget, drill).await;
        let took_ms = system_now().mono.since(begun).0 / dormouse_core::time::MILLI_NS;
        let (outcome, detail) = match done {
            Ok(Ok(good)) => (Outcome::Good, told(&good)),
            Ok(Err(error)) if error.blames_replica() => (Outcome::Bad, error.to_string()),
            Ok(Err(error)) => (Outcome::Skipped, error.to_string()),
            Err(_) => (Outcome::Skipped, format!("not done within {} s", self.budget.as_secs())),
        };
        match outcome {
            Outcome::Good => tracing::info!(host, took_ms, detail, "drill: good"),
            Outcome::Bad => {
                tracing::error!(host, took_ms, detail, "drill: BAD");
                self.mark(host).await;
            }
            Outcome::Skipped => tracing::warn!(host, took_ms, detail, "drill: not done"),
        }
        self.drills.note(host, DrillStatus { at_ms: wall_ms(), outcome, took_ms, detail });
        let drills = self.drills.clone();
        let saved = tokio::task::spawn_blocking(move || drills.save()).await;
        if let Ok(Err(error)) = saved {
            tracing::warn!(%error, "the drills' outcomes cannot be written");
        }
    }
}

fn told(good: &Verified) -> String {
    format!("TXID {}, {} files, {} bytes", good.restored.txid, good.files, good.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_whose_drill_is_longest_ago_comes_next_also_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("drills.json");
        let hosts = ["a", "b", "c"].map(str::to_owned);
        let drills = Drills::open(&path);
        let mut order = Vec::new();
        for at_ms in 1..6 {
            let host = drills.next(hosts.iter()).unwrap();
            let detail = String::new();
            drills.note(&host, DrillStatus { at_ms, outcome: Outcome::Bad, took_ms: 1, detail });
            order.push(host);
        }
        assert_eq!(order, ["a", "b", "c", "a", "b"]);
        assert_eq!(drills.count(Outcome::Bad), 5);
        drills.save().unwrap();
        let again = Drills::open(&path);
        assert_eq!(again.next(hosts.iter()), Some("c".to_owned()));
        assert_eq!(again.newest_ms(), Some(5));
        assert_eq!(again.next([].iter()), None);
    }
}
