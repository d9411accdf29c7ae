//! WAL follower, LTX codec, upload and restore.

pub mod ltx;
pub mod wal;
