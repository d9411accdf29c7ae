//! A restarted activator takes over what runs: nobody notices, nothing is uploaded twice.

use std::fs;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use dormouse_e2e::{client, programs};
use nix::sys::signal::Signal;

const HOST: &str = "a.test";
const IDLE: &str = "b.test";

fn world() -> Result<World> {
    world_with("", Plan::default())
}

fn world_with(more: &str, plan: Plan) -> Result<World> {
    let bin = programs()?;
    let config = World::guestbook(&bin, "fd") + more;
    let world = World::started(&bin, &Plan { config, ..plan })?;
    world.add(HOST, "guestbook")?;
    Ok(world)
}

/// Clients that ask and write all the time, each request on a connection of its own.
struct Load {
    address: SocketAddr,
    ends: AtomicBool,
    good: AtomicU64,
    signed: AtomicU64,
}

impl Load {
    fn new(world: &World) -> Self {
        Self {
            address: world.address(),
            ends: AtomicBool::new(false),
            good: AtomicU64::new(0),
            signed: AtomicU64::new(0),
        }
    }

    /// Until the end of the load; the first failure ends it.
    fn read(&self) -> Result<()> {
        while !self.ends.load(Ordering::Relaxed) {
            let answer = client::request(self.address, "GET", HOST, "/api/entries", None)?;
            ensure!(answer.status == 200, "a read: {} {}", answer.head, answer.text());
            self.good.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Slowly: while no activator holds the read lock, an app that fills its WAL begins it anew, and
    /// then only a whole image is right.
    fn write(&self) -> Result<()> {
        while !self.ends.load(Ordering::Relaxed) {
            self.await_more(5)?;
            let name = format!("load-{}", self.signed.load(Ordering::Relaxed));
            let entry = serde_json::json!({ "name": name, "text": "a text" }).to_string();
            let answer = client::request(self.address, "POST", HOST, "/api/entries", Some(&entry))?;
            ensure!(answer.status == 201, "a write: {} {}", answer.head, answer.text());
            self.signed.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn await_more(&self, requests: u64) -> Result<()> {
        let wanted = self.good.load(Ordering::Relaxed) + requests;
        until(PATIENCE, "requests are served", || {
            let failed = self.ends.load(Ordering::Relaxed);
            Ok(failed || self.good.load(Ordering::Relaxed) >= wanted)
        })
    }

    /// Runs `work` under load; an error when anything failed.
    fn during(&self, work: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let ended = |outcome: Result<()>| {
            self.ends.store(true, Ordering::Relaxed);
            outcome
        };
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..3).map(|_| scope.spawn(move || ended(self.read()))).collect();
            let writer = scope.spawn(move || ended(self.write()));
            let worked = ended(work(self));
            let failed = "a client panicked";
            for client in readers.into_iter().chain([writer]) {
                client.join().ok().context(failed)??;
            }
            worked
        })
    }
}

/// Level and TXIDs of the files in the store.
fn files(world: &World, host: &str, level: &str) -> Vec<String> {
    let folder = world.path("store/dormouse").join(host).join("ltx").join(level);
    let names = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[test]
fn a_killed_activator_is_not_noticed_and_replication_goes_on_without_a_snapshot() -> Result<()> {
    let mut world = world()?;
    world.add(IDLE, "guestbook")?;
    world.sign(IDLE, "one")?;
    // A visit that has written nothing yet has no place in the WAL.
    world.dormouse(&["sleep", IDLE])?;
    ensure!(world.names(IDLE)? == ["one"]);
    let big = "x".repeat(60_000);
    let entry = serde_json::json!({ "name": "big", "text": big });
    for _ in 0..10 {
        world.post(HOST, "/api/entries", &entry)?;
    }
    let before = [world.host(HOST)?, world.host(IDLE)?];
    let idle_files = files(&world, IDLE, "0");
    let load = Load::new(&world);
    load.during(|load| {
        for _ in 0..3 {
            load.await_more(100)?;
            world.end_activator(Signal::SIGKILL)?;
            load.await_more(100)?;
            world.start_activator()?;
            world.wait_state(HOST, "awake")?;
            world.wait_state(IDLE, "awake")?;
        }
        load.await_more(100)
    })?;
    for (host, before) in [HOST, IDLE].into_iter().zip(before) {
        let after = world.host(host)?;
        for field in ["pid", "run", "generation"] {
            ensure!(after[field] == before[field], "{host}: {field}: {before} {after}");
        }
    }
    ensure!(world.status()?["session"] == "live", "{}", world.status()?);
    let log = world.log("activator.log")?;
    ensure!(!log.contains("stopping a leftover"), "{log}");
    let resumed = log.matches("replication goes on").count();
    ensure!(resumed == 6, "{resumed}: {log}");
    ensure!(!log.contains("NeedsFullImage"), "{log}");
    ensure!(files(&world, IDLE, "0") == idle_files, "a host that wrote nothing uploads nothing");
    let signed = load.signed.load(Ordering::Relaxed);
    world.dormouse(&["sleep", HOST])?;
    world.wait_state(HOST, "asleep")?;
    let local = world.names_all(HOST)?;
    let names = world.names_stored(HOST)?;
    ensure!(names == local, "{} of {} rows are in the store", names.len(), local.len());
    let written = names.iter().filter(|name| name.starts_with("load-")).count();
    ensure!(u64::try_from(written)? >= signed, "{written} of {signed}");
    world.stop()
}

#[test]
fn by_sigquit_the_activator_leaves_what_serves_and_by_sigterm_nothing() -> Result<()> {
    let mut world = world()?;
    world.sign(HOST, "one")?;
    let before = world.host(HOST)?;
    world.end_activator(Signal::SIGQUIT)?;
    ensure!(world.names(HOST)? == ["one"], "served while no activator runs");
    world.start_activator()?;
    world.wait_state(HOST, "awake")?;
    ensure!(world.host(HOST)?["pid"] == before["pid"]);
    world.stop()
}

#[test]
fn what_was_not_durable_when_the_activator_died_is_uploaded_by_the_next() -> Result<()> {
    let mut world = world()?;
    world.sign(HOST, "one")?;
    world.end_activator(Signal::SIGKILL)?;
    world.sign(HOST, "two")?;
    world.start_activator()?;
    world.wait_state(HOST, "awake")?;
    // Perhaps not even the first one was when it died: then there is nothing to restore yet.
    until(PATIENCE, "both are in the store", || {
        Ok(world.names_stored(HOST).is_ok_and(|names| names == ["one", "two"]))
    })?;
    world.stop()
}

#[test]
fn an_instance_that_dies_after_it_was_taken_over_is_noticed_and_wakes_again() -> Result<()> {
    let mut world = world()?;
    world.sign(HOST, "one")?;
    world.end_activator(Signal::SIGKILL)?;
    world.start_activator()?;
    world.wait_state(HOST, "awake")?;
    let pid = i32::try_from(world.host(HOST)?["pid"].as_i64().context("it runs")?)?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL)?;
    world.wait_state(HOST, "asleep")?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn an_instance_that_died_with_the_activator_is_not_taken_over() -> Result<()> {
    let mut world = world()?;
    world.sign(HOST, "one")?;
    let pid = i32::try_from(world.host(HOST)?["pid"].as_i64().context("it runs")?)?;
    world.end_activator(Signal::SIGKILL)?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL)?;
    world.start_activator()?;
    world.wait_state(HOST, "asleep")?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn with_automatic_takeover_it_is_taken_over_in_time_and_stopped_after_it() -> Result<()> {
    let more = "[session]\nttl = \"4s\"\nmargin = \"1s\"\ntakeover = \"automatic\"\n";
    let mut world = world_with(more, Plan::default())?;
    world.sign(HOST, "one")?;
    let before = world.host(HOST)?;
    world.end_activator(Signal::SIGKILL)?;
    world.start_activator()?;
    world.wait_state(HOST, "awake")?;
    ensure!(world.host(HOST)?["pid"] == before["pid"], "taken over in time");
    world.end_activator(Signal::SIGKILL)?;
    until(PATIENCE, "the deadline passes", || Ok(world.get(HOST, "/api/entries")?.status == 503))?;
    world.start_activator()?;
    world.wait_state(HOST, "asleep")?;
    ensure!(world.names(HOST)? == ["one"]);
    ensure!(world.host(HOST)?["pid"] != before["pid"], "stopped after it");
    world.stop()
}
