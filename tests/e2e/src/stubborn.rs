//! Stops of an app that ignores SIGTERM and has a child that has detached itself: nothing of it is left,
//! and its lease is released only after that was proven.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::wait::until;
use crate::world::{PATIENCE, Plan, World};

const HOST: &str = "deaf.test";

/// What was stopped.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Stops.
    pub rounds: u32,
    /// Processes that ran before them; none runs afterwards.
    pub processes: usize,
}

/// Runs that many rounds.
pub fn rounds(bin: &Path, rounds: u32) -> Result<Report> {
    let config = format!(
        "grace = \"200ms\"\n[app.deaf]\ncommand = [\"{}\", \"--ignore-sigterm\", \"--detach\", \
         \"--socket\", \"{{socket}}\", \"--db\", \"{{db}}\"]\nhealth = \"/healthz\"\n",
        bin.join("guestbook").display()
    );
    let world = World::started(bin, &Plan { config, ..Plan::default() })?;
    let mut report = Report::default();
    for round in 0..rounds {
        let said = || world.log("activator.log").unwrap_or_default();
        report.processes += one(&world).with_context(|| format!("round {round}\n{}", said()))?;
        report.rounds += 1;
    }
    in_order(&world.log("activator.log")?, rounds)?;
    world.stop()?;
    Ok(report)
}

/// Wakes the host, stops and releases it; how many processes it had.
fn one(world: &World) -> Result<usize> {
    world.add(HOST, "deaf")?;
    ensure!(world.get(HOST, "/healthz")?.status == 200);
    let held = fs::read_to_string(world.path("data/cgroup"))?;
    let run = world.host(HOST)?["run"].as_u64().context("a run")?;
    let procs = Path::new(held.trim()).join(format!("{HOST}@{run}")).join("cgroup.procs");
    // The app, the detached shell and what it waits for.
    let mut pids = Vec::new();
    until(PATIENCE, "its child is there", || {
        pids = fs::read_to_string(&procs)?.lines().map(str::to_owned).collect();
        Ok(pids.len() >= 3)
    })?;
    let began: Vec<_> = pids.iter().map(|pid| (pid, begun(pid))).collect();
    world.dormouse(&["rm", HOST])?;
    ensure!(!procs.exists(), "its cgroup is left");
    for (pid, began) in &began {
        ensure!(begun(pid) != *began, "process {pid} is left");
    }
    let record = world.path("store/dormouse").join(HOST).join("lock.json");
    let record: Value = serde_json::from_slice(&fs::read(record)?)?;
    ensure!(record["state"] == "released", "{record}");
    Ok(pids.len())
}

/// When a process began, which tells it from one that has its number later; none for a zombie.
fn begun(pid: &str) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    if fields.next()? == "Z" {
        return None;
    }
    fields.nth(18).map(str::to_owned)
}

/// In the log each release comes behind the proof, and each stop took the kill.
fn in_order(log: &str, rounds: u32) -> Result<()> {
    let mut proven = false;
    let mut releases = 0;
    for line in log.lines().filter(|line| line.contains(HOST)) {
        if line.contains("instance started") {
            proven = false;
        } else if line.contains("nothing of the instance is left") {
            proven = true;
        } else if line.contains("releasing the lease") {
            ensure!(proven, "released before the proof: {line}\n{log}");
            releases += 1;
        }
    }
    ensure!(releases == rounds, "{releases} releases in {rounds} rounds\n{log}");
    Ok(())
}
