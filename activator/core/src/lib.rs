//! Every decision of the activator. Does no I/O, reads no clock, never logs, cannot fail.

#![no_std]

extern crate alloc;

pub mod ids;
pub mod position;
pub mod record;
pub mod time;
pub mod upload;
