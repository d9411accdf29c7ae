//! One host's database in the store: followed, uploaded, restored, in Litestream 0.5's LTX layout.
//!
//! Before a start: [`inspect`] the local copy; [`restore`] it under a temporary name, [`fence`]
//! it, adopt it; or keep it behind a full image. Then [`replica`] takes the read lock, follows
//! the WAL while the app runs, and finishes after the app is gone; [`levels`] and [`compact`] keep
//! the next restore cheap, awake and at sleep. What is uploaded when, and what an answer means, is decided in
//! `dormouse_core::upload`.
//!
//! Knows no lease and no session but for the deadline it is given; starts no process; adds
//! nothing to the app's schema; asks the store nothing while a database is idle.

pub mod clock;
pub mod compact;
pub mod fence;
pub mod follow;
pub mod holders;
pub mod inspect;
pub mod levels;
pub mod ltx;
pub mod merge;
pub mod position_file;
pub mod put;
pub mod replica;
pub mod restore;
pub mod spool;
pub mod verify;
pub mod wal;
pub mod watch;

#[cfg(test)]
mod faulty;
#[cfg(test)]
mod testkit;
