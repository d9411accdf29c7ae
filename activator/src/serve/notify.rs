//! What systemd is told: that the box serves, that its loop lives, and how it is.

use std::time::Duration;

use dormouse_core::time::Mono;
use dormouse_replica::clock;
use libsystemd::daemon::{NotifyState, notify, watchdog_enabled};
use tokio::sync::mpsc;

use super::driver::{Driver, Input};

/// Between two lines of status, at least.
const STATUS_EVERY: Duration = Duration::from_secs(1);

/// What was said last.
#[derive(Debug)]
pub(crate) struct Told {
    /// Whether there is a systemd to tell.
    listens: bool,
    dirty: bool,
    status: String,
    at: Mono,
    /// A later look is under way.
    later: bool,
}

impl Told {
    pub(crate) fn new() -> Self {
        let listens = std::env::var_os("NOTIFY_SOCKET").is_some();
        Self { listens, dirty: true, status: String::new(), at: Mono(0), later: false }
    }
}

/// The box serves; from now on its watchdog is fed.
pub(crate) fn ready(inputs: mpsc::UnboundedSender<Input>) {
    say(NotifyState::Ready);
    let Some(limit) = watchdog_enabled(false) else { return };
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(limit / 2);
        loop {
            ticks.tick().await;
            // The loop itself answers: one that hangs is killed and started again.
            if inputs.send(Input::Watchdog).is_err() {
                return;
            }
        }
    });
}

/// The config is read again.
pub(crate) fn reloading() {
    let now = clock::system_now().mono.0 / 1000;
    let since = NotifyState::Other(format!("MONOTONIC_USEC={now}"));
    say_all(&[NotifyState::Reloading, since]);
}

/// It was read, or is as it was.
pub(crate) fn reloaded() {
    say(NotifyState::Ready);
}

/// Every host is put to sleep now.
pub(crate) fn stopping() {
    say(NotifyState::Stopping);
}

fn say(state: NotifyState) {
    say_all(&[state]);
}

fn say_all(states: &[NotifyState]) {
    if let Err(error) = notify(false, states) {
        tracing::warn!(%error, "systemd cannot be told");
    }
}

impl Driver {
    /// The loop lives.
    pub(crate) fn feed_watchdog(&mut self) {
        self.told.later = false;
        say(NotifyState::Watchdog);
        self.tell_status();
    }

    /// After a step: the line of `systemctl status`, once a second at most.
    pub(crate) fn status_may_have_changed(&mut self) {
        self.told.dirty = self.told.listens;
        if self.told.dirty {
            self.tell_status();
        }
    }

    fn tell_status(&mut self) {
        let now = clock::system_now();
        let every = u64::try_from(STATUS_EVERY.as_nanos()).unwrap_or(u64::MAX);
        if !self.told.dirty {
            return;
        }
        if now.mono.0.saturating_sub(self.told.at.0) < every {
            if !std::mem::replace(&mut self.told.later, true) {
                let inputs = self.parts.inputs.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(STATUS_EVERY).await;
                    // A driver that is gone has no status.
                    inputs.send(Input::Watchdog).ok();
                });
            }
            return;
        }
        let (session, _) = self.core.session(now);
        let (awake, hosts) = (self.core.awake().count(), self.hosts.len());
        let status = format!("session {session}; {awake} of {hosts} hosts awake");
        self.told.dirty = false;
        self.told.at = now.mono;
        if status != self.told.status {
            say(NotifyState::Status(status.clone()));
            self.told.status = status;
        }
    }
}
