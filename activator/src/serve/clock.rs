//! The one place where the clocks are read.

use dormouse_core::time::{Boot, Mono, Now, SECOND_NS, Wall};
use nix::time::{ClockId, clock_gettime};

/// All three clocks, now.
pub(crate) fn now() -> Now {
    Now {
        mono: Mono(nanos(ClockId::CLOCK_MONOTONIC)),
        boot: Boot(nanos(ClockId::CLOCK_BOOTTIME)),
        wall: Wall(nanos(ClockId::CLOCK_REALTIME) / dormouse_core::time::MILLI_NS),
    }
}

/// A clock that every Linux has: it cannot fail.
fn nanos(clock: ClockId) -> u64 {
    clock_gettime(clock).map_or(0, |time| {
        let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
        let rest = u64::try_from(time.tv_nsec()).unwrap_or(0);
        seconds.saturating_mul(SECOND_NS).saturating_add(rest)
    })
}
