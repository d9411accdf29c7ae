//! Slow constants as settings, so that tests set them small.

use alloc::string::String;

use serde::{Deserialize, Serialize};

use crate::ids::{BoxId, BoxName};
use crate::time::Nanos;

/// Who this box is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Its name.
    pub name: BoxName,
    /// Its random id.
    pub id: BoxId,
    /// The kernel's boot id.
    pub boot_id: String,
}

/// Whether another box's session may be ended by time alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TakeoverMode {
    /// Only an operator's word ends it: a store outage stops no app.
    #[default]
    Manual,
    /// It is fenced once it is dead, and this box stops its hosts at its own deadline.
    Automatic,
}

/// Settings of the core.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Settings {
    /// Who this box is.
    pub identity: Identity,
    /// How long a renewal lasts.
    pub ttl: Nanos,
    /// How long before its end the box stops writing.
    pub margin: Nanos,
    /// Whether sessions end by time.
    #[serde(default)]
    pub takeover: TakeoverMode,
    /// The whole of one wake.
    pub wake_budget: Nanos,
    /// First wait after a failed wake, and the longest.
    pub backoff: Nanos,
    /// Longest wait after failed wakes.
    pub backoff_max: Nanos,
    /// From SIGTERM to SIGKILL.
    pub grace: Nanos,
    /// From SIGKILL to "cannot be proven", and between repeated kills.
    pub proof: Nanos,
    /// First wait before a store request is repeated.
    pub retry: Nanos,
    /// Longest wait before a store request is repeated.
    pub retry_max: Nanos,
    /// Wakes that are under way at a time; 0 means no limit.
    #[serde(default)]
    pub wakes_max: u32,
    /// Thousandths of the time in which something waits for memory: hosts are put to sleep from the
    /// first on, until it is below the second.
    #[serde(default)]
    pub pressure_high: u32,
    /// See `pressure_high`.
    #[serde(default)]
    pub pressure_low: u32,
}

impl Settings {
    /// The defaults of DESIGN sections 4 and 5.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        Self {
            identity,
            ttl: Nanos::from_secs(30),
            margin: Nanos::from_secs(5),
            takeover: TakeoverMode::Manual,
            wake_budget: Nanos::from_secs(300),
            backoff: Nanos::from_secs(1),
            backoff_max: Nanos::from_secs(60),
            grace: Nanos::from_secs(20),
            proof: Nanos::from_secs(5),
            retry: Nanos::from_millis(200),
            retry_max: Nanos::from_secs(10),
            wakes_max: 32,
            pressure_high: 100,
            pressure_low: 50,
        }
    }

    /// How long a renewal may be acted upon, from before its first send.
    #[must_use]
    pub fn usable(&self) -> Nanos {
        Nanos(self.ttl.0.saturating_sub(self.margin.0))
    }
}
