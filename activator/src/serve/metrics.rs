//! `/metrics` of the admin socket, in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::drill::Outcome;
use super::driver::Driver;
use super::watched::ReplicaStatus;
use dormouse_replica::clock;
use dormouse_store::{Count, Gate};

/// One figure of a line of the ledger.
type CostFigure = fn(&Count) -> u64;

/// A metric of a replica: its name, and how to read it.
type Figure = (&'static str, fn(&ReplicaStatus) -> u64);

impl Driver {
    pub(crate) fn metrics(&self) -> String {
        let mut text = String::new();
        for (name, count) in self.core.counters().iter() {
            line(&mut text, &format!("dormouse_{name}_total"), "counter", "", count);
        }
        let mut states: BTreeMap<&str, u64> = BTreeMap::new();
        for view in self.core.hosts() {
            let count = states.entry(self.state_of(&view)).or_default();
            *count = count.saturating_add(1);
        }
        head(&mut text, "dormouse_hosts", "gauge");
        for (state, count) in states {
            value(&mut text, "dormouse_hosts", &format!("{{state=\"{state}\"}}"), count);
        }
        let unsynced = self.core.hosts().filter(|view| view.unsynced).count();
        let unsynced = u64::try_from(unsynced).unwrap_or(u64::MAX);
        line(&mut text, "dormouse_hosts_unsynced", "gauge", "", unsynced);
        let live = self.core.session(clock::system_now()).0 == "live";
        line(&mut text, "dormouse_session_live", "gauge", "", u64::from(live));
        let usable =
            matches!(self.parts.store.gate(), Gate::Open) && self.parts.records.trouble().is_none();
        line(&mut text, "dormouse_store_usable", "gauge", "", u64::from(usable));
        self.replica_metrics(&mut text);
        self.proxy_metrics(&mut text);
        self.store_metrics(&mut text);
        text
    }

    /// The store's ledger. By operation, hosts together: a line a host would be too many.
    fn store_metrics(&self, text: &mut String) {
        let mut totals: BTreeMap<(&str, &str), Count> = BTreeMap::new();
        for (account, lines) in self.parts.store.ledger().read() {
            let of = match account.as_str() {
                "sessions" => "sessions",
                "probe" => "probe",
                _ => "hosts",
            };
            for (operation, count) in lines {
                let total = totals.entry((operation.name(), of)).or_default();
                *total = total.plus(count);
            }
        }
        let figures: [(&str, CostFigure); 3] = [
            ("dormouse_store_requests_total", |count| count.requests),
            ("dormouse_store_sent_bytes_total", |count| count.sent_bytes),
            ("dormouse_store_received_bytes_total", |count| count.received_bytes),
        ];
        for (name, read) in figures {
            head(text, name, "counter");
            for ((operation, of), count) in &totals {
                let labels = format!("{{operation=\"{operation}\",of=\"{of}\"}}");
                value(text, name, &labels, read(count));
            }
        }
    }

    /// How far each awake host's replica is, levels, and drills.
    fn replica_metrics(&self, text: &mut String) {
        let replicas: Vec<_> = self
            .hosts
            .values()
            .filter_map(|hosted| Some((&hosted.host, hosted.replica.watched.status(None)?)))
            .collect();
        head(text, "dormouse_replica_lag_seconds", "gauge");
        for (host, replica) in &replicas {
            let (seconds, millis) = (replica.lag_ms / 1000, replica.lag_ms % 1000);
            // Writing to a String cannot fail.
            writeln!(text, "dormouse_replica_lag_seconds{{host=\"{host}\"}} {seconds}.{millis:03}")
                .ok();
        }
        let figures: [Figure; 3] = [
            ("dormouse_replica_behind_bytes", |replica| replica.behind_bytes),
            ("dormouse_replica_durable_txid", |replica| replica.durable_txid),
            ("dormouse_replica_stalled", |replica| u64::from(replica.stalled)),
        ];
        for (name, figure) in figures {
            head(text, name, "gauge");
            for (host, replica) in &replicas {
                value(text, name, &format!("{{host=\"{host}\"}}"), figure(replica));
            }
        }
        let budget = &self.parts.rules.budget;
        for (name, count) in [
            ("levels_written", budget.written()),
            ("levels_failed", budget.failed()),
            ("levels_deleted", budget.deleted()),
        ] {
            line(text, &format!("dormouse_{name}_total"), "counter", "", count);
        }
        head(text, "dormouse_drills_total", "counter");
        for outcome in Outcome::ALL {
            let labels = format!("{{outcome=\"{}\"}}", outcome.word());
            value(text, "dormouse_drills_total", &labels, self.parts.drills.count(outcome));
        }
        let name = "dormouse_drill_timestamp_seconds";
        head(text, name, "gauge");
        for hosted in self.hosts.values() {
            let Some(drill) = self.parts.drills.of(&hosted.host) else { continue };
            let (host, outcome) = (&hosted.host, drill.outcome.word());
            let seconds = u64::try_from(drill.at_ms / 1000).unwrap_or(0);
            value(text, name, &format!("{{host=\"{host}\",outcome=\"{outcome}\"}}"), seconds);
        }
    }

    /// Counters of each proxy process, as it last told them.
    fn proxy_metrics(&self, text: &mut String) {
        let mut by_name: BTreeMap<&str, Vec<(u32, u64)>> = BTreeMap::new();
        for (pid, _, stats) in self.parts.edge.proxies() {
            for (name, count) in stats {
                by_name.entry(name).or_default().push((pid, *count));
            }
        }
        for (name, counts) in by_name {
            // Their names begin with `proxy_`.
            let name = format!("dormouse_{name}_total");
            head(text, &name, "counter");
            for (pid, count) in counts {
                value(text, &name, &format!("{{pid=\"{pid}\"}}"), count);
            }
        }
    }
}

fn line(text: &mut String, name: &str, kind: &str, labels: &str, count: u64) {
    head(text, name, kind);
    value(text, name, labels, count);
}

fn head(text: &mut String, name: &str, kind: &str) {
    // Writing to a String cannot fail.
    writeln!(text, "# TYPE {name} {kind}").ok();
}

fn value(text: &mut String, name: &str, labels: &str, count: u64) {
    writeln!(text, "{name}{labels} {count}").ok();
}
