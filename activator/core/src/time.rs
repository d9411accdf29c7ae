//! The three clocks, always handed in together.

use core::ops::Add;

use serde::{Deserialize, Serialize};

use crate::ids::Nonce;

/// `CLOCK_MONOTONIC` nanoseconds: idle times, budgets, backoff. Stands still in suspend.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Mono(pub u64);

/// `CLOCK_BOOTTIME` nanoseconds: session deadlines. Goes on in suspend.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Boot(pub u64);

/// `CLOCK_REALTIME` milliseconds since 1970: due times, and the third guard of a deadline.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Wall(pub u64);

/// Nanoseconds between two readings of a clock.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Nanos(pub u64);

/// Nanoseconds in a second.
pub const SECOND_NS: u64 = 1_000_000_000;
/// Nanoseconds in a millisecond.
pub const MILLI_NS: u64 = 1_000_000;

impl Nanos {
    /// That many seconds.
    #[must_use]
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds.saturating_mul(SECOND_NS))
    }

    /// That many milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(MILLI_NS))
    }

    /// Twice as long, at most `max`.
    #[must_use]
    pub fn doubled(self, max: Self) -> Self {
        Self(self.0.saturating_mul(2)).min(max)
    }

    /// Up to a quarter longer, by the nonce of what is repeated: what failed together does not return
    /// together.
    #[must_use]
    pub(crate) fn jittered(self, nonce: &Nonce) -> Self {
        let add = |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte));
        let sum = nonce.0.bytes().fold(0, add);
        Self(self.0.saturating_add(self.0 / 4 * (sum % 64) / 64))
    }

    /// Whole seconds, rounded up: for `Retry-After`.
    #[must_use]
    pub const fn secs_up(self) -> u64 {
        self.0.div_ceil(SECOND_NS)
    }
}

impl Add<Nanos> for Mono {
    type Output = Self;

    fn add(self, span: Nanos) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

impl Add<Nanos> for Boot {
    type Output = Self;

    fn add(self, span: Nanos) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

impl Add<Nanos> for Wall {
    type Output = Self;

    /// Rounds down to milliseconds: a deadline may come early, never late.
    #[expect(clippy::suspicious_arithmetic_impl, reason = "nanoseconds become milliseconds")]
    fn add(self, span: Nanos) -> Self {
        Self(self.0.saturating_add(span.0 / MILLI_NS))
    }
}

impl Wall {
    /// As signed milliseconds since 1970, which LTX headers carry.
    #[must_use]
    pub fn unix_ms(self) -> i64 {
        i64::try_from(self.0).unwrap_or(i64::MAX)
    }
}

impl Mono {
    /// Time since an earlier reading; zero when it is not earlier.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

/// One reading of all three clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Now {
    /// For idle times and budgets.
    pub mono: Mono,
    /// For deadlines.
    pub boot: Boot,
    /// For due times, and deadlines too.
    pub wall: Wall,
}

/// A moment by all three clocks: reached when the first of them reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Deadline {
    /// By the clock that stands still in suspend.
    pub mono: Mono,
    /// By the clock that does not.
    pub boot: Boot,
    /// By the clock that an operator can move.
    pub wall: Wall,
}

impl Deadline {
    /// `span` after `start`.
    #[must_use]
    pub fn after(start: Now, span: Nanos) -> Self {
        Self { mono: start.mono + span, boot: start.boot + span, wall: start.wall + span }
    }

    /// How long until the first of the clocks reaches it.
    #[must_use]
    pub fn left(&self, now: Now) -> Nanos {
        let mono = self.mono.since(now.mono).0;
        let boot = self.boot.0.saturating_sub(now.boot.0);
        let wall = self.wall.0.saturating_sub(now.wall.0).saturating_mul(MILLI_NS);
        Nanos(mono.min(boot).min(wall))
    }

    /// Whether the first of the clocks has reached it.
    #[must_use]
    pub fn passed(&self, now: Now) -> bool {
        now.mono >= self.mono || now.boot >= self.boot || now.wall >= self.wall
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_passed_when_the_first_clock_reaches_it() {
        let start = Now { mono: Mono(10), boot: Boot(20), wall: Wall(30) };
        let deadline = Deadline::after(start, Nanos::from_millis(5));
        assert!(!deadline.passed(start));
        assert!(deadline.passed(Now { mono: Mono(10 + 5 * MILLI_NS), ..start }));
        assert!(deadline.passed(Now { boot: Boot(20 + 5 * MILLI_NS), ..start }));
        assert!(deadline.passed(Now { wall: Wall(35), ..start }));
    }
}
