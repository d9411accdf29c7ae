//! The edge: holds listening sockets and waiters, forwards requests to awake hosts.

fn main() {}
