//! The three clocks of this machine.

use dormouse_core::time::{Boot, Mono, Now, Wall};
use nix::time::{ClockId, clock_gettime};

/// Reads all three clocks.
#[must_use]
pub fn system_now() -> Now {
    Now {
        mono: Mono(read_ns(ClockId::CLOCK_MONOTONIC)),
        boot: Boot(read_ns(ClockId::CLOCK_BOOTTIME)),
        wall: Wall(read_ns(ClockId::CLOCK_REALTIME) / 1_000_000),
    }
}

/// These clocks exist on every Linux; one that fails reads as the end of time, so that a deadline
/// by it has passed.
fn read_ns(clock: ClockId) -> u64 {
    let Ok(time) = clock_gettime(clock) else { return u64::MAX };
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec()).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}
