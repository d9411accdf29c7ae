//! Processes and cgroups: spawn, kill, prove.
//!
//! An instance is everything that a run started: its process and all descendants. It lives in a
//! cgroup of its own where the machine has cgroup v2; elsewhere this process is the subreaper of
//! its descendants and an instance is known by a mark in its environment. A stop is complete when
//! nothing of it is left, not when its first process has exited.
//!
//! Decides nothing: when to stop, and how long to wait, is the caller's. Knows no database, no store.
#![expect(unsafe_code, reason = "custody of clone, exec and descriptors inherited over it")]

mod cgroup;
mod confine;
mod environment;
mod health;
mod inherited;
mod instance;
mod limits;
mod nursery;
mod open_files;
mod pen;
mod processes;
mod spawn;
mod stalls;

pub use cgroup::{Leaf, settle_in_leaf};
pub use confine::{Confine, landlock_works};
pub use environment::{EnvError, environment_of, parse_env_file};
pub use health::{Health, wait_healthy};
pub use inherited::take_inherited;
pub use instance::{Instance, LeaderId};
pub use limits::{Limits, Met};
pub use nursery::{Containment, Leftover, Nursery, SpawnError, Start};
pub use pen::Pen;
pub use stalls::StallTrigger;
