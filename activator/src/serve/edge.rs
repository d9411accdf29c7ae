//! The activator's side of the edge: the wake table, and every proxy that counts in it.
//!
//! A proxy's area is dropped only when its process is proven dead, its stamps merged first; no idle
//! stop happens until every live proxy has acknowledged this table (DESIGN section 3).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use dormouse_link::message::{ActivatorHello, RouteLimits, ToProxy};
use dormouse_link::protocol;
use dormouse_link::table::{AreaOwner, Deadline, ProcessId, TableError, TableId, WordsOwner};
use dormouse_link::{NotStopped, Refusal, RunNumber, Slot, Word};

use nix::errno::Errno;

use super::link::Sender;

/// One proxy process.
#[derive(Debug)]
struct Proxy {
    area: AreaOwner,
    /// Absent while it is disconnected.
    sender: Option<Sender>,
    acknowledged: bool,
    /// Its counters by name, as it last told them.
    stats: Vec<(String, u64)>,
}

/// A route as proxies are told of it.
#[derive(Clone, Debug)]
pub(crate) struct EdgeRoute {
    pub(crate) host: String,
    pub(crate) limits: RouteLimits,
}

/// The table and its proxies.
#[derive(Debug)]
pub(crate) struct Edge {
    words: WordsOwner,
    proxies: BTreeMap<u64, Proxy>,
    /// Live proxies of an earlier activator that have not come yet.
    awaited: Vec<ProcessId>,
    routes: BTreeMap<Slot, EdgeRoute>,
    /// Slots that some proxy may still use for a removed host, and which proxies those are.
    leaving: BTreeMap<Slot, BTreeSet<u64>>,
    /// New slots, and the connected proxies that do not route them yet.
    coming: BTreeMap<Slot, BTreeSet<u64>>,
    /// Last activity out of areas that are gone.
    merged: BTreeMap<Slot, u64>,
    run_dir: PathBuf,
    box_name: String,
}

/// One slot's activity over all proxies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Activity {
    pub(crate) in_flight: u64,
    pub(crate) last_ns: u64,
}

const PROXIES: &str = "proxies.json";

impl Edge {
    /// A new table; proxies that an earlier activator knew and that live are awaited.
    pub(crate) fn new(
        table: TableId,
        slots: u32,
        run_dir: &Path,
        box_name: &str,
    ) -> Result<Self, TableError> {
        let known: Vec<ProcessId> = fs::read(run_dir.join(PROXIES))
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        Ok(Self {
            words: WordsOwner::create(slots, table)?,
            proxies: BTreeMap::new(),
            awaited: known.into_iter().filter(is_live).collect(),
            routes: BTreeMap::new(),
            leaving: BTreeMap::new(),
            coming: BTreeMap::new(),
            merged: BTreeMap::new(),
            run_dir: run_dir.to_owned(),
            box_name: box_name.to_owned(),
        })
    }

    pub(crate) fn slots(&self) -> u32 {
        self.words.slots()
    }

    /// A proxy connected; the connection's number names it from now on. A process that comes again
    /// gets its own area back.
    pub(crate) fn connect(
        &mut self,
        connection: u64,
        process: ProcessId,
        sender: Sender,
    ) -> Result<(), TableError> {
        let known = self.proxies.iter().find(|(_, p)| p.area.process() == process);
        let known = known.map(|(number, _)| *number);
        let area = match known.and_then(|number| self.proxies.remove(&number)) {
            Some(proxy) => proxy.area,
            None => AreaOwner::create(self.words.slots(), self.words.table_id(), process)?,
        };
        if let Some(former) = known {
            for waiting in self.leaving.values_mut() {
                if waiting.remove(&former) {
                    waiting.insert(connection);
                }
            }
        }
        let hello = ActivatorHello {
            table: self.words.table_id(),
            slots: self.words.slots(),
            run_dir: self.run_dir.display().to_string(),
            box_name: self.box_name.clone(),
        };
        let area_fd = area.fd().try_clone_to_owned().map_err(|error| TableError::System {
            call: "dup",
            errno: Errno::from_raw(error.raw_os_error().unwrap_or(0)),
        })?;
        sender.hello(&hello, vec![self.words.reader_fd()?, area_fd]);
        for (slot, route) in &self.routes {
            sender.send(&ToProxy::Route {
                slot: *slot,
                host: route.host.clone(),
                limits: route.limits.clone(),
            });
        }
        sender.send(&ToProxy::RoutesDone);
        self.awaited.retain(|awaited| *awaited != process);
        let proxy = Proxy { area, sender: Some(sender), acknowledged: false, stats: Vec::new() };
        self.proxies.insert(connection, proxy);
        self.remember();
        Ok(())
    }

    /// Its connection is gone; it may be alive, and may count.
    pub(crate) fn disconnect(&mut self, connection: u64) {
        if let Some(proxy) = self.proxies.get_mut(&connection) {
            proxy.sender = None;
        }
        // It is told of every route when it comes again.
        for waiting in self.coming.values_mut() {
            waiting.remove(&connection);
        }
        self.bury();
    }

    /// Every loop of it counts in this table.
    pub(crate) fn acknowledge(&mut self, connection: u64, table: TableId) {
        if let Some(proxy) = self.proxies.get_mut(&connection) {
            proxy.acknowledged |= table == self.words.table_id();
        }
    }

    pub(crate) fn stats(&mut self, connection: u64, stats: Vec<(String, u64)>) {
        if let Some(proxy) = self.proxies.get_mut(&connection) {
            proxy.stats = stats;
        }
    }

    /// Drops areas of processes that are proven dead, their stamps merged.
    pub(crate) fn bury(&mut self) {
        self.awaited.retain(is_live);
        let dead: Vec<u64> = self
            .proxies
            .iter()
            .filter(|(_, p)| p.sender.is_none() && !is_live(&p.area.process()))
            .map(|(number, _)| *number)
            .collect();
        for number in dead {
            let Some(proxy) = self.proxies.remove(&number) else { continue };
            for slot in self.routes.keys() {
                if let Some(counters) = proxy.area.counters(*slot) {
                    let last = counters.last_payload_ns().max(counters.last_out_ns());
                    let merged = self.merged.entry(*slot).or_default();
                    *merged = last.max(*merged);
                }
            }
            for waiting in self.leaving.values_mut() {
                waiting.remove(&number);
            }
            self.remember();
        }
        self.leaving.retain(|_, waiting| !waiting.is_empty());
    }

    /// So that a restarted activator knows whom to wait for.
    fn remember(&self) {
        let live: Vec<ProcessId> = self.proxies.values().map(|p| p.area.process()).collect();
        let path = self.run_dir.join(PROXIES);
        let written = serde_json::to_vec(&live)
            .map_err(std::io::Error::from)
            .and_then(|bytes| fs::write(&path, bytes));
        if let Err(error) = written {
            tracing::warn!(%error, path = %path.display(), "cannot note the proxies");
        }
    }

    /// Whether every live proxy counts in this table.
    pub(crate) fn is_settled(&self) -> bool {
        self.awaited.is_empty() && self.proxies.values().all(|proxy| proxy.acknowledged)
    }

    pub(crate) fn add_route(&mut self, slot: Slot, route: EdgeRoute) {
        let message =
            ToProxy::Route { slot, host: route.host.clone(), limits: route.limits.clone() };
        self.routes.insert(slot, route);
        let connected = self.proxies.iter().filter(|(_, proxy)| proxy.sender.is_some());
        self.coming.insert(slot, connected.map(|(number, _)| *number).collect());
        self.tell(&message);
    }

    /// Other limits of a host, where they are others.
    pub(crate) fn change_route(&mut self, slot: Slot, route: EdgeRoute) {
        if self.routes.get(&slot).is_some_and(|known| known.limits != route.limits) {
            self.add_route(slot, route);
        }
    }

    /// Tells every proxy to forget a host; its slot is held until all have.
    pub(crate) fn remove_route(&mut self, slot: Slot) {
        let Some(route) = self.routes.remove(&slot) else { return };
        self.merged.remove(&slot);
        let all: BTreeSet<u64> = self.proxies.keys().copied().collect();
        if !all.is_empty() {
            self.leaving.insert(slot, all);
        }
        self.tell(&ToProxy::Unroute { slot, host: route.host });
    }

    pub(crate) fn unrouted(&mut self, connection: u64, slot: Slot) {
        if let Some(waiting) = self.leaving.get_mut(&slot) {
            waiting.remove(&connection);
        }
        self.leaving.retain(|_, waiting| !waiting.is_empty());
    }

    pub(crate) fn routed(&mut self, connection: u64, slot: Slot) {
        if let Some(waiting) = self.coming.get_mut(&slot) {
            waiting.remove(&connection);
        }
    }

    /// Whether every connected proxy routes this slot.
    pub(crate) fn is_routed(&self, slot: Slot) -> bool {
        self.coming.get(&slot).is_none_or(BTreeSet::is_empty)
    }

    /// Whether a removed host's slot must not be given away yet.
    pub(crate) fn holds(&self, slot: Slot) -> bool {
        self.leaving.contains_key(&slot)
    }

    fn counters(&self, slot: Slot) -> impl Iterator<Item = &dormouse_link::Counters> {
        self.proxies.values().filter_map(move |proxy| proxy.area.counters(slot))
    }

    /// Answers all requests for a slot with a word: bits cleared, word published, proxies told.
    pub(crate) fn publish(&self, slot: Slot, to: Word) {
        let Some(word) = self.words.word(slot) else { return };
        // This process alone writes words, so the swap meets what was just read.
        let met = protocol::resolve(word, self.counters(slot), word.load(), to);
        debug_assert!(met.is_ok(), "invariant 8: somebody else wrote a word");
        self.tell(&ToProxy::Notify { slot });
    }

    /// Past it the proxies send nothing to any instance.
    pub(crate) fn set_deadline(&self, deadline: Deadline) {
        self.words.set_deadline(Some(deadline));
    }

    /// Sends all waiters of a slot away.
    pub(crate) fn refuse(&self, slot: Slot, reason: Refusal, retry_after_s: u32) {
        let Some(word) = self.words.word(slot) else { return };
        let now = word.load();
        let to = match now {
            Word::Waking => Word::Asleep,
            other @ (Word::Asleep
            | Word::Awake { .. }
            | Word::Stopping { .. }
            | Word::Refusing { .. }) => other,
        };
        let met = protocol::resolve(word, self.counters(slot), now, to);
        debug_assert!(met.is_ok(), "invariant 8: somebody else wrote a word");
        self.tell(&ToProxy::Refused { slot, reason, retry_after_s });
    }

    /// The idle stop: true when the word says stopping and nothing is in flight.
    pub(crate) fn try_stop(&self, slot: Slot, run: RunNumber) -> bool {
        let Some(word) = self.words.word(slot) else { return false };
        if !self.is_settled() {
            return false;
        }
        match protocol::try_stop(word, run, self.counters(slot)) {
            Ok(()) => true,
            Err(NotStopped::InFlight(_)) => {
                // Waiters that met the short "stopping" have posted, and are answered here.
                self.publish(slot, Word::Awake { run });
                false
            }
            Err(NotStopped::Changed(_)) => false,
        }
    }

    pub(crate) fn activity(&self, slot: Slot) -> Activity {
        let merged = self.merged.get(&slot).copied().unwrap_or(0);
        self.counters(slot).fold(Activity { in_flight: 0, last_ns: merged }, |sum, counters| {
            Activity {
                in_flight: sum.in_flight.saturating_add(u64::from(counters.inflight())),
                last_ns: sum.last_ns.max(counters.last_payload_ns()).max(counters.last_out_ns()),
            }
        })
    }

    fn tell(&self, message: &ToProxy) {
        for sender in self.proxies.values().filter_map(|proxy| proxy.sender.as_ref()) {
            sender.send(message);
        }
    }

    /// Connected proxies: pid, acknowledged, counters.
    pub(crate) fn proxies(&self) -> impl Iterator<Item = (u32, bool, &[(String, u64)])> {
        self.proxies.values().map(|p| (p.area.process().pid, p.acknowledged, p.stats.as_slice()))
    }
}

fn is_live(process: &ProcessId) -> bool {
    ProcessId::of(process.pid).is_ok_and(|found| found == *process)
}
