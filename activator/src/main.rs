//! The activator: owns instances, and is the command line.

fn main() {}
