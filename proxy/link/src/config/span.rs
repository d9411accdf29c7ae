//! A duration written as a number and a unit.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A duration written as a whole number and a unit: `200ms`, `30s`, `15m`, `2h`, `1d`. At least 1 ms,
/// at most 3650 days.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(Duration);

impl Span {
    /// That many seconds.
    #[must_use]
    pub const fn from_secs(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    /// That many milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(Duration::from_millis(millis))
    }

    /// As the standard library's type.
    #[must_use]
    pub const fn duration(self) -> Duration {
        self.0
    }

    /// In nanoseconds; saturates after 584 years.
    #[must_use]
    pub fn as_nanos(self) -> u64 {
        u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX)
    }

    /// In milliseconds.
    #[must_use]
    pub fn as_millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Ten years. Times this, and sums of a few of these with a clock, stay far below 2⁶⁴ nanoseconds.
const MAX_MS: u64 = 3650 * 86_400_000;

pub(super) const ALLOWED: &str = "a whole number above 0 with a unit: ms, s, m, h or d (for example \"15m\"), at most \
                       3650d";

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(split);
        let bad = || format!("{text:?} is not a duration; allowed: {ALLOWED}");
        let count: u64 = digits.parse().map_err(|_| bad())?;
        let unit_ms: u64 = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(bad()),
        };
        match count.checked_mul(unit_ms) {
            Some(millis @ 1..=MAX_MS) => Ok(Self::from_millis(millis)),
            _ => Err(bad()),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.as_millis();
        for (unit, unit_ms) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)] {
            if millis > 0 && millis.is_multiple_of(unit_ms) {
                return write!(f, "{}{unit}", millis / unit_ms);
            }
        }
        write!(f, "{millis}ms")
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_with_a_unit_is_a_duration_and_prints_as_one() {
        for text in ["200ms", "90s", "15m", "2h", "3d", "3650d"] {
            let span: Span = text.parse().unwrap();
            assert_eq!(span.to_string(), text);
        }
    }

    #[test]
    fn anything_else_says_what_is_allowed() {
        for text in [
            "",
            "15",
            "m",
            "0s",
            "-1s",
            "1.5s",
            "1 s",
            "99999999999999999999d",
            "9999999d",
            "3651d",
        ] {
            let error = text.parse::<Span>().unwrap_err();
            assert!(error.contains("allowed:"), "{text}: {error}");
        }
    }
}
