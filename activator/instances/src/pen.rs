//! The cgroup that holds all instances of one state directory, each in a cgroup of its own below.
//!
//! Its directory is remembered in the state directory: guard and activator are in different cgroups, and
//! a restarted one may be in yet another. There, and not with the sockets, since those may be gone
//! while the instances are not.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cgroup::{Cgroup, home_directory};
use crate::limits;

/// The cgroup of all instances, as the guard has it.
#[derive(Debug)]
pub struct Pen {
    cgroup: Cgroup,
}

impl Pen {
    /// Makes it below this process's own cgroup; unless an activator uses it elsewhere, or something
    /// still runs there.
    ///
    /// # Errors
    /// There is no cgroup v2, it cannot be written, or the kernel is before 5.14.
    pub fn make(state_dir: &Path, in_use: bool) -> io::Result<Self> {
        let former = remembered(state_dir);
        let stays = |cgroup: &Cgroup| in_use || cgroup.is_populated().unwrap_or(true);
        if let Some(cgroup) = former.filter(stays) {
            hand_down_to(&cgroup);
            set_again(state_dir)?;
            return Ok(Self { cgroup });
        }
        Ok(Self { cgroup: make(state_dir)? })
    }

    /// Takes the controllers back from the instances, whose limits are kept for the next [`Pen::make`]:
    /// no process can be put in a cgroup that hands controllers down, so systemd could not start the
    /// guard again in its own.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn let_go(&self, state_dir: &Path) -> io::Result<()> {
        let instances: Vec<_> =
            self.cgroup.children().iter().map(|child| child.dir().to_owned()).collect();
        let lines: Vec<_> = limits::standing(&instances)
            .iter()
            .map(|(file, value)| format!("{}={value}", file.display()))
            .collect();
        fs::write(state_dir.join(STANDING), lines.join("\n"))?;
        limits::take_back(self.cgroup.dir())?;
        self.cgroup.dir().parent().map_or(Ok(()), limits::take_back)
    }

    /// As it is remembered now.
    #[must_use]
    pub fn of(state_dir: &Path) -> Option<Self> {
        Some(Self { cgroup: remembered(state_dir)? })
    }

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.cgroup.dir()
    }

    /// Kills every instance; processes that are being forked included.
    ///
    /// # Errors
    /// The kernel refused; a directory that is gone is no error.
    pub fn kill(&self) -> io::Result<()> {
        self.cgroup.kill()
    }

    /// Whether any process is in it.
    ///
    /// # Errors
    /// It cannot be read, which proves nothing.
    pub fn is_populated(&self) -> io::Result<bool> {
        self.cgroup.is_populated()
    }

    /// A file that reports POLLPRI when it becomes empty or is empty no more; none when it is gone.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn events(&self) -> io::Result<Option<File>> {
        self.cgroup.events()
    }

    /// Instances in which something runs, as `HOST@RUN`.
    #[must_use]
    pub fn populated(&self) -> Vec<String> {
        let children = self.cgroup.children().into_iter();
        let full = children.filter(|child| child.is_populated().unwrap_or(true));
        full.filter_map(|child| Some(child.dir().file_name()?.to_str()?.to_owned())).collect()
    }
}

/// Limits of the instances while nobody enforces them.
const STANDING: &str = "limits";

/// What [`Pen::let_go`] kept; of instances that are gone there is nothing to limit.
fn set_again(state_dir: &Path) -> io::Result<()> {
    let path = state_dir.join(STANDING);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for (file, value) in text.lines().filter_map(|line| line.rsplit_once('=')) {
        if Path::new(file).exists() {
            fs::write(file, value)?;
        }
    }
    fs::remove_file(path)
}

fn memo(state_dir: &Path) -> PathBuf {
    state_dir.join("cgroup")
}

/// The cgroup that was made last, if it is still there.
pub(crate) fn remembered(state_dir: &Path) -> Option<Cgroup> {
    let dir = PathBuf::from(fs::read_to_string(memo(state_dir)).ok()?.trim());
    dir.join("cgroup.procs").exists().then(|| Cgroup::at(dir))
}

/// Makes it below this process's own cgroup, and remembers it.
pub(crate) fn make(state_dir: &Path) -> io::Result<Cgroup> {
    // One a state directory, found again by it.
    let meta = fs::metadata(state_dir)?;
    let name = format!("dormouse-instances.{:x}-{:x}", meta.dev(), meta.ino());
    let cgroup = Cgroup::create(home_directory()?.join(name))?;
    // A probe: both are needed for a proof.
    cgroup.is_populated()?;
    if !cgroup.dir().join("cgroup.kill").exists() {
        return Err(io::Error::other("cgroup.kill is missing: the kernel is before 5.14"));
    }
    hand_down_to(&cgroup);
    fs::write(memo(state_dir), cgroup.dir().display().to_string())?;
    Ok(cgroup)
}

/// From our service's cgroup to that of each instance; what cannot be is told as "not enforced".
fn hand_down_to(cgroup: &Cgroup) {
    if let Some(home) = cgroup.dir().parent() {
        limits::hand_down(home);
        limits::hand_down(cgroup.dir());
    }
}
