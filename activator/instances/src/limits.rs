//! Limits of one instance: memory, processes, processor time, by the controllers of cgroup v2.
//!
//! A machine that has a controller elsewhere (cgroup v1) or nowhere enforces nothing, and that is told.

use std::fs;
use std::io;
use std::path::Path;

/// What an instance may use; what is absent has no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory over which it is slowed down and its pages are taken back.
    pub memory_high: Option<u64>,
    /// Bytes of memory over which all of it is killed.
    pub memory_max: Option<u64>,
    /// Processes and threads.
    pub pids_max: Option<u32>,
    /// Share of processor time where it is short: 1 to 10,000, 100 is usual.
    pub cpu_weight: Option<u32>,
}

/// A limit that is asked for: the controller's name, the cgroup's file, what is written.
type Setting = (&'static str, &'static str, String);

/// Controllers that limits need.
pub(crate) const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];

impl Limits {
    fn settings(self) -> Vec<Setting> {
        let memory_high = self.memory_high.map(|it| ("memory", "memory.high", it.to_string()));
        let memory_max = self.memory_max.map(|it| ("memory", "memory.max", it.to_string()));
        // An app that lost one of its processes to it is no app any more.
        let together = self.memory_max.map(|_| ("memory", "memory.oom.group", "1".to_owned()));
        let pids = self.pids_max.map(|it| ("pids", "pids.max", it.to_string()));
        let cpu = self.cpu_weight.map(|it| ("cpu", "cpu.weight", it.to_string()));
        [memory_high, memory_max, together, pids, cpu].into_iter().flatten().collect()
    }

    /// Those of its controllers that the cgroups below this one do not have.
    pub(crate) fn missing(self, cgroup: &Path) -> Vec<&'static str> {
        let handed = words(&cgroup.join("cgroup.subtree_control"));
        let mut asked = self.controllers();
        asked.retain(|controller| !handed.iter().any(|word| word == controller));
        asked
    }

    /// Those that it needs.
    pub(crate) fn controllers(self) -> Vec<&'static str> {
        let mut needed: Vec<_> = self.settings().into_iter().map(|(it, ..)| it).collect();
        needed.dedup();
        needed
    }

    /// Sets what this cgroup can enforce.
    ///
    /// # Errors
    /// The kernel refuses a value, which names the file.
    pub(crate) fn apply(self, cgroup: &Path) -> io::Result<()> {
        for (_, file, value) in self.settings() {
            let path = cgroup.join(file);
            if path.exists() {
                fs::write(&path, &value).map_err(|error| {
                    io::Error::new(error.kind(), format!("{} = {value}: {error}", path.display()))
                })?;
            }
        }
        Ok(())
    }
}

/// Hands controllers down to the cgroups below this one, those that it has itself; which ones it hands
/// down now.
pub(crate) fn hand_down(cgroup: &Path) -> Vec<&'static str> {
    let control = cgroup.join("cgroup.subtree_control");
    for controller in words(&cgroup.join("cgroup.controllers")) {
        if CONTROLLERS.contains(&controller.as_str()) {
            // One that is refused is not in the file afterwards.
            fs::write(&control, format!("+{controller}")).ok();
        }
    }
    let handed = words(&control);
    CONTROLLERS.into_iter().filter(|name| handed.iter().any(|word| word == name)).collect()
}

/// Takes all controllers back, so that a process can be moved into this cgroup itself.
pub(crate) fn take_back(cgroup: &Path) -> io::Result<()> {
    let control = cgroup.join("cgroup.subtree_control");
    for controller in words(&control) {
        fs::write(&control, format!("-{controller}"))?;
    }
    Ok(())
}

fn words(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// How often a limit was met, where there is a controller that counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Met {
    /// `memory.max` was reached, and the instance killed.
    pub killed_for_memory: u64,
    /// `memory.high` was exceeded.
    pub slowed_for_memory: u64,
    /// A process could not be started.
    pub pids: u64,
}

impl Met {
    pub(crate) fn of(cgroup: &Path) -> Self {
        let count = |file: &str, name: &str| {
            let text = fs::read_to_string(cgroup.join(file)).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.trim().parse().ok()).unwrap_or_default()
        };
        Self {
            killed_for_memory: count("memory.events", "oom_kill "),
            slowed_for_memory: count("memory.events", "high "),
            pids: count("pids.events", "max "),
        }
    }
}

/// Limits as they stand in the cgroups below this one, to be set again after [`take_back`].
pub(crate) fn standing(cgroups: &[std::path::PathBuf]) -> Vec<(std::path::PathBuf, String)> {
    let files = ["memory.high", "memory.max", "memory.oom.group", "pids.max", "cpu.weight"];
    let mut found = Vec::new();
    for file in cgroups.iter().flat_map(|cgroup| files.map(|file| cgroup.join(file))) {
        if let Ok(value) = fs::read_to_string(&file) {
            found.push((file, value.trim().to_owned()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        memory_high: Some(1 << 20),
        memory_max: Some(2 << 20),
        pids_max: Some(7),
        cpu_weight: None,
    };

    /// A folder with the files that a cgroup of these controllers has.
    fn tree(controllers: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (controller, file) in [
            ("memory", "memory.high"),
            ("memory", "memory.max"),
            ("memory", "memory.oom.group"),
            ("pids", "pids.max"),
            ("cpu", "cpu.weight"),
        ] {
            if controllers.contains(&controller) {
                fs::write(dir.path().join(file), "max").unwrap();
            }
        }
        fs::write(dir.path().join("cgroup.controllers"), controllers.join(" ")).unwrap();
        fs::write(dir.path().join("cgroup.subtree_control"), "").unwrap();
        dir
    }

    #[test]
    fn limits_are_written_where_there_is_a_controller_and_named_where_there_is_none() {
        let read =
            |dir: &tempfile::TempDir, file| fs::read_to_string(dir.path().join(file)).unwrap();
        let whole = tree(&["cpu", "memory", "pids"]);
        LIMITS.apply(whole.path()).unwrap();
        assert_eq!(read(&whole, "memory.high"), "1048576");
        assert_eq!(read(&whole, "memory.max"), "2097152");
        assert_eq!(read(&whole, "memory.oom.group"), "1");
        assert_eq!(read(&whole, "pids.max"), "7");
        assert_eq!(read(&whole, "cpu.weight"), "max", "nobody asked for it");
        let half = tree(&["pids"]);
        LIMITS.apply(half.path()).unwrap();
        assert_eq!(read(&half, "pids.max"), "7");
        fs::write(half.path().join("cgroup.subtree_control"), "cpu pids\n").unwrap();
        assert_eq!(LIMITS.missing(half.path()), ["memory"]);
        assert_eq!(LIMITS.missing(tree(&[]).path()), ["memory", "pids"]);
        assert!(Limits::default().missing(tree(&[]).path()).is_empty());
    }

    #[test]
    fn a_value_that_is_refused_names_the_file() {
        let dir = tree(&["pids"]);
        fs::remove_file(dir.path().join("pids.max")).unwrap();
        fs::create_dir(dir.path().join("pids.max")).unwrap();
        let error = LIMITS.apply(dir.path()).unwrap_err().to_string();
        assert!(error.contains("pids.max = 7"), "{error}");
    }

    #[test]
    fn what_a_limit_did_is_read_from_its_events() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Met::of(dir.path()), Met::default());
        fs::write(
            dir.path().join("memory.events"),
            "low 0\nhigh 4\nmax 2\noom 1\noom_kill 3\noom_group_kill 1\n",
        )
        .unwrap();
        fs::write(dir.path().join("pids.events"), "max 9\n").unwrap();
        let met = Met { killed_for_memory: 3, slowed_for_memory: 4, pids: 9 };
        assert_eq!(Met::of(dir.path()), met);
    }

    #[test]
    fn standing_limits_are_found_with_their_values() {
        let dir = tree(&["memory", "pids"]);
        LIMITS.apply(dir.path()).unwrap();
        let found = standing(&[dir.path().to_owned()]);
        assert_eq!(found.len(), 4);
        assert!(found.contains(&(dir.path().join("pids.max"), "7".to_owned())), "{found:?}");
    }
}
