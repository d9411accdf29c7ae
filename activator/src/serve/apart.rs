//! How instances are kept apart, as `status` tells it: held together, users, Landlock, limits.

use dormouse_instances::{Containment, Instance, landlock_works};
use dormouse_link::config::Instances;

use super::driver::{Driver, Hosted};
use super::{owner, start};

impl Driver {
    /// How they are held together.
    pub(crate) fn containment(&self) -> String {
        match self.parts.nursery.containment() {
            Containment::Cgroup(dir) => format!("cgroup {}", dir.display()),
            Containment::Scan(reason) => format!("scan of /proc ({reason})"),
        }
    }

    /// The limits of a host, those that this machine does not enforce, and how often it met them.
    pub(crate) fn limits(&self, hosted: &Hosted) -> Option<String> {
        let limits = start::limits_of(&hosted.app.limits);
        let of = hosted.app.limits;
        let asked: Vec<String> = [
            of.memory_high_mib.map(|mib| format!("memory high {mib} MiB")),
            of.memory_max_mib.map(|mib| format!("memory max {mib} MiB")),
            of.pids_max.map(|pids| format!("pids {pids}")),
            of.cpu_weight.map(|weight| format!("cpu weight {weight}")),
        ]
        .into_iter()
        .flatten()
        .collect();
        if asked.is_empty() {
            return None;
        }
        let unenforced = self.parts.nursery.unenforced(limits);
        let not = if unenforced.is_empty() {
            String::new()
        } else {
            format!("; NOT ENFORCED here, the machine has no controller for it: {unenforced:?}")
        };
        let met = hosted.instance.as_ref().map(Instance::met).unwrap_or_default();
        let met: Vec<String> = [
            ("killed for memory", met.killed_for_memory),
            ("slowed for memory", met.slowed_for_memory),
            ("refused a process", met.pids),
        ]
        .into_iter()
        .filter(|(_, times)| *times > 0)
        .map(|(what, times)| format!("; {what} {times} times"))
        .collect();
        Some(format!("{}{not}{}", asked.join(", "), met.concat()))
    }
}

/// Users and Landlock.
pub(crate) fn isolation(instances: &Instances) -> String {
    let users = match (owner::are_own(instances), instances.own_users) {
        (true, _) => "a user of its own each",
        (false, true) => "all run as the activator's user, which is not root",
        (false, false) => "all run as the activator's user (instances.own_users)",
    };
    let landlock = match (instances.landlock, landlock_works()) {
        (true, true) => "files by Landlock",
        (true, false) => "files NOT restricted: this kernel has no Landlock",
        (false, _) => "files not restricted (instances.landlock)",
    };
    format!("{users}, {landlock}")
}
