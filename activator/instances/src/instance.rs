//! One running instance: asked to stop, killed, frozen, and proven gone.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use crate::cgroup::Cgroup;
use crate::limits::Met;
use crate::processes;
use crate::spawn::Child;

/// Between two looks at /proc, where there is no cgroup that could tell.
const SCAN: Duration = Duration::from_millis(20);

/// How an instance is told from everything else.
#[derive(Clone, Debug)]
pub(crate) enum Boundary {
    /// By its cgroup.
    Cgroup(Cgroup),
    /// By the mark in its environment.
    Mark,
}

/// One running instance. Clones share it.
#[derive(Clone, Debug)]
pub struct Instance {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    identity: String,
    boundary: Boundary,
    /// The first process; absent for one that an earlier activator started.
    leader: Option<Leader>,
}

/// What tells a first process from everything that may have its number later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaderId {
    /// Its number.
    pub pid: i32,
    /// When it began, in clock ticks since boot: field 22 of proc(5) `stat`.
    pub began: u64,
}

#[derive(Debug)]
struct Leader {
    pid: Pid,
    began: Option<u64>,
    pidfd: Arc<OwnedFd>,
    /// How it ended, once it has.
    ended: watch::Receiver<Option<String>>,
}

impl Instance {
    pub(crate) fn started(identity: String, boundary: Boundary, child: Child) -> Self {
        let (sender, ended) = watch::channel(None);
        let pidfd = Arc::new(child.pidfd);
        tokio::spawn(reap(child.pid, Arc::clone(&pidfd), sender));
        let began = processes::began(child.pid.as_raw());
        let leader = Some(Leader { pid: child.pid, began, pidfd, ended });
        Self { inner: Arc::new(Inner { identity, boundary, leader }) }
    }

    /// What another process of ours needs to find the first process again.
    #[must_use]
    pub fn leader(&self) -> Option<LeaderId> {
        let leader = self.inner.leader.as_ref()?;
        Some(LeaderId { pid: leader.pid.as_raw(), began: leader.began? })
    }

    /// The same instance, of an earlier activator, with its first process: that one must still run,
    /// be the one that is meant, and be inside. It is frozen no more.
    pub fn taken_over(&self, id: LeaderId) -> io::Result<Self> {
        let pid = Pid::from_raw(id.pid);
        // Opened first: what is looked at afterwards is this process, or its number is gone.
        let pidfd = Arc::new(pidfd_open(pid)?);
        let is_same = processes::began(id.pid) == Some(id.began) && self.pids().contains(&id.pid);
        if !is_same {
            return Err(io::Error::other("its first process is gone"));
        }
        if matches!(self.inner.boundary, Boundary::Cgroup(_)) {
            self.freeze(false)?;
        }
        let (sender, ended) = watch::channel(None);
        tokio::spawn(wait_for(Arc::clone(&pidfd), sender));
        let leader = Some(Leader { pid, began: Some(id.began), pidfd, ended });
        let Inner { identity, boundary, .. } = &*self.inner;
        let (identity, boundary) = (identity.clone(), boundary.clone());
        Ok(Self { inner: Arc::new(Inner { identity, boundary, leader }) })
    }

    pub(crate) fn found(identity: String, boundary: Boundary) -> Self {
        Self { inner: Arc::new(Inner { identity, boundary, leader: None }) }
    }

    /// Its first process, for people.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.inner.leader.as_ref().map(|leader| leader.pid.as_raw())
    }

    /// How often it met its limits.
    #[must_use]
    pub fn met(&self) -> Met {
        match &self.inner.boundary {
            Boundary::Cgroup(cgroup) => Met::of(cgroup.dir()),
            Boundary::Mark => Met::default(),
        }
    }

    /// SIGTERM to the first process; to all where it is not known.
    pub fn terminate(&self) {
        if let Some(leader) = &self.inner.leader {
            signal(&leader.pidfd, libc::SIGTERM);
            return;
        }
        for pid in self.pids() {
            // One that is gone by now needs no signal.
            nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGTERM).ok();
        }
    }

    pub(crate) fn pids(&self) -> Vec<i32> {
        match &self.inner.boundary {
            Boundary::Cgroup(cgroup) => cgroup.pids(),
            Boundary::Mark => {
                let own = |found: &processes::Marked| found.identity == self.inner.identity;
                processes::marked().into_iter().filter(own).map(|found| found.pid).collect()
            }
        }
    }

    /// SIGKILL to all of it.
    pub fn kill(&self) -> io::Result<()> {
        if let Some(leader) = &self.inner.leader {
            signal(&leader.pidfd, libc::SIGKILL);
        }
        match &self.inner.boundary {
            Boundary::Cgroup(cgroup) => cgroup.kill(),
            Boundary::Mark => {
                processes::kill_marked(&self.inner.identity);
                Ok(())
            }
        }
    }

    /// Freezes or thaws all of it.
    pub fn freeze(&self, frozen: bool) -> io::Result<()> {
        match &self.inner.boundary {
            Boundary::Cgroup(cgroup) => cgroup.freeze(frozen),
            Boundary::Mark => Err(io::Error::other("freezing needs cgroup v2")),
        }
    }

    /// Returns when the first process has ended, and says how.
    pub async fn ended(&self) -> String {
        let Some(leader) = &self.inner.leader else { return "was not ours to wait for".to_owned() };
        let mut ended = leader.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(how) => how.clone().unwrap_or_default(),
            Err(_) => "ended".to_owned(),
        }
    }

    /// Returns when nothing of it is left: first process reaped, cgroup empty.
    pub async fn gone(&self) -> io::Result<()> {
        if self.inner.leader.is_some() {
            self.ended().await;
        }
        match &self.inner.boundary {
            Boundary::Cgroup(cgroup) => {
                cgroup.empty().await?;
                cgroup.remove();
            }
            Boundary::Mark => {
                while processes::any_marked(&self.inner.identity) {
                    reap_orphans();
                    tokio::time::sleep(SCAN).await;
                }
                reap_orphans();
            }
        }
        Ok(())
    }

    /// Whether anything of it is left; an unreadable cgroup counts as something.
    #[must_use]
    pub fn is_left(&self) -> bool {
        match &self.inner.boundary {
            Boundary::Cgroup(cgroup) => cgroup.is_populated().unwrap_or(true),
            Boundary::Mark => processes::any_marked(&self.inner.identity),
        }
    }
}

fn signal(pidfd: &OwnedFd, number: libc::c_int) {
    let info: *const libc::siginfo_t = std::ptr::null();
    // SAFETY: takes no pointer but a null one; the descriptor is open. A process that is gone
    // needs no signal, so the outcome does not matter.
    unsafe {
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), number, info, 0);
    }
}

async fn reap(pid: Pid, pidfd: Arc<OwnedFd>, sender: watch::Sender<Option<String>>) {
    let how = match wait_exit(&pidfd).await {
        Ok(WaitStatus::Exited(_, code)) => format!("exited with status {code}"),
        Ok(WaitStatus::Signaled(_, signal, _)) => format!("was killed by {signal}"),
        Ok(_) | Err(_) => "ended".to_owned(),
    };
    leaders().remove(&pid.as_raw());
    // Nobody may be left to hear it.
    drop(sender.send(Some(how)));
}

/// Of a process that is another's child, perhaps nobody's: how it ended is not told.
async fn wait_for(pidfd: Arc<OwnedFd>, sender: watch::Sender<Option<String>>) {
    // An error is no end; the cgroup still tells.
    drop(readable(&pidfd).await);
    drop(sender.send(Some("ended".to_owned())));
}

fn pidfd_open(pid: Pid) -> io::Result<OwnedFd> {
    // SAFETY: takes two integers.
    let number = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) };
    let number = i32::try_from(number).map_err(io::Error::other)?;
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A pidfd is readable once its process has ended, and stays so.
async fn readable(pidfd: &Arc<OwnedFd>) -> io::Result<()> {
    // SAFETY: the shared descriptor stays open at least as long as this share of it.
    let ready = unsafe { AsyncFd::register(Arc::clone(pidfd)) }?;
    ready.readable().await.map(drop)
}

async fn wait_exit(pidfd: &Arc<OwnedFd>) -> io::Result<WaitStatus> {
    readable(pidfd).await?;
    Ok(waitid(Id::PIDFd(std::os::fd::AsFd::as_fd(pidfd)), WaitPidFlag::WEXITED)?)
}

/// First processes of instances: reaped by their own tasks, which want to know how they ended.
static LEADERS: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

pub(crate) fn leaders() -> MutexGuard<'static, BTreeSet<i32>> {
    LEADERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As the subreaper: collects descendants whose parents are gone.
fn reap_orphans() {
    // Held throughout: a process that is just being started may have ended already.
    let leaders = leaders();
    for pid in processes::zombie_children() {
        if !leaders.contains(&pid) {
            // One that is collected by now needs nothing.
            waitid(Id::Pid(Pid::from_raw(pid)), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG).ok();
        }
    }
}
