//! WAL follower, LTX codec, upload and restore.

pub mod follow;
pub mod ltx;
pub mod restore;
pub mod spool;
pub mod wal;

#[cfg(test)]
mod testkit;
