//! /proc, read for what a cgroup cannot tell: marked processes where there is no cgroup v2.

use std::fs;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Environment variable that marks every process of an instance with its identity.
pub(crate) const MARK: &str = "DORMOUSE_INSTANCE";

/// One process that carries a mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Marked {
    pub(crate) pid: i32,
    /// The mark's value.
    pub(crate) identity: String,
}

/// All live processes that carry a mark. Zombies have no environment and do not count.
pub(crate) fn marked() -> Vec<Marked> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter_map(|pid| Some(Marked { pid, identity: mark_of(pid)? }))
        .collect()
}

fn mark_of(pid: i32) -> Option<String> {
    let environ = fs::read(Path::new("/proc").join(pid.to_string()).join("environ")).ok()?;
    let prefix = format!("{MARK}=");
    environ
        .split(|byte| *byte == 0)
        .filter_map(|entry| std::str::from_utf8(entry).ok())
        .find_map(|entry| entry.strip_prefix(&prefix).map(str::to_owned))
}

/// Kills all live processes with this identity; true when there was none.
pub(crate) fn kill_marked(identity: &str) -> bool {
    let found: Vec<Marked> =
        marked().into_iter().filter(|marked| marked.identity == identity).collect();
    for marked in &found {
        // One that is gone by now needs no signal.
        kill(Pid::from_raw(marked.pid), Signal::SIGKILL).ok();
    }
    found.is_empty()
}

/// Whether any live process carries this identity.
pub(crate) fn any_marked(identity: &str) -> bool {
    marked().iter().any(|marked| marked.identity == identity)
}

/// When a process began, in clock ticks since boot; none when there is none.
pub(crate) fn began(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 22; the name in parentheses, field 2, may hold anything.
    stat.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()
}

/// Children of this process that have ended and that nobody has collected (proc(5), `stat`).
pub(crate) fn zombie_children() -> Vec<i32> {
    let own = std::process::id().to_string();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // The name in parentheses may hold anything: what counts begins behind the last one.
            let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
            fields.next() == Some("Z") && fields.next() == Some(own.as_str())
        })
        .collect()
}
