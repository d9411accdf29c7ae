//! Two cores: one for the process that is measured, one for all that makes its work.

use anyhow::{Result, bail};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The caller.
const SELF: Pid = Pid::from_raw(0);

/// Puts the calling thread, and what it starts from now on, on one core.
pub(crate) fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core)?;
    Ok(sched_setaffinity(SELF, &set)?)
}

/// The cores of a bench; the thread that chose them is freed again on drop.
pub(crate) struct Cores {
    before: CpuSet,
    pub(crate) proxy: usize,
    pub(crate) load: usize,
}

impl Cores {
    /// The first two that this process may use.
    pub(crate) fn choose() -> Result<Self> {
        let before = sched_getaffinity(SELF)?;
        let mut allowed = (0..CpuSet::count()).filter(|core| before.is_set(*core) == Ok(true));
        let (Some(proxy), Some(load)) = (allowed.next(), allowed.next()) else {
            bail!("this bench needs two cores: one for what is measured, one for its clients");
        };
        Ok(Self { before, proxy, load })
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        // It held before; should it not hold again, the process merely stays on one core.
        sched_setaffinity(SELF, &self.before).ok();
    }
}
