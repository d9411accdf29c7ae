//! Processes and cgroups: spawn, kill, prove.
