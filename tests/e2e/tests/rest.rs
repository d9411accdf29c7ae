//! How instances rest: frozen first, where the app asks for it, and stopped whatever they do.

use std::fs;

use anyhow::{Context, Result, ensure};
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use dormouse_e2e::{programs, stubborn};

const HOST: &str = "cold.test";

fn world(idle: &str, freeze: &str) -> Result<World> {
    let bin = programs()?;
    let config = format!("{}freeze = \"{freeze}\"\n", World::guestbook(&bin, "path"));
    let world = World::started(&bin, &Plan { config, idle: idle.to_owned(), ..Plan::default() })?;
    world.add(HOST, "guestbook")?;
    Ok(world)
}

fn is_frozen(world: &World) -> Result<bool> {
    let held = fs::read_to_string(world.path("data/cgroup"))?;
    let run = world.host(HOST)?["run"].as_u64().context("a run")?;
    let instance = std::path::Path::new(held.trim()).join(format!("{HOST}@{run}"));
    Ok(fs::read_to_string(instance.join("cgroup.events"))?.contains("frozen 1"))
}

#[test]
fn a_stop_of_an_app_that_ignores_it_leaves_nothing_and_releases_only_then() -> Result<()> {
    let report = stubborn::rounds(&programs()?, 3)?;
    ensure!(report.rounds == 3 && report.processes >= 9, "{report:?}");
    Ok(())
}

#[test]
fn an_idle_host_is_frozen_thawed_by_a_request_and_put_to_sleep_at_last() -> Result<()> {
    let world = world("200ms", "1s")?;
    world.sign(HOST, "one")?;
    world.wait_state(HOST, "frozen")?;
    until(PATIENCE, "the kernel has it frozen", || is_frozen(&world))?;
    let before = world.host(HOST)?;
    ensure!(before["lag_ms"] == 0, "what it wrote is in the store: {before}");
    ensure!(world.names_stored(HOST)? == ["one"]);
    ensure!(world.names(HOST)? == ["one"], "a request thaws it");
    ensure!(world.host(HOST)?["pid"] == before["pid"], "the same process");
    world.wait_state(HOST, "frozen")?;
    world.wait_state(HOST, "asleep")?;
    ensure!(!world.has_instances()?);
    world.stop()
}

#[test]
fn a_frozen_host_is_thawed_when_it_is_due_and_stopped_when_the_box_is() -> Result<()> {
    let world = world("100ms", "1h")?;
    world.sign(HOST, "one")?;
    world.wait_state(HOST, "frozen")?;
    let wakes = || -> Result<f64> {
        Ok(world.metrics()?.get("dormouse_due_wakes_total").copied().unwrap_or_default())
    };
    let first = wakes()?;
    // Set while it is awake, asked for before it is frozen again.
    let soon = format!("/api/next-due?at={}", unix_seconds()? + 2);
    ensure!(world.post(HOST, &soon, &serde_json::Value::Null)?.status == 204);
    world.wait_state(HOST, "frozen")?;
    until(PATIENCE, "what is due thaws it", || Ok(wakes()? > first))?;
    world.wait_state(HOST, "frozen")?;
    world.stop()
}

fn unix_seconds() -> Result<i64> {
    Ok(nix::time::clock_gettime(nix::time::ClockId::CLOCK_REALTIME)?.tv_sec())
}
