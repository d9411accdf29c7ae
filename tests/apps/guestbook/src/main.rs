//! The guestbook: a small real app for demo and tests.

fn main() {}
