//! What a process costs: processor time and memory, from the kernel's own books.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;

use super::quantile;

/// Seconds of processor time of all threads of a process so far.
pub(crate) fn cpu_s(pid: Pid) -> Result<f64> {
    let time = clock_getcpuclockid(pid)?.now()?;
    Ok(std::time::Duration::from(time).as_secs_f64())
}

/// A field of `/proc/<pid>/status` in MiB: `VmRSS`, or `VmHWM`, the most it ever was.
pub(crate) fn memory_mib(pid: Pid, field: &str) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context("no such field")?;
    let kib: f64 = line.trim_start_matches(':').trim().trim_end_matches(" kB").parse()?;
    Ok(kib / 1024.0)
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
pub(crate) fn clock() -> Instant {
    Instant::now()
}

pub(crate) fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// Median of a 4 KiB write with its fsync in this folder, milliseconds: what the disk alone costs.
pub(crate) fn bare_fsync_ms(folder: &Path) -> Result<f64> {
    let path = folder.join("fsync");
    let mut file = File::create(&path)?;
    let mut samples = Vec::new();
    for _ in 0..50 {
        let begun = clock();
        file.write_all(&[7; 4096])?;
        file.sync_data()?;
        samples.push(millis(begun));
    }
    fs::remove_file(path)?;
    Ok(quantile(&samples, 0.5))
}
