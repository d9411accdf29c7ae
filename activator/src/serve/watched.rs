//! What `status` and metrics say of a host's replica.

use std::sync::{Arc, Mutex, PoisonError};

use dormouse_core::ids::Txid;
use dormouse_core::time::{MILLI_NS, Nanos, SECOND_NS};
use dormouse_replica::clock;
use dormouse_replica::replica::{State, Status};
use tokio::sync::watch;

/// What `status` shows of it.
#[derive(Debug)]
pub(crate) struct ReplicaStatus {
    pub(crate) durable_txid: u64,
    pub(crate) lag_ms: u64,
    pub(crate) behind_bytes: u64,
    /// Not everything that was written is durable.
    pub(crate) is_behind: bool,
    /// Something is in the way: `state` says what.
    pub(crate) stalled: bool,
    pub(crate) state: String,
}

/// An upload that is not answered for so long is told, whatever its own time-out is.
const UNANSWERED: Nanos = Nanos::from_secs(3);

/// A replica as it is seen from outside. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watched(Arc<Mutex<Seen>>);

#[derive(Debug, Default)]
struct Seen {
    /// Of the one that runs.
    running: Option<watch::Receiver<Status>>,
    /// What the last sleep found wrong.
    fault: Option<String>,
    /// TXID after which the database was changed while its host slept.
    changed_after: Option<Txid>,
}

impl Watched {
    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A replica runs.
    pub(super) fn begin(&self, running: watch::Receiver<Status>) {
        self.seen().running = Some(running);
    }

    /// None runs any more.
    pub(super) fn end(&self) {
        self.seen().running = None;
    }

    fn peek(&self) -> Option<Status> {
        self.seen().running.as_ref().map(|status| status.borrow().clone())
    }

    /// Commits that are not durable, and an upload that does not get on.
    pub(crate) fn is_stalled(&self) -> bool {
        self.peek().is_some_and(|status| {
            let is_lost = matches!(status.state, State::Detached { .. });
            status.behind_since.is_some() && (is_lost || status.trouble.is_some())
        })
    }

    /// Commits that are not durable yet.
    pub(crate) fn is_behind(&self) -> bool {
        self.peek().is_some_and(|status| status.behind_since.is_some())
    }

    /// What the last sleep found wrong with the replica.
    pub(crate) fn fault(&self) -> Option<String> {
        self.seen().fault.clone()
    }

    pub(crate) fn set_fault(&self, fault: Option<String>) {
        self.seen().fault = fault;
    }

    pub(crate) fn changed_after(&self) -> Option<Txid> {
        self.seen().changed_after
    }

    pub(super) fn set_changed_after(&self, txid: Txid) {
        self.seen().changed_after = Some(txid);
    }

    /// Of an awake host; `store` says what is in the way of the store's use.
    pub(crate) fn status(&self, store: Option<&str>) -> Option<ReplicaStatus> {
        let status = self.peek()?;
        let now = clock::system_now();
        let lag_ns = status.behind_since.map_or(0, |since| now.mono.since(since).0);
        let unanswered = status.asked_since.map(|since| now.mono.since(since));
        let unanswered = unanswered.filter(|waited| *waited >= UNANSWERED);
        let is_behind = status.behind_since.is_some();
        let is_over = status.deadline.is_some_and(|deadline| deadline.passed(now));
        let (stalled, state) = match (status.state, status.trouble, unanswered) {
            (State::StoodDown, ..) => {
                (true, "stood down: another writer owns the replica".to_owned())
            }
            (State::Detached { reason }, ..) => (true, format!("detached: {reason}")),
            (State::Following, trouble, _) if is_behind && is_over => {
                let what = "stalled: this box's session is not renewed, uploads wait for it";
                let why = store.map(|why| format!("; the store: {why}"));
                let why = why.or_else(|| trouble.map(|why| format!("; {why}")));
                (true, format!("{what}{}", why.unwrap_or_default()))
            }
            (State::Following, Some(trouble), _) => (true, format!("stalled: {trouble}")),
            (State::Following, None, Some(waited)) => {
                let seconds = waited.0 / SECOND_NS;
                (true, format!("stalled: the store has not answered an upload for {seconds} s"))
            }
            (State::Following, None, None) => {
                let trouble = status.compaction.map(|why| format!("; {why}"));
                (false, format!("following{}", trouble.unwrap_or_default()))
            }
        };
        Some(ReplicaStatus {
            durable_txid: status.durable.0,
            lag_ms: lag_ns / MILLI_NS,
            behind_bytes: status.behind_bytes,
            is_behind,
            stalled,
            state,
        })
    }
}
