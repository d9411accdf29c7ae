//! `dormouse status --cost`: the ledger of the store, for people and tools.

use std::collections::BTreeMap;
use std::fmt;

use dormouse_store::{Count, Operation, Reading};
use serde::Serialize;

/// What the store was asked since the activator's start.
#[derive(Debug, Serialize)]
pub(crate) struct Bill {
    /// By host (`sessions` and `probe` beside them), then by operation.
    pub(crate) accounts: Reading,
    /// All accounts together, by operation.
    pub(crate) totals: BTreeMap<Operation, Count>,
    /// All but the session's, whatever the operation: what hosts cost.
    pub(crate) hosts: Count,
}

/// A bill of all accounts, or of one host alone.
pub(crate) fn bill(mut accounts: Reading, host: Option<&str>) -> Bill {
    if let Some(host) = host {
        accounts.retain(|account, _| account == host);
    }
    let mut totals: BTreeMap<Operation, Count> = BTreeMap::new();
    let mut hosts = Count::default();
    for (account, lines) in &accounts {
        for (operation, count) in lines {
            let total = totals.entry(*operation).or_default();
            *total = total.plus(*count);
            if !matches!(account.as_str(), "sessions" | "probe") {
                hosts = hosts.plus(*count);
            }
        }
    }
    Bill { accounts, totals, hosts }
}

impl fmt::Display for Bill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<40} {:<10} {:>10} {:>14} {:>14}",
            "account", "operation", "requests", "bytes sent", "received"
        )?;
        let mut line = |account: &str, operation: &str, count: &Count| {
            writeln!(
                f,
                "{account:<40} {operation:<10} {:>10} {:>14} {:>14}",
                count.requests, count.sent_bytes, count.received_bytes
            )
        };
        for (account, lines) in &self.accounts {
            for (operation, count) in lines {
                line(account, operation.name(), count)?;
            }
        }
        for (operation, count) in &self.totals {
            line("total", operation.name(), count)?;
        }
        write!(f, "requests for hosts: {}", self.hosts.requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bill_adds_up_and_leaves_the_session_out_of_what_hosts_cost() {
        let count = |requests| Count { requests, sent_bytes: 10, received_bytes: 1 };
        let accounts = Reading::from([
            ("a.test".to_owned(), BTreeMap::from([(Operation::Put, count(2))])),
            ("b.test".to_owned(), BTreeMap::from([(Operation::Put, count(3))])),
            ("sessions".to_owned(), BTreeMap::from([(Operation::Put, count(100))])),
        ]);
        let all = bill(accounts.clone(), None);
        assert_eq!(all.totals[&Operation::Put].requests, 105);
        assert_eq!((all.hosts.requests, all.hosts.sent_bytes), (5, 20));
        let one = bill(accounts, Some("b.test"));
        assert_eq!(one.hosts.requests, 3);
        let text = one.to_string();
        assert!(text.contains("b.test") && !text.contains("a.test"), "{text}");
        assert!(text.contains("requests for hosts: 3"), "{text}");
        let json = serde_json::to_value(&one).unwrap();
        assert_eq!(json["accounts"]["b.test"]["put"]["requests"], 3);
    }
}
