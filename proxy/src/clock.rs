//! The only place of the proxy that reads a clock.

use std::time::Duration;

use dormouse_link::table::Deadline;
use nix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

/// Now, for timers.
#[expect(clippy::disallowed_methods, reason = "the driver reads the clock here")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// `CLOCK_MONOTONIC` in nanoseconds, the clock of the table's stamps. No system call: vDSO.
pub(crate) fn monotonic_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC)
}

/// Whether a session's deadline has passed on either of its clocks.
pub(crate) fn has_passed(deadline: Deadline) -> bool {
    read(ClockId::CLOCK_BOOTTIME) >= deadline.boottime_ns
        || read(ClockId::CLOCK_REALTIME) >= deadline.realtime_ns
}

fn read(clock: ClockId) -> u64 {
    // A clock that cannot be read counts as far ahead: nothing is sent past a deadline.
    clock_gettime(clock)
        .map_or(u64::MAX, |time| u64::try_from(Duration::from(time).as_nanos()).unwrap_or(u64::MAX))
}
