//! What proxy and activator agree on: the wake table, the link's messages, the config file.
//!
//! - [`config`]: the one TOML file that both processes read.
//! - [`word`]: slots, run numbers, and what a slot's word can say.
//! - [`protocol`]: the few atomic steps that both sides take, model-checked with loom.
//! - [`table`]: the memory these steps work on: memfds, their seals, their checks.
//! - [`told`], [`Quiet`]: how both tell an error, and what clients could repeat at will.
//! - [`message`], [`socket`]: versioned messages over a `SOCK_SEQPACKET` socket, with descriptors.
//!
//! Starts no thread, reads no clock, knows no HTTP and no object store.
#![cfg_attr(
    not(loom),
    expect(unsafe_code, reason = "custody of shared mappings and of passed fds")
)]

pub mod config;
#[cfg(not(loom))]
mod map;
#[cfg(not(loom))]
pub mod message;
pub mod protocol;
mod quiet;
#[cfg(not(loom))]
pub mod socket;
mod sync;
#[cfg(not(loom))]
pub mod table;
mod told;
pub mod word;

pub use protocol::{Counters, Entry, NotStopped, OwnWord, ReadWord, Request};
pub use quiet::Quiet;
#[cfg(loom)]
pub use sync::with_fences;
pub use told::told;
pub use word::{Refusal, RunNumber, Slot, Word};
