//! Slots, run numbers, and what a slot's word can say, packed into one `u64`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Index of a host in the wake table, in each proxy's area, and in the kernel's maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(pub u32);

impl Slot {
    /// The slot as an index; a `u32` fits a `usize` on every target this runs on.
    #[must_use]
    pub fn index(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of one start of a host's process; from the registry, never repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunNumber(pub u64);

impl fmt::Display for RunNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A word keeps its kind in the top byte, so a run number has 56 bits: 2,000 starts a second for
/// a million years.
pub const RUN_MAX: u64 = (1 << KIND_SHIFT) - 1;

const KIND_SHIFT: u32 = 56;

/// What the activator says about a slot. All-zero memory says [`Word::Asleep`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    /// No instance; a request posts a wake.
    Asleep,
    /// A wake is under way; a request joins it.
    Waking,
    /// This run serves.
    Awake {
        /// The only run that requests may be sent to.
        run: RunNumber,
    },
    /// The run is being stopped; a request is remembered and wakes the host again.
    Stopping {
        /// The run that is going.
        run: RunNumber,
    },
    /// Requests are refused at once.
    Refusing {
        /// Why, for the reason header.
        reason: Refusal,
    },
}

impl Word {
    /// The word as it stands in shared memory.
    ///
    /// # Panics
    /// When a run number exceeds [`RUN_MAX`]: it would be read as another kind.
    #[must_use]
    pub fn pack(self) -> u64 {
        let (kind, payload) = match self {
            Self::Asleep => (0_u64, 0),
            Self::Waking => (1, 0),
            Self::Awake { run } => (2, run.0),
            Self::Stopping { run } => (3, run.0),
            Self::Refusing { reason } => (4, u64::from(reason.code())),
        };
        assert!(payload <= RUN_MAX, "invariant 8: run number {payload} does not fit a word");
        (kind << KIND_SHIFT) | payload
    }

    /// Reads a word; one that this version does not know refuses with [`Refusal::Unknown`].
    #[must_use]
    pub fn unpack(raw: u64) -> Self {
        let payload = raw & RUN_MAX;
        match raw >> KIND_SHIFT {
            0 => Self::Asleep,
            1 => Self::Waking,
            2 => Self::Awake { run: RunNumber(payload) },
            3 => Self::Stopping { run: RunNumber(payload) },
            4 => Self::Refusing { reason: Refusal::from_code(payload) },
            _ => Self::Refusing { reason: Refusal::Unknown },
        }
    }
}

macro_rules! refusals {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// Why a request is not served. The text goes into the header `x-dormouse-reason`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Refusal {
            $($(#[$doc])* $name,)*
        }

        impl Refusal {
            /// Every reason, in the order of their codes.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Text for the reason header: lower case and hyphens.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Code inside a word.
            #[must_use]
            pub const fn code(self) -> u8 {
                match self { $(Self::$name => $code,)* }
            }

            /// The reason of a code; a code of a later version is [`Refusal::Unknown`].
            #[must_use]
            pub const fn from_code(code: u64) -> Self {
                match code { $($code => Self::$name,)* _ => Self::Unknown }
            }
        }
    };
}

refusals! {
    /// A reason of a later version, or a word that cannot be read.
    Unknown = 0, "unknown";
    /// Another box owns the host's lease.
    Elsewhere = 1, "elsewhere";
    /// The app's build cannot start.
    Broken = 2, "broken";
    /// The last stop could not be proven.
    Unproven = 3, "unproven";
    /// Earlier wakes failed; the next try comes later.
    Backoff = 4, "backoff";
    /// The store does not answer, and this box holds no lease for the host.
    StoreDown = 5, "store-down";
    /// The host's or the box's bound on waiters is reached.
    TooManyWaiters = 6, "too-many-waiters";
    /// The waiter's deadline passed.
    WakeTimedOut = 7, "wake-timed-out";
    /// The wake failed.
    WakeFailed = 8, "wake-failed";
    /// The session's deadline passed: nothing is sent to any instance.
    SessionExpired = 9, "session-expired";
    /// No activator is connected and the host is asleep.
    NoActivator = 10, "no-activator";
    /// A sidecar's request, which never wakes a host.
    SidecarAsleep = 11, "asleep";
    /// An operator keeps the host down, or it was removed.
    Held = 12, "held";
    /// The replica is corrupt or has a gap: no older state is served.
    ReplicaDamaged = 13, "replica-damaged";
    /// The proxy or the activator is shutting down.
    ShuttingDown = 14, "shutting-down";
    /// The database is none that can be replicated: not in WAL mode, encrypted, overwritten.
    DatabaseUnfit = 15, "database-unfit";
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_word_survives_packing() {
        let run = RunNumber(RUN_MAX);
        let mut words =
            vec![Word::Asleep, Word::Waking, Word::Awake { run }, Word::Stopping { run }];
        words.extend(Refusal::ALL.iter().map(|&reason| Word::Refusing { reason }));
        for word in words {
            assert_eq!(Word::unpack(word.pack()), word);
        }
        assert_eq!(Word::Asleep.pack(), 0, "fresh memory must say asleep");
    }

    #[test]
    fn an_unknown_word_refuses() {
        let unknown = Word::Refusing { reason: Refusal::Unknown };
        assert_eq!(Word::unpack(u64::MAX), unknown);
        assert_eq!(Word::unpack((4 << 56) | 0xfa), unknown);
    }
}
