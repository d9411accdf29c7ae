//! WAL follower, LTX codec, upload and restore.
