//! Where instances are started, and where those of an earlier activator are found.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::cgroup::{Cgroup, home_directory};
use crate::confine::Confine;
use crate::instance::{Boundary, Instance, leaders};
use crate::limits::Limits;
use crate::pen::{make, remembered};
use crate::processes::{self, MARK};
use crate::spawn::{CgroupFds, Prepared, spawn};

/// How instances are held together on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Containment {
    /// A cgroup an instance, below this directory.
    Cgroup(PathBuf),
    /// Child subreaper and a scan of /proc, for this reason.
    Scan(String),
}

/// What to start.
#[derive(Debug)]
pub struct Start {
    /// The host, as a directory name.
    pub host: String,
    /// The number of the run.
    pub run: u64,
    /// Executable, an absolute path.
    pub program: PathBuf,
    /// Arguments, without the program's own name.
    pub args: Vec<String>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// Working directory.
    pub dir: PathBuf,
    /// Where stdout and stderr go.
    pub log: PathBuf,
    /// Handed over as descriptor 3 with `LISTEN_FDS=1`.
    pub listener: Option<OwnedFd>,
    /// User and group that it runs as; absent: ours.
    pub user: Option<u32>,
    /// What it can reach of the file system; absent: all that its user can.
    pub confine: Option<Confine>,
    /// What it may use.
    pub limits: Limits,
}

/// An instance that an earlier activator left running.
#[derive(Debug)]
pub struct Leftover {
    /// The host.
    pub host: String,
    /// Its run.
    pub run: u64,
    /// To be stopped.
    pub instance: Instance,
}

/// Why an instance was not started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// Its executable cannot be run.
    #[error("{program}: {source}")]
    Exec {
        /// The executable.
        program: String,
        /// Which step failed and why.
        source: io::Error,
    },
    /// Its log cannot be opened.
    #[error("{path}: cannot be opened for the instance's output: {source}")]
    Log {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Its cgroup cannot be made.
    #[error("no cgroup for the instance: {0}")]
    Cgroup(io::Error),
    /// What it can reach cannot be restricted.
    #[error("no Landlock ruleset for the instance: {0}")]
    Confine(io::Error),
    /// A path or value has a zero byte in it.
    #[error("{0} has a zero byte in it")]
    Zero(&'static str),
}

/// A log that has grown over this is moved aside at the next start.
const LOG_BYTES_MAX: u64 = 10 * 1024 * 1024; // and one older file: 20 MiB a host

/// Where instances are started.
#[derive(Clone, Debug)]
pub struct Nursery {
    containment: Containment,
}

impl Nursery {
    /// Finds out how instances can be held together: where a guard, or an earlier activator, made
    /// their cgroup, else below our own.
    pub fn open(state_dir: &Path) -> io::Result<Self> {
        if let Some(remembered) = remembered(state_dir) {
            let dir = remembered.dir().to_owned();
            return Ok(Self { containment: Containment::Cgroup(dir) });
        }
        let made = make(state_dir).map(|cgroup| cgroup.dir().to_owned());
        let containment = match made {
            Ok(dir) => Containment::Cgroup(dir),
            Err(error) => {
                nix::sys::prctl::set_child_subreaper(true)?;
                Containment::Scan(error.to_string())
            }
        };
        Ok(Self { containment })
    }

    /// A nursery without cgroups, as on a machine that has none.
    pub fn without_cgroups(reason: &str) -> io::Result<Self> {
        nix::sys::prctl::set_child_subreaper(true)?;
        Ok(Self { containment: Containment::Scan(reason.to_owned()) })
    }

    /// How instances are held together.
    #[must_use]
    pub const fn containment(&self) -> &Containment {
        &self.containment
    }

    /// Controllers of these limits that this machine does not enforce.
    #[must_use]
    pub fn unenforced(&self, limits: Limits) -> Vec<&'static str> {
        match &self.containment {
            Containment::Cgroup(base) => limits.missing(base),
            Containment::Scan(_) => limits.controllers(),
        }
    }

    /// What an earlier activator left running.
    #[must_use]
    pub fn leftovers(&self) -> Vec<Leftover> {
        let mut found: BTreeMap<String, Boundary> = BTreeMap::new();
        if let Containment::Cgroup(base) = &self.containment {
            for cgroup in Cgroup::at(base.clone()).children() {
                let name = cgroup.dir().file_name().and_then(|name| name.to_str());
                let Some(name) = name.map(str::to_owned) else { continue };
                if cgroup.is_populated().unwrap_or(true) {
                    found.insert(name, Boundary::Cgroup(cgroup));
                } else {
                    cgroup.remove();
                }
            }
        }
        if let Containment::Scan(_) = &self.containment {
            for marked in processes::marked() {
                found.entry(marked.identity).or_insert(Boundary::Mark);
            }
        }
        found
            .into_iter()
            .filter_map(|(identity, boundary)| {
                let (host, run) = identity.rsplit_once('@')?;
                Some(Leftover {
                    host: host.to_owned(),
                    run: run.parse().ok()?,
                    instance: Instance::found(identity.clone(), boundary),
                })
            })
            .collect()
    }

    /// Starts an instance; returns when its executable runs.
    pub fn start(&self, start: Start) -> Result<Instance, SpawnError> {
        let identity = format!("{}@{}", start.host, start.run);
        let boundary = match &self.containment {
            Containment::Cgroup(base) => {
                let cgroup = Cgroup::create(base.join(&identity)).map_err(SpawnError::Cgroup)?;
                // Before the first process: none is ever without.
                start.limits.apply(cgroup.dir()).map_err(SpawnError::Cgroup)?;
                Boundary::Cgroup(cgroup)
            }
            Containment::Scan(_) => Boundary::Mark,
        };
        let cgroup = match &boundary {
            Boundary::Cgroup(cgroup) => Some(cgroup.descriptors().map_err(SpawnError::Cgroup)?),
            Boundary::Mark => None,
        };
        let program = start.program.display().to_string();
        let prepared = prepare(start, &identity, cgroup)?;
        let mut leaders = leaders();
        let spawned = spawn(&prepared);
        leaders.extend(spawned.as_ref().map(|child| child.pid.as_raw()));
        drop(leaders);
        match spawned {
            Ok(child) => Ok(Instance::started(identity, boundary, child)),
            Err(source) => {
                if let Boundary::Cgroup(cgroup) = &boundary {
                    cgroup.remove();
                }
                Err(SpawnError::Exec { program, source })
            }
        }
    }

    /// Removes its cgroup directory, which is empty once all instances are gone; unless it is the
    /// guard's, in another service's cgroup.
    pub fn close(&self) {
        let Containment::Cgroup(base) = &self.containment else { return };
        if home_directory().is_ok_and(|home| base.parent() == Some(&home)) {
            Cgroup::at(base.clone()).remove();
        }
    }
}

fn prepare(
    mut start: Start,
    identity: &str,
    cgroup: Option<CgroupFds>,
) -> Result<Prepared, SpawnError> {
    let text = |bytes: Vec<u8>, what| CString::new(bytes).map_err(|_| SpawnError::Zero(what));
    let path = |path: &Path, what| {
        use std::os::unix::ffi::OsStrExt;
        text(path.as_os_str().as_bytes().to_vec(), what)
    };
    let log = |source| SpawnError::Log { path: start.log.display().to_string(), source };
    let output = open_log(&start.log).map_err(log)?;
    let confine = start.confine.as_ref().map(Confine::ruleset);
    let ruleset = confine.transpose().map_err(SpawnError::Confine)?.flatten();
    let user = start.user;
    let stdin = File::open("/dev/null").map_err(log)?;
    start.env.insert(MARK.to_owned(), identity.to_owned());
    if start.listener.is_some() {
        start.env.insert("LISTEN_FDS".to_owned(), "1".to_owned());
        start.env.insert("LISTEN_FDNAMES".to_owned(), "http".to_owned());
    }
    let program = path(&start.program, "the executable")?;
    let mut args = vec![program.clone()];
    for arg in start.args {
        args.push(text(arg.into_bytes(), "an argument")?);
    }
    let mut env = Vec::new();
    for (key, value) in start.env {
        env.push(text(format!("{key}={value}").into_bytes(), "an environment value")?);
    }
    let dir = path(&start.dir, "the directory")?;
    let listener = start.listener;
    Ok(Prepared { program, args, env, dir, stdin, output, listener, cgroup, ruleset, user })
}

/// In a directory that is the app's: what it has put in the log's place is not written to.
fn open_log(path: &Path) -> io::Result<File> {
    if fs::symlink_metadata(path).is_ok_and(|meta| meta.len() > LOG_BYTES_MAX) {
        fs::rename(path, path.with_extension("log.1"))?;
    }
    // Without blocking: a pipe that nobody reads would hold us up.
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.nlink() != 1 {
        return Err(io::Error::other("it is no plain file with one name: remove it"));
    }
    Ok(file)
}

#[cfg(test)]
#[path = "nursery_tests.rs"]
mod tests;
