//! Memory that runs short: the longest idle hosts sleep first, until there is enough again.
//!
//! Two levels, so that it does not go on and off: at the upper one it begins, below the lower one it
//! ends. In between a few hosts go to sleep at each report, a second apart.

use alloc::vec::Vec;

use crate::Core;
use crate::effect::Effect;
use crate::event::Sample;
use crate::host::{Context, HostEntry, State, Why};
use crate::ids::Slot;
use crate::time::{Mono, Nanos, Now};

/// A host that was talked to just now would only be woken again.
const QUIET: Nanos = Nanos::from_secs(5);
/// One in so many of those that may go, and one at least, a report.
const SHARE: usize = 8;

impl Core {
    /// Whether hosts are put to sleep for their memory: then the driver reports every second.
    #[must_use]
    pub const fn is_pressed(&self) -> bool {
        self.shared.pressed
    }

    /// A report: thousandths of the time in which something waited for memory.
    pub(crate) fn press(
        &mut self,
        now: Now,
        permille: u32,
        samples: &[Sample],
        fx: &mut Vec<Effect>,
    ) {
        let settings = &self.shared.settings;
        let (high, low) = (settings.pressure_high, settings.pressure_low);
        if permille >= high {
            self.shared.pressed = true;
        } else if permille < low {
            self.shared.pressed = false;
        }
        if !self.shared.pressed || !self.session.may_write(now) {
            return;
        }
        let mut idle = self.idle(now, samples);
        idle.sort_unstable();
        let share = idle.len().div_ceil(SHARE);
        for (_, slot) in idle.into_iter().take(share) {
            self.shared.counters.add("pressure_sleeps");
            self.with(slot, now, fx, HostEntry::make_room);
        }
    }

    /// Hosts that may go, with the time since when nobody talked to them; frozen ones rest since
    /// before any awake one.
    fn idle(&self, now: Now, samples: &[Sample]) -> Vec<((bool, Mono), Slot)> {
        let hosts = self.active.iter().filter_map(|slot| self.hosts.get(slot));
        let rank = |host: &HostEntry| match host.state {
            State::Frozen { since, .. } => Some((false, since)),
            State::Awake { since, .. } => {
                let sample = samples.iter().find(|sample| sample.slot == host.slot)?;
                let quiet = sample.last_active.max(since);
                let window = QUIET.min(host.policy.idle);
                let goes = sample.in_flight == 0 && !sample.stalled;
                (goes && now.mono.since(quiet) >= window).then_some((true, quiet))
            }
            State::Asleep
            | State::Leasing { .. }
            | State::Restoring { .. }
            | State::Opening { .. }
            | State::Starting { .. }
            | State::Attaching { .. }
            | State::Resuming { .. }
            | State::Freezing { .. }
            | State::Thawing { .. }
            | State::Stopping { .. }
            | State::Saving { .. }
            | State::Parking { .. }
            | State::Fenced { .. }
            | State::Unproven { .. }
            | State::Backoff { .. } => None,
        };
        hosts.filter_map(|host| Some((rank(host)?, host.slot))).collect()
    }
}

impl HostEntry {
    /// Stopped for its memory: a frozen one would keep it.
    fn make_room(&mut self, ctx: &mut Context<'_>) {
        if let State::Frozen { run, .. } = self.state {
            self.stop_frozen(run, Why::Idle, ctx);
        } else {
            self.on_idle(ctx);
        }
    }
}
