//! The guard: instances end at the session's deadline, whatever the activator does.

use anyhow::{Result, ensure};
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use dormouse_e2e::{programs, suspended};
use nix::sys::signal::{Signal, kill};

#[test]
fn an_activator_that_hangs_past_its_deadline_leaves_nothing_running() -> Result<()> {
    let report = suspended::rounds(&programs()?, 3, 1)?;
    ensure!(report.rounds == 3 && report.answered > 0 && report.refused >= 3, "{report:?}");
    Ok(())
}

#[test]
fn instances_of_an_activator_that_is_gone_end_at_the_deadline() -> Result<()> {
    let mut world = suspended::world(&programs()?)?;
    let host = "held.test";
    world.sign(host, "one")?;
    world.end_activator(Signal::SIGKILL)?;
    until(PATIENCE, "they are killed", || Ok(!world.has_instances()?))?;
    let log = world.log("guard.log")?;
    ensure!(log.contains("the session is over") && log.contains("held.test@"), "{log}");
    world.start_activator()?;
    until(PATIENCE, "it serves again", || {
        Ok(world.get(host, "/healthz").is_ok_and(|answer| answer.status == 200))
    })?;
    ensure!(world.names(host)? == ["one"]);
    world.stop()
}

#[test]
fn a_guard_that_dies_and_comes_back_goes_on_where_it_was() -> Result<()> {
    let mut world = suspended::world(&programs()?)?;
    let host = "held.test";
    world.sign(host, "one")?;
    world.end_guard(Signal::SIGKILL)?;
    ensure!(world.status()?["guard"].as_str().is_some_and(|told| told.starts_with("NONE")));
    ensure!(world.get(host, "/healthz")?.status == 200, "what runs is not touched");
    // Past the deadline with nobody to see it: the next guard acts at once.
    let activator = world.activator_pid()?;
    kill(activator, Signal::SIGSTOP)?;
    until(PATIENCE, "the proxy refuses", || Ok(world.get(host, "/healthz")?.status == 503))?;
    ensure!(world.has_instances()?);
    world.start_guard()?;
    until(PATIENCE, "they are killed", || Ok(!world.has_instances()?))?;
    kill(activator, Signal::SIGCONT)?;
    until(PATIENCE, "it serves again", || {
        Ok(world.get(host, "/healthz").is_ok_and(|answer| answer.status == 200))
    })?;
    ensure!(world.names(host)? == ["one"]);
    world.stop()
}

#[test]
fn one_guard_a_box_and_an_old_deadline_ends_nothing_with_manual_takeover() -> Result<()> {
    let bin = programs()?;
    let config = World::guestbook(&bin, "path");
    let mut world = World::new(&bin, &Plan { config, ..Plan::default() })?;
    world.start_guard()?;
    let second = world.dormouse_fails(&["guard"], 1)?;
    ensure!(second.contains("another guard runs"), "{second}");
    // As an earlier config, with automatic takeover, has left it.
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let old = serde_json::json!({
        "version": 1, "boot_id": boot_id.trim(),
        "deadline": { "mono": 1, "boot": 1, "wall": 1 },
    });
    std::fs::write(world.path("run/deadline.json"), old.to_string())?;
    world.start_activator()?;
    world.start_proxy()?;
    world.add("a.test", "guestbook")?;
    world.sign("a.test", "one")?;
    ensure!(world.status()?["guard"].as_str().is_some_and(|told| told.starts_with("runs")));
    let log = world.log("guard.log")?;
    ensure!(!log.contains("the session is over"), "{log}");
    ensure!(world.host("a.test")?["state"] == "awake");
    world.stop()
}
