//! What the link client and the loops tell each other.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use dormouse_link::message::RouteLimits;
use dormouse_link::table::{TableId, TableView};
use dormouse_link::{Refusal, RunNumber, Slot};
use dormouse_proxy_core::Host;

use crate::settings::Settings;

/// A table with what belongs to it.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) view: TableView,
    run_dir: PathBuf,
}

impl Table {
    pub(crate) fn new(view: TableView, run_dir: PathBuf) -> Self {
        Self { view, run_dir }
    }

    /// Where a run of a host listens.
    pub(crate) fn socket(&self, host: &Host, run: RunNumber) -> PathBuf {
        dormouse_link::message::instance_socket(&self.run_dir, host.as_str(), run)
    }

    pub(crate) fn run_dir(&self) -> &Path {
        &self.run_dir
    }
}

/// A managed route.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) slot: Slot,
    pub(crate) host: Host,
    pub(crate) limits: RouteLimits,
    /// Waiters of all loops.
    pub(crate) waiters: Arc<AtomicU32>,
}

/// To a loop.
#[derive(Clone, Debug)]
pub(crate) enum ToLoop {
    /// A connection to an activator began; its routes follow.
    Connected(Arc<Table>),
    Route(Route),
    /// The routes are complete: move to the table, forget what was not named.
    RoutesDone,
    Unroute(Slot),
    Notify(Slot),
    Refused {
        slot: Slot,
        reason: Refusal,
        retry_after_s: u32,
    },
    /// The config was read again: for connections and requests that come from now on.
    Settings(Arc<Settings>),
    /// Stop accepting, finish what is in flight, end.
    Drain,
}

/// From a loop.
#[derive(Debug)]
pub(crate) enum FromLoop {
    /// The loop counts in this table now.
    Moved(TableId),
    /// The loop knows the route at this slot.
    Routed(Slot),
    /// The loop uses this slot no more.
    Unrouted(Slot),
    Post(Slot),
    Gone {
        slot: Slot,
        run: RunNumber,
    },
}
