//! `dormouse guard`: the process that kills the instances at the session's deadline when the activator
//! does not, because it hangs or is gone; and goes on killing until there is a session again.
//!
//! It makes the cgroup that the instances are held in, below its own: under systemd they outlive the
//! activator's service by that. It decides by one file and two clocks, asks the store nothing, starts
//! nothing, and needs no memory once it runs.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::Context as _;
use dormouse_core::time::{Deadline, MILLI_NS};
use dormouse_instances::{Leaf, Pen, settle_in_leaf};
use dormouse_link::config::{Config, Takeover};
use dormouse_replica::clock;
use libsystemd::daemon::{NotifyState, notify};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use crate::serve::{paths::Paths, signals::is_started_by_systemd};
use crate::{deadline, kept, lock};

/// Its lock, in the run directory: held as long as it runs.
pub(crate) const LOCK: &str = "guard.lock";

/// Between two kills of what does not die.
const AGAIN_MS: u8 = 20;

/// After its end, before systemd starts it again: nobody enforces the instances' limits until it runs.
pub(crate) fn let_go(config: &Config) -> anyhow::Result<()> {
    let data = Paths::of(&config.this_box).data().to_owned();
    match Pen::of(&data) {
        Some(pen) => pen.let_go(&data).context("the instances' limits"),
        None => Ok(()),
    }
}

/// Runs until a signal ends it, which leaves everything running.
pub(crate) fn run(config: &Config) -> anyhow::Result<()> {
    let paths = Paths::of(&config.this_box);
    paths.make().context("the box's directories")?;
    let _one = lock::take(&paths.run().join(LOCK), "another guard runs for this box")?;
    if is_started_by_systemd() {
        settle_in_leaf(Leaf::Guard).context("a cgroup of our own")?;
    }
    let pen = Pen::make(paths.data(), activator_runs(&paths)).context(
        "the guard holds instances by cgroup v2, which it cannot use here; without it the activator \
         alone ends them at the deadline",
    )?;
    tracing::info!(cgroup = %pen.dir().display(), "instances are held here");
    let guard = Guard::new(paths)?;
    notify(false, &[NotifyState::Ready]).context("systemd cannot be told")?;
    guard.watch()
}

/// Whether an activator has its state directory locked.
fn activator_runs(paths: &Paths) -> bool {
    lock::is_taken(&paths.data().join("lock")).unwrap_or(true)
}

struct Guard {
    paths: Paths,
    boot_id: String,
    /// Of the run directory, where the deadline is renewed.
    changes: Inotify,
    boot: TimerFd,
    wall: TimerFd,
    /// What was killed was said already.
    told: bool,
}

impl Guard {
    fn new(paths: Paths) -> anyhow::Result<Self> {
        let flags = InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC;
        let changes = Inotify::init(flags).context("inotify")?;
        let events = AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_DELETE;
        changes
            .add_watch(paths.run(), events)
            .with_context(|| paths.run().display().to_string())?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = |clock| TimerFd::new(clock, flags).context("a timer");
        Ok(Self {
            boot_id: kept::boot_id().context("the boot id")?,
            changes,
            boot: timer(ClockId::CLOCK_BOOTTIME)?,
            wall: timer(ClockId::CLOCK_REALTIME)?,
            told: false,
            paths,
        })
    }

    fn watch(mut self) -> anyhow::Result<()> {
        loop {
            let deadline = deadline::kept(self.paths.run(), &self.boot_id);
            self.arm(deadline)?;
            let Some(deadline) = deadline else {
                self.wait(None, PollTimeout::NONE)?;
                continue;
            };
            if !deadline.passed(clock::system_now()) {
                self.told = false;
                self.wait(None, PollTimeout::NONE)?;
                continue;
            }
            let pen = Pen::of(self.paths.data());
            // Opened before it is looked at: what changes afterwards is reported.
            let events = pen.as_ref().map(Pen::events).transpose()?.flatten();
            match pen.map(|pen| self.end(&pen)) {
                Some(Fate::Left) => self.wait(events.as_ref(), PollTimeout::from(AGAIN_MS))?,
                Some(Fate::Empty) | None => self.wait(events.as_ref(), PollTimeout::NONE)?,
            }
        }
    }

    /// Wakes at the deadline, also after a suspend and when the wall clock is set.
    fn arm(&self, deadline: Option<Deadline>) -> io::Result<()> {
        self.boot.unset()?;
        self.wall.unset()?;
        let Some(deadline) = deadline else { return Ok(()) };
        if deadline.passed(clock::system_now()) {
            return Ok(());
        }
        let at = |nanos: u64| {
            let nanos = i64::try_from(nanos).unwrap_or(i64::MAX);
            Expiration::OneShot(TimeSpec::new(nanos / 1_000_000_000, nanos % 1_000_000_000))
        };
        let once = TimerSetTimeFlags::TFD_TIMER_ABSTIME;
        self.boot.set(at(deadline.boot.0), once)?;
        let set = once | TimerSetTimeFlags::TFD_TIMER_CANCEL_ON_SET;
        Ok(self.wall.set(at(deadline.wall.0.saturating_mul(MILLI_NS)), set)?)
    }

    /// Until anything happens: a new deadline, the old one reached, something running again.
    fn wait(&self, events: Option<&File>, limit: PollTimeout) -> io::Result<()> {
        let mut ready = vec![
            PollFd::new(self.changes.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.boot.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.wall.as_fd(), PollFlags::POLLIN),
        ];
        ready.extend(events.map(|file| PollFd::new(file.as_fd(), PollFlags::POLLPRI)));
        match poll(&mut ready, limit) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        // What they say does not matter: everything is read again.
        drop(self.changes.read_events());
        Ok(())
    }

    fn end(&mut self, pen: &Pen) -> Fate {
        // An unreadable one may hold anything.
        if matches!(pen.is_populated(), Ok(false)) {
            return Fate::Empty;
        }
        if !std::mem::replace(&mut self.told, true) {
            let instances = pen.populated();
            tracing::warn!(?instances, "the session is over: killing what still runs");
        }
        if let Err(error) = pen.kill() {
            tracing::error!(%error, cgroup = %pen.dir().display(), "cannot kill the instances");
        }
        Fate::Left
    }
}

/// What a look after the deadline found.
enum Fate {
    Empty,
    Left,
}

/// Whether a guard runs for this run directory.
pub(crate) fn runs(run: &Path) -> bool {
    lock::is_taken(&run.join(LOCK)).unwrap_or(false)
}

/// For `dormouse status`.
pub(crate) fn told(run: &Path, takeover: Takeover) -> &'static str {
    match (runs(run), takeover) {
        (true, Takeover::Automatic) => "ends the instances at the deadline",
        (true, Takeover::Manual) => "runs; with manual takeover there is no deadline",
        (false, Takeover::Automatic) => {
            "NONE: an activator that hangs past its deadline leaves its instances running"
        }
        (false, Takeover::Manual) => "none; with manual takeover there is no deadline",
    }
}
