//! What the store was asked: requests and bytes, by who they were for and by operation.
//!
//! The account is the first name below the prefix: a host, `sessions`, or `probe`. Requests are
//! counted as they are sent, also those that fail; a PUT in parts counts each of its requests.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use serde::{Deserialize, Serialize};

/// What was asked, as stores price it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// A whole object or a range of it.
    Get,
    /// Tag and metadata alone.
    Head,
    /// An object in one request.
    Put,
    /// One part of an object.
    Part,
    /// Begin, end or give up a PUT in parts.
    Multipart,
    /// One object less.
    Delete,
    /// One page of keys.
    List,
}

impl Operation {
    const ALL: [Self; 7] =
        [Self::Get, Self::Head, Self::Put, Self::Part, Self::Multipart, Self::Delete, Self::List];

    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Head => "head",
            Self::Put => "put",
            Self::Part => "part",
            Self::Multipart => "multipart",
            Self::Delete => "delete",
            Self::List => "list",
        }
    }
}

/// One line of the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    /// Requests sent.
    pub requests: u64,
    /// Bytes of bodies sent.
    pub sent_bytes: u64,
    /// Bytes of bodies received.
    pub received_bytes: u64,
}

impl Count {
    /// Both together.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            sent_bytes: self.sent_bytes.saturating_add(other.sent_bytes),
            received_bytes: self.received_bytes.saturating_add(other.received_bytes),
        }
    }
}

/// A reading: lines by account, then by operation; what was never asked has no line.
pub type Reading = BTreeMap<String, BTreeMap<Operation, Count>>;

/// Account of keys outside the prefix; no host has such a name.
const OUTSIDE: &str = "(outside)";

#[derive(Debug, Default)]
struct Cell {
    requests: AtomicU64,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Cells([Cell; Operation::ALL.len()]);

impl Cells {
    const fn of(&self, operation: Operation) -> &Cell {
        let [get, head, put, part, multipart, delete, list] = &self.0;
        match operation {
            Operation::Get => get,
            Operation::Head => head,
            Operation::Put => put,
            Operation::Part => part,
            Operation::Multipart => multipart,
            Operation::Delete => delete,
            Operation::List => list,
        }
    }
}

/// The ledger of one store. Cheap: an account's first request locks, every other one reads a lock
/// and adds to atomics.
#[derive(Debug)]
pub struct Ledger {
    prefix: String,
    accounts: RwLock<BTreeMap<Box<str>, Arc<Cells>>>,
}

impl Ledger {
    /// An empty one for keys below `prefix`.
    #[must_use]
    pub fn new(prefix: &str) -> Self {
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        Self { prefix, accounts: RwLock::default() }
    }

    /// One request is about to be sent, with so many bytes of body.
    pub(crate) fn sent(&self, operation: Operation, key: &str, bytes: u64) {
        let cells = self.cells(key);
        let cell = cells.of(operation);
        cell.requests.fetch_add(1, Ordering::Relaxed);
        cell.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many bytes of an answer's body came.
    pub(crate) fn received(&self, operation: Operation, key: &str, bytes: u64) {
        self.cells(key).of(operation).received_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn cells(&self, key: &str) -> Arc<Cells> {
        let below = key.strip_prefix(&self.prefix);
        let account = below.and_then(|rest| rest.split('/').next()).unwrap_or(OUTSIDE);
        let accounts = self.accounts.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(cells) = accounts.get(account) {
            return Arc::clone(cells);
        }
        drop(accounts);
        let mut accounts = self.accounts.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(accounts.entry(account.into()).or_default())
    }

    /// What was asked until now. Lines are read one by one, while requests go on.
    #[must_use]
    pub fn read(&self) -> Reading {
        let accounts = self.accounts.read().unwrap_or_else(PoisonError::into_inner);
        let mut reading = Reading::new();
        for (account, cells) in &*accounts {
            let lines = Operation::ALL.into_iter().map(|operation| {
                let cell = cells.of(operation);
                let count = Count {
                    requests: cell.requests.load(Ordering::Relaxed),
                    sent_bytes: cell.sent_bytes.load(Ordering::Relaxed),
                    received_bytes: cell.received_bytes.load(Ordering::Relaxed),
                };
                (operation, count)
            });
            let asked = lines.filter(|(_, count)| count.requests > 0).collect();
            reading.insert(account.to_string(), asked);
        }
        reading
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_host_and_operation_and_sessions_apart() {
        let ledger = Ledger::new("p/q");
        ledger.sent(Operation::Put, "p/q/a.test/lock.json", 10);
        ledger.sent(Operation::Put, "p/q/a.test/0000/x.ltx", 5);
        ledger.sent(Operation::Get, "p/q/sessions/box-1.json", 0);
        ledger.received(Operation::Get, "p/q/sessions/box-1.json", 7);
        ledger.sent(Operation::List, "elsewhere/", 0);
        let reading = ledger.read();
        let put = Count { requests: 2, sent_bytes: 15, received_bytes: 0 };
        assert_eq!(reading["a.test"], BTreeMap::from([(Operation::Put, put)]));
        assert_eq!(reading["sessions"][&Operation::Get].received_bytes, 7);
        assert_eq!(reading[OUTSIDE][&Operation::List].requests, 1);
        assert_eq!(reading.len(), 3);
    }
}
