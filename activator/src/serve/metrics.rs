//! `/metrics` of the admin socket, in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::driver::Driver;
use dormouse_replica::clock;

impl Driver {
    pub(crate) fn metrics(&self) -> String {
        let mut text = String::new();
        for (name, count) in self.core.counters().iter() {
            line(&mut text, &format!("dormouse_{name}_total"), "counter", "", count);
        }
        let mut states: BTreeMap<&str, u64> = BTreeMap::new();
        for view in self.core.hosts() {
            let count = states.entry(view.state).or_default();
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
        let budget = &self.parts.rules.budget;
        for (name, count) in [
            ("levels_written", budget.written()),
            ("levels_failed", budget.failed()),
            ("levels_deleted", budget.deleted()),
        ] {
            line(&mut text, &format!("dormouse_{name}_total"), "counter", "", count);
        }
        self.proxy_metrics(&mut text);
        text
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
