//! The object store port, and the directory store.
//!
//! A [`Store`] holds small named objects with an `ETag` and metadata, and honours conditions.
//! Outcomes are typed for the caller: a failed condition, a conflict, an unknown outcome, a
//! refusal and a broken store ask for different next steps.
//!
//! Knows no LTX, no lease and no session; decides nothing and repeats nothing by itself.

mod any;
#[cfg(any(test, feature = "contract"))]
pub mod contract;
mod directory;
mod layout;
mod port;
mod probe;
mod scratch;

pub use any::AnyStore;
pub use directory::{DirectoryError, DirectoryStore};
pub use layout::{Layout, LtxKey, host_record_key, session_record_key, sessions_prefix};
pub use port::{
    Age, Body, Condition, DeleteOutcome, LIST_PAGE_KEYS, ListPage, Listed, Meta, Metadata, Object,
    PutOutcome, ReadError, Store,
};
pub use probe::{Probe, ProbeError, probe};
