//! WAL follower, LTX codec, upload and restore.

pub mod clock;
pub mod compact;
pub mod fence;
pub mod follow;
pub mod inspect;
pub mod ltx;
pub mod merge;
pub mod position_file;
pub mod put;
pub mod replica;
pub mod restore;
pub mod spool;
pub mod wal;
pub mod watch;

#[cfg(test)]
mod testkit;
