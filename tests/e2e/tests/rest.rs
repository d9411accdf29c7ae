//! How instances rest: frozen first, where the app asks for it, and stopped whatever they do.

use std::fs;
use std::io::Write;
use std::net::TcpStream;

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

#[test]
fn when_memory_is_short_the_longest_idle_host_sleeps_first_until_there_is_enough() -> Result<()> {
    let bin = programs()?;
    let told = tempfile::NamedTempFile::new()?;
    let say = |percent: &str| {
        let text = format!("some avg10={percent} avg60=0.00 avg300=0.00 total=0\n");
        fs::write(told.path(), text)
    };
    say("0.00")?;
    let file = told.path().display();
    let config = format!("[pressure]\nfile = \"{file}\"\n{}", World::guestbook(&bin, "path"));
    let world = World::started(&bin, &Plan { config, ..Plan::default() })?;
    for host in ["a.test", "b.test", "c.test"] {
        world.add(host, "guestbook")?;
        world.sign(host, "one")?;
    }
    // Something of the first one is in flight all the time.
    let mut stream = TcpStream::connect(world.address())?;
    write!(stream, "GET /clock HTTP/1.1\r\nHost: a.test\r\n\r\n")?;
    until(PATIENCE, "it is in flight", || Ok(world.host("a.test")?["in_flight"] == 1))?;
    say("35.00")?;
    world.wait_state("b.test", "asleep")?;
    world.wait_state("c.test", "asleep")?;
    let log = world.log("activator.log")?;
    let asleep = |host: &str| {
        let is_it = |line: &&str| line.contains("asleep") && line.contains(host);
        log.lines().find(is_it).and_then(|line| log.find(line))
    };
    ensure!(asleep("b.test") < asleep("c.test"), "who was idle for longer: {log}");
    ensure!(world.host("a.test")?["state"] == "awake", "it is in use");
    say("1.00")?;
    until(PATIENCE, "it is over", || {
        Ok(world.log("activator.log")?.contains("memory is no longer short"))
    })?;
    ensure!(world.names("b.test")? == ["one"]);
    drop(stream);
    world.stop()
}

#[test]
fn wakes_over_the_limit_wait_their_turn_and_all_are_served() -> Result<()> {
    let bin = programs()?;
    let config = format!("[wake]\nat_a_time = 1\n{}", World::guestbook(&bin, "path"));
    let world = World::started(&bin, &Plan { config, ..Plan::default() })?;
    let hosts: Vec<String> = (0..6).map(|number| format!("h{number}.test")).collect();
    for host in &hosts {
        world.add(host, "guestbook")?;
    }
    let served: Vec<Result<u16>> = std::thread::scope(|scope| {
        let ask = |host: &String| Ok(world.get(host, "/healthz")?.status);
        let asking: Vec<_> = hosts.iter().map(|host| scope.spawn(move || ask(host))).collect();
        asking.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    for status in served {
        ensure!(status? == 200);
    }
    let queued = world.metrics()?.get("dormouse_wakes_queued_total").copied();
    ensure!(queued.is_some_and(|queued| queued >= 1.0), "{queued:?}");
    world.stop()
}

fn unix_seconds() -> Result<i64> {
    Ok(nix::time::clock_gettime(nix::time::ClockId::CLOCK_REALTIME)?.tv_sec())
}
