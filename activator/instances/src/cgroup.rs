//! One cgroup v2 directory: made, killed, frozen, proven empty (kernel 5.14+ for `cgroup.kill`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::spawn::CgroupFds;

/// Which of our processes: its own cgroup below its service's is called so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaf {
    /// The activator's.
    Activator,
    /// The guard's.
    Guard,
}

impl Leaf {
    const ALL: [Self; 2] = [Self::Activator, Self::Guard];

    const fn name(self) -> &'static str {
        match self {
            Self::Activator => "activator",
            Self::Guard => "guard",
        }
    }
}
/// Where cgroup v2 is mounted: alone, or beside v1 (hybrid).
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// The cgroup v2 directory of this process, when the machine has one.
fn own_directory() -> io::Result<PathBuf> {
    let mount = MOUNTS
        .iter()
        .map(Path::new)
        .find(|mount| mount.join("cgroup.procs").exists())
        .ok_or_else(|| io::Error::other("no cgroup v2 is mounted"))?;
    let text = fs::read_to_string("/proc/self/cgroup")?;
    let own = text
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .ok_or_else(|| io::Error::other("this process is in no v2 cgroup"))?;
    Ok(mount.join(own.trim_start_matches('/')))
}

/// Moves this process from its service's cgroup into a leaf below: a cgroup that has processes of its
/// own can hand no controllers to those of the instances, which come beside the leaf.
pub fn settle_in_leaf(leaf: Leaf) -> io::Result<()> {
    let name = leaf.name();
    // Without cgroup v2 there is nothing to move in.
    let Ok(own) = own_directory() else { return Ok(()) };
    if own.ends_with(name) {
        return Ok(());
    }
    let leaf = own.join(name);
    fs::create_dir_all(&leaf)?;
    fs::write(leaf.join("cgroup.procs"), "0")
}

/// Where instances may be: below our service's cgroup, not below our leaf of it.
pub(crate) fn home_directory() -> io::Result<PathBuf> {
    let own = own_directory()?;
    Ok(match own.parent() {
        Some(parent) if Leaf::ALL.iter().any(|leaf| own.ends_with(leaf.name())) => {
            parent.to_owned()
        }
        Some(_) | None => own,
    })
}

/// One cgroup.
#[derive(Clone, Debug)]
pub(crate) struct Cgroup {
    dir: PathBuf,
}

impl Cgroup {
    /// Makes the directory, with its parents.
    pub(crate) fn create(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        Ok(Self { dir })
    }

    /// A directory that is there already.
    pub(crate) const fn at(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// What a child needs to be started in it.
    pub(crate) fn descriptors(&self) -> io::Result<CgroupFds> {
        let procs = OpenOptions::new().write(true).open(self.dir.join("cgroup.procs"))?;
        Ok(CgroupFds { dir: File::open(&self.dir)?, procs })
    }

    /// Its directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its `cgroup.events`: reports an exceptional condition (POLLPRI) when the cgroup becomes empty,
    /// or is empty no more, since it was last read. None when the directory is gone.
    pub(crate) fn events(&self) -> io::Result<Option<File>> {
        match File::open(self.dir.join("cgroup.events")) {
            Ok(file) => Ok(Some(file)),
            Err(error) if is_removed(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Those directly below.
    pub(crate) fn children(&self) -> Vec<Self> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).map(Self::at).collect()
    }

    /// Whether any process is in it or below.
    pub(crate) fn is_populated(&self) -> io::Result<bool> {
        match fs::read_to_string(self.dir.join("cgroup.events")) {
            Ok(text) => Ok(says_populated(&text)),
            Err(error) if is_removed(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Kills all of it, forks in flight included.
    pub(crate) fn kill(&self) -> io::Result<()> {
        match fs::write(self.dir.join("cgroup.kill"), "1") {
            // Before Linux 5.14 the file is missing, and the directory is not.
            Err(error) if is_removed(&error) && !self.dir.exists() => Ok(()),
            other => other,
        }
    }

    /// Stops or starts the scheduling of all of it.
    pub(crate) fn freeze(&self, frozen: bool) -> io::Result<()> {
        fs::write(self.dir.join("cgroup.freeze"), if frozen { "1" } else { "0" })
    }

    /// Pids in it, not below it.
    pub(crate) fn pids(&self) -> Vec<i32> {
        let text = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Removes the empty directory.
    pub(crate) fn remove(&self) {
        // Below an instance there may be cgroups that it made itself.
        for child in self.children() {
            child.remove();
        }
        // A directory that stays is empty, and is found and removed at the next start.
        drop(fs::remove_dir(&self.dir));
    }

    /// Waits until no process is in it or below.
    pub(crate) async fn empty(&self) -> io::Result<()> {
        let Some(events) = self.events()? else { return Ok(()) };
        // SAFETY: the file is owned by the `AsyncFd` and closed with it.
        let events = unsafe { AsyncFd::register_with_interest(events, Interest::PRIORITY) }?;
        loop {
            // Reading rearms the notification: what changes afterwards wakes us.
            let mut file = events.get_ref();
            let mut text = String::new();
            file.rewind()?;
            match file.read_to_string(&mut text) {
                Ok(_) if !says_populated(&text) => return Ok(()),
                Ok(_) => {}
                Err(error) if is_removed(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
            events.ready(Interest::PRIORITY).await?.clear_ready();
        }
    }
}

/// The directory was removed, perhaps just now: nothing can be in it.
fn is_removed(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

fn says_populated(events: &str) -> bool {
    events.lines().any(|line| line == "populated 1")
}
