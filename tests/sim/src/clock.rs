//! A box's three clocks: drifting, jumping, and one that stands still in suspend.

use dormouse_core::time::{Boot, MILLI_NS, Mono, Now, Wall};

/// Moments and spans of the simulated world, nanoseconds.
pub type Time = u64;

/// One millisecond of the world.
pub const MS: Time = MILLI_NS;
/// One second of the world.
pub const S: Time = 1000 * MS;

/// How far a clock may run fast or slow, parts in a million.
pub const DRIFT_PPM_MAX: u64 = 500;
/// BOOTTIME of the world's beginning: the subtractions below never meet zero.
const BEGINNING: u64 = 1000 * S;
/// REALTIME of the world's beginning, milliseconds since 1970.
const EPOCH_MS: u64 = 1_800_000_000_000;

/// The clocks of one box.
#[derive(Clone, Debug)]
pub struct BoxClock {
    /// Parts in a million that it runs faster than `DRIFT_PPM_MAX` slow.
    drift_ppm: u64,
    /// Time spent in suspend.
    suspended: u64,
    /// What an operator or NTP did to REALTIME, milliseconds; 0 stands for an hour back.
    wall_shift_ms: u64,
}

/// A shift that changes nothing.
const NO_SHIFT_MS: u64 = 3_600_000;

impl BoxClock {
    /// `drift_ppm` from 0 (slowest) to twice [`DRIFT_PPM_MAX`] (fastest).
    #[must_use]
    pub const fn new(drift_ppm: u64) -> Self {
        Self { drift_ppm, suspended: 0, wall_shift_ms: NO_SHIFT_MS }
    }

    fn run(&self, time: Time) -> u64 {
        // A day of simulated nanoseconds divided first: no overflow, and no lost precision.
        let slowest = time - time / 1_000_000 * DRIFT_PPM_MAX;
        BEGINNING + slowest + time / 1_000_000 * self.drift_ppm
    }

    /// What the three clocks say.
    #[must_use]
    pub fn now(&self, time: Time) -> Now {
        let boot = self.run(time);
        let wall = EPOCH_MS + boot / MS + self.wall_shift_ms - NO_SHIFT_MS;
        Now { mono: Mono(boot.saturating_sub(self.suspended)), boot: Boot(boot), wall: Wall(wall) }
    }

    /// The box was suspended for this long: MONOTONIC did not see it.
    pub const fn suspend(&mut self, span: Time) {
        self.suspended = self.suspended.saturating_add(span);
    }

    /// REALTIME is set, `shift_ms` from an hour back (0) to an hour ahead (7,200,000).
    pub const fn set_wall(&mut self, shift_ms: u64) {
        self.wall_shift_ms = shift_ms;
    }

    /// REALTIME is right again.
    pub const fn mend_wall(&mut self) {
        self.wall_shift_ms = NO_SHIFT_MS;
    }

    /// The world's time until this MONOTONIC moment, rounded up.
    #[must_use]
    pub fn until(&self, time: Time, moment: Mono) -> Time {
        let left = moment.0.saturating_sub(self.now(time).mono.0);
        // The slowest clock needs a little longer.
        left + left / 1000 + 1000
    }
}
