//! Real S3 servers, and a faulty network before them, for tests and benchmarks.
//!
//! A server runs on free ports of the loopback, in a fresh directory, and is killed by its process
//! id when it is dropped. Start one a test binary and give each test a prefix or a bucket.

mod faults;
mod scripted;
mod server;

pub use faults::{Fault, FaultProxy};
pub use scripted::{Said, Scripted};
pub use server::{ACCESS_KEY, SECRET_KEY, Server};
