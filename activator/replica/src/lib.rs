//! WAL follower, LTX codec, upload and restore.

pub mod ltx;
