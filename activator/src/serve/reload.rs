//! `dormouse reload` and SIGHUP: the config is read again, and nothing is cut.

use std::sync::Arc;

use dormouse_core::event::Event;
use dormouse_core::ids::Slot;
use dormouse_core::time::Nanos;
use dormouse_link::config::{Config, changes};

use super::commands::Reply;
use super::driver::Driver;
use super::effects::edge_slot;
use super::notify;
use super::rules::Rules;

/// What a change of a setting needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    /// It holds at once, or from a host's next wake on.
    Nothing,
    /// The proxy reads it, at its own SIGHUP.
    ProxyReload,
    ProxyRestart,
    Restart,
}

/// The longest name that covers a key decides; what is not named is fixed by the start.
const NEEDS: [(&str, Needs); 14] = [
    ("app", Needs::Nothing),
    ("sleep.idle", Needs::Nothing),
    ("sleep.next_due", Needs::Nothing),
    ("sleep.sync", Needs::Nothing),
    ("wake.health", Needs::Nothing),
    ("replica", Needs::Nothing),
    ("edge.limits.waiters_per_host", Needs::Nothing),
    ("edge.limits.wake_wait", Needs::Nothing),
    ("edge.limits.body_bytes", Needs::Nothing),
    ("edge.limits.connections", Needs::ProxyRestart),
    ("edge.limits", Needs::ProxyReload),
    ("edge.trusted_proxies", Needs::ProxyReload),
    ("route", Needs::ProxyReload),
    ("edge", Needs::ProxyRestart),
];

fn needs(key: &str) -> Needs {
    // Where its file is: known to the position of each host.
    let is_of_an_app = key.starts_with("app.");
    if is_of_an_app && key.rsplit('.').next() == Some("db") {
        return Needs::Restart;
    }
    let covers = |name: &str| {
        key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let named = NEEDS.iter().filter(|(name, _)| covers(name));
    named.max_by_key(|(name, _)| name.len()).map_or(Needs::Restart, |(_, needs)| *needs)
}

impl Driver {
    /// A config with an error changes nothing.
    pub(crate) fn reload(&mut self) -> Reply {
        notify::reloading();
        let read = self.read_again();
        notify::reloaded();
        match read {
            Ok(said) => {
                tracing::info!(said, "the config was read again");
                Reply::done(said)
            }
            Err(why) => {
                tracing::error!(why, "the config was not read again: everything is as it was");
                Reply::refused(format!("nothing was changed: {why}"))
            }
        }
    }

    fn read_again(&mut self) -> Result<String, String> {
        let path = &self.parts.config_path;
        let read = Config::load(path).map_err(|error| told(&error))?;
        self.check_hosts(&read)?;
        for warning in dormouse_link::config::warnings(&read) {
            tracing::warn!(warning, "the config");
        }
        let changed = changes(&self.parts.config, &read);
        self.parts.config = Arc::new(self.with_what_is_fixed(read));
        self.apply()?;
        Ok(describe(&changed))
    }

    /// What is served needs its app, and its name.
    fn check_hosts(&self, read: &Config) -> Result<(), String> {
        for hosted in self.hosts.values() {
            let (host, app) = (&hosted.host, &hosted.app_name);
            if !read.apps.contains_key(app) {
                return Err(format!(
                    "app.{app} is gone, and {host} is served by it: `dormouse rm {host}` first"
                ));
            }
            if read.routes.iter().any(|route| route.host == *host) {
                return Err(format!(
                    "route: {host} is served by app {app}: `dormouse rm {host}` first"
                ));
            }
        }
        Ok(())
    }

    /// As it was read, but for what the start has fixed: that is told again at each reload.
    fn with_what_is_fixed(&self, mut read: Config) -> Config {
        let now = &self.parts.config;
        for (name, app) in &mut read.apps {
            if let Some(known) = now.apps.get(name) {
                app.db.clone_from(&known.db);
            }
        }
        read.this_box = now.this_box.clone();
        read.store.clone_from(&now.store);
        read.session = now.session.clone();
        read.instances = now.instances.clone();
        read.pressure = now.pressure.clone();
        read.drill = now.drill.clone();
        let health = read.wake.health;
        read.wake = now.wake.clone();
        read.wake.health = health;
        read.sleep.grace = now.sleep.grace;
        read.sleep.proof = now.sleep.proof;
        read
    }

    fn apply(&mut self) -> Result<(), String> {
        let config = Arc::clone(&self.parts.config);
        let budget = self.parts.rules.budget.clone();
        self.parts.rules = Rules { budget, ..Rules::of(&config.replica) };
        let sync = Nanos(config.sleep.sync.as_nanos());
        let slots: Vec<Slot> = self.hosts.keys().copied().collect();
        for slot in slots {
            let rules = self.parts.rules.clone();
            let Some(hosted) = self.hosts.get_mut(&slot) else { continue };
            let Some(app) = config.apps.get(&hosted.app_name) else { continue };
            hosted.app = app.clone();
            hosted.replica.change(app, rules, sync);
            let route = self.edge_route(&self.hosts[&slot].host);
            self.parts.edge.change_route(edge_slot(slot), route);
            let policy = self.policy(app);
            self.step(Event::Treated(slot, policy));
        }
        // Hosts whose app was not in the config until now.
        for seed in self.load().map_err(|error| format!("{error:#}"))? {
            self.step(Event::Added(seed));
        }
        Ok(())
    }
}

fn told(error: &(dyn std::error::Error + 'static)) -> String {
    dormouse_link::told(std::iter::successors(Some(error), |error| error.source()))
}

fn describe(changed: &[String]) -> String {
    if changed.is_empty() {
        return "the config says what it said".to_owned();
    }
    let of = |wanted: Needs| -> Vec<&str> {
        changed.iter().map(String::as_str).filter(|key| needs(key) == wanted).collect()
    };
    let lines = [
        (Needs::Nothing, "changed, a running app from its next wake on"),
        (Needs::ProxyReload, "read by the proxy at its own reload (SIGHUP)"),
        (Needs::ProxyRestart, "NOT changed until the proxy is restarted"),
        (Needs::Restart, "NOT changed until the activator is restarted"),
    ];
    let line = |(wanted, what): (Needs, &str)| {
        let keys = of(wanted);
        (!keys.is_empty()).then(|| format!("{what}: {}", keys.join(", ")))
    };
    lines.into_iter().filter_map(line).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setting_says_what_it_needs() {
        for (key, wanted) in [
            ("app.guestbook.command", Needs::Nothing),
            ("app.guestbook.db", Needs::Restart),
            ("sleep.idle", Needs::Nothing),
            ("sleep.grace", Needs::Restart),
            ("edge.limits.wake_wait", Needs::Nothing),
            ("edge.limits.head_bytes", Needs::ProxyReload),
            ("edge.limits.connections", Needs::ProxyRestart),
            ("edge.listen", Needs::ProxyRestart),
            ("route", Needs::ProxyReload),
            ("box.data", Needs::Restart),
            ("store.path", Needs::Restart),
            ("session.ttl", Needs::Restart),
            ("drill.every", Needs::Restart),
            ("instances.own_users", Needs::Restart),
            ("pressure.high_percent", Needs::Restart),
            ("wake.at_a_time", Needs::Restart),
        ] {
            assert_eq!(needs(key), wanted, "{key}");
        }
    }
}
