//! The object store port, the directory store, and the S3 store.
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
mod ledger;
mod port;
mod probe;
mod s3;
mod scratch;

pub use any::{AnyStore, Gate};
pub use directory::{DirectoryError, DirectoryStore};
pub use layout::{Layout, LtxKey, host_record_key, session_record_key, sessions_prefix};
pub use ledger::{Count, Ledger, Operation, Reading};
pub use port::{
    Age, Body, Condition, DeleteOutcome, LIST_PAGE_KEYS, ListPage, Listed, Meta, Metadata, Object,
    PutOutcome, ReadError, Store,
};
pub use probe::{Probe, ProbeError, probe};
pub use s3::{Checksums, CredentialsFileError, KeySource, S3Settings, S3Store};
