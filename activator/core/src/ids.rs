//! Numbers and names that wear types, so that no two bare `u64` stand in a row.

use alloc::string::String;
use core::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The number after this one. Saturates: 2^64 is out of reach of any real history.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// Fencing number of a host's lease; rises at every acquisition and never resets.
    Generation
);
number!(
    /// Fencing number of a box's session.
    Epoch
);
number!(
    /// Number of an LTX file in a host's replica; 0 means "nothing yet", the first file is 1.
    Txid
);
number!(
    /// Number of one start of a host's process; from the registry, never repeated.
    Run
);
number!(
    /// Number of one wake or sleep of a host; an answer that carries an old one is dropped.
    Attempt
);

/// A host's index in the wake table and in the core.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Slot(pub u32);

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! text {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }
    };
}

text!(
    /// An entity tag as the store gave it, quotes included; compared byte for byte.
    ETag
);
text!(
    /// Random text that makes one PUT recognisable as ours (`ETags` may be content hashes).
    Nonce
);
text!(
    /// Random identity of a state directory; a copy of a box's name with another id is another box.
    BoxId
);
text!(
    /// A box's configured name.
    BoxName
);
text!(
    /// A served name in its canonical form: lower case, no port, no trailing dot.
    Host
);
