//! Types shared with the kernel side.
