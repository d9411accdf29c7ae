//! What proxy and activator agree on: the wake table, the link's messages, the config file.

pub mod config;
