//! A host's life through the real programs: wakes, sleeps, restores, restarts.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dormouse_core::Core;
use dormouse_core::effect::Effect;
use dormouse_core::event::Line;
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use dormouse_e2e::{client, programs};
use nix::sys::signal::{Signal, kill};

const HOST: &str = "a.test";

fn plan(listen: &str, engine: &str, idle: &str) -> Result<(std::path::PathBuf, Plan)> {
    let bin = programs()?;
    let plan = Plan {
        config: World::guestbook(&bin, listen),
        idle: idle.to_owned(),
        engine: engine.to_owned(),
        ..Plan::default()
    };
    Ok((bin, plan))
}

fn world(idle: &str) -> Result<World> {
    let (bin, plan) = plan("path", "auto", idle)?;
    let world = World::started(&bin, &plan)?;
    world.add(HOST, "guestbook")?;
    Ok(world)
}

#[test]
fn a_host_wakes_writes_sleeps_and_comes_back_on_both_engines_and_both_sockets() -> Result<()> {
    for (listen, engine) in [("path", "uring"), ("fd", "epoll")] {
        let (bin, plan) = plan(listen, engine, "300ms")?;
        let world = World::started(&bin, &plan)?;
        world.add(HOST, "guestbook")?;
        world.sign(HOST, "one")?;
        world.wait_state(HOST, "asleep")?;
        world.lose_copy(HOST)?;
        ensure!(world.names(HOST)? == ["one"], "restored");
        world.stop()?;
    }
    Ok(())
}

#[test]
fn a_killed_activator_goes_on_in_its_session() -> Result<()> {
    let mut world = world("1h")?;
    world.sign(HOST, "one")?;
    let before = world.host(HOST)?;
    let session = world.status()?["session_detail"].clone();
    world.end_activator(Signal::SIGKILL)?;
    // The proxy goes on serving an awake host without its activator.
    ensure!(world.names(HOST)? == ["one"], "served without an activator");
    world.start_activator()?;
    world.wait_state(HOST, "awake")?;
    until(PATIENCE, "the same epoch", || Ok(world.status()?["session_detail"] == session))?;
    world.dormouse(&["sleep", HOST])?;
    ensure!(world.names(HOST)? == ["one"], "the rows are there");
    let after = world.host(HOST)?;
    ensure!(after["run"].as_u64() > before["run"].as_u64(), "runs only rise");
    ensure!(after["generation"] == before["generation"], "it was held throughout");
    world.stop()
}

#[test]
fn an_event_log_replays_to_the_very_same_end() -> Result<()> {
    let mut world = world("300ms")?;
    world.sign(HOST, "one")?;
    world.wait_state(HOST, "asleep")?;
    world.sign(HOST, "two")?;
    world.end_activator(Signal::SIGTERM)?;
    let log = std::fs::read_to_string(world.path("data/events.log"))?;
    let mut core: Option<Core> = None;
    let mut effects = Vec::new();
    for line in log.lines() {
        match serde_json::from_str(line)? {
            Line::Settings(settings) => core = Some(Core::new(settings)),
            Line::Step(now, event) => {
                if let Some(core) = &mut core {
                    core.step(now, event, &mut effects);
                }
            }
        }
    }
    let core = core.context("settings come first")?;
    ensure!(effects.last() == Some(&Effect::Exit), "it ended: {:?}", effects.last());
    ensure!(core.counters().get("wakes") == 2 && core.counters().get("stale_answers") == 0);
    let spawned = effects.iter().filter(|effect| matches!(effect, Effect::Spawn(..))).count();
    ensure!(spawned == 2, "{spawned} starts");
    world.start_activator()?;
    world.stop()
}

#[test]
fn a_killed_proxy_comes_back_and_its_counts_are_forgotten() -> Result<()> {
    let mut world = world("300ms")?;
    world.sign(HOST, "one")?;
    let mut stream = TcpStream::connect(world.address())?;
    write!(stream, "GET /clock HTTP/1.1\r\nHost: {HOST}\r\n\r\n")?;
    until(PATIENCE, "it is in flight", || Ok(world.host(HOST)?["in_flight"] == 1))?;
    world.end_proxy(Signal::SIGKILL)?;
    // What a dead process counted must not keep the host awake.
    world.wait_state(HOST, "asleep")?;
    world.start_proxy()?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn an_open_stream_keeps_its_host_awake_and_a_closed_one_lets_it_sleep() -> Result<()> {
    let world = world("200ms")?;
    let mut stream = TcpStream::connect(world.address())?;
    write!(stream, "GET /clock?every_ms=100 HTTP/1.1\r\nHost: {HOST}\r\n\r\n")?;
    let mut lines = BufReader::new(stream).lines();
    let mut ticks = 0;
    while ticks < 12 {
        let line = lines.next().transpose()?.unwrap_or_default();
        ticks += usize::from(line.starts_with("data:"));
    }
    // Six windows long.
    ensure!(world.host(HOST)?["state"] == "awake");
    drop(lines);
    world.wait_state(HOST, "asleep")?;
    world.stop()
}

#[test]
fn a_silent_websocket_keeps_its_host_awake_and_still_echoes() -> Result<()> {
    let world = world("200ms")?;
    let mut socket = TcpStream::connect(world.address())?;
    socket.set_read_timeout(Some(PATIENCE))?;
    write!(
        socket,
        "GET /ws HTTP/1.1\r\nHost: {HOST}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        socket.read_exact(&mut byte)?;
        head.extend_from_slice(&byte);
    }
    ensure!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
    // Silence of several windows, told by another host's sleep.
    world.add("b.test", "guestbook")?;
    for _ in 0..3 {
        world.get("b.test", "/healthz")?;
        world.wait_state("b.test", "asleep")?;
    }
    ensure!(world.host(HOST)?["state"] == "awake");
    // A masked text frame "hi" (RFC 6455 section 5.2), and its echo, unmasked.
    socket.write_all(&[0x81, 0x82, 0, 0, 0, 0, b'h', b'i'])?;
    let mut echo = [0; 4];
    socket.read_exact(&mut echo)?;
    ensure!(echo == [0x81, 0x02, b'h', b'i']);
    drop(socket);
    world.wait_state(HOST, "asleep")?;
    world.stop()
}

#[test]
fn a_removed_host_is_retired_awake_and_comes_back_with_its_rows() -> Result<()> {
    let world = world("1h")?;
    world.sign(HOST, "one")?;
    world.dormouse(&["rm", HOST])?;
    let answer = world.get(HOST, "/")?;
    ensure!(answer.status == 404, "removed: {}", answer.status);
    ensure!(world.dormouse(&["list"])?.is_empty());
    world.add(HOST, "guestbook")?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn an_instance_that_dies_is_woken_again_by_the_next_request() -> Result<()> {
    let world = world("1h")?;
    world.sign(HOST, "one")?;
    // The crash itself is answered by the proxy, not by the app.
    let crash = world.get(HOST, "/crash")?;
    ensure!(crash.status == 502, "the crash was answered {}", crash.status);
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn a_host_wakes_by_itself_when_it_is_due() -> Result<()> {
    let world = world("300ms")?;
    let soon = std::time::SystemTime::UNIX_EPOCH.elapsed()?.as_secs() + 3;
    let path = format!("/api/next-due?at={soon}");
    let set = client::request(world.address(), "POST", HOST, &path, Some("{}"))?;
    ensure!(set.status == 204, "{}", set.status);
    world.wait_state(HOST, "asleep")?;
    ensure!(world.host(HOST)?["due_ms"].as_u64() == Some(soon * 1000));
    world.wait_state(HOST, "awake")?;
    let metrics = world.metrics()?;
    ensure!(metrics.get("dormouse_due_wakes_total") == Some(&1.0), "{metrics:?}");
    world.stop()
}

#[test]
fn a_waiter_survives_a_restart_of_the_activator() -> Result<()> {
    let mut world = world("1h")?;
    world.end_activator(Signal::SIGTERM)?;
    let address = world.address();
    let waiting = std::thread::spawn(move || client::request(address, "GET", HOST, "/", None));
    world.start_activator()?;
    let answer = waiting.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
    ensure!(answer.status == 200, "{} {}", answer.head, world.log("activator.log")?);
    world.stop()
}

#[test]
fn another_box_is_refused_until_the_operator_says_that_the_first_is_gone() -> Result<()> {
    let (bin, mut plan) = plan("path", "auto", "1h")?;
    plan.config.push_str("[session]\nttl = \"2s\"\nmargin = \"500ms\"\n");
    let shared = tempfile::tempdir()?;
    plan.store = Some(shared.path().join("store"));
    let mut first = World::started(&bin, &plan)?;
    first.add(HOST, "guestbook")?;
    first.sign(HOST, "one")?;
    until(PATIENCE, "it is durable", || Ok(first.host(HOST)?["lag_ms"] == 0))?;
    let second = World::started(&bin, &Plan { name: "box-2".to_owned(), ..plan.clone() })?;
    second.add(HOST, "guestbook")?;
    let refused = second.get(HOST, "/")?;
    ensure!(refused.status == 503, "{}", refused.status);
    ensure!(refused.field("x-dormouse-reason") == Some("elsewhere"), "{}", refused.head);
    ensure!(refused.field("retry-after") == Some("3"), "TTL + 1 s: {}", refused.head);
    for by_hand in ["wake", "sleep"] {
        let said = second.dormouse_fails(&[by_hand, HOST], 1)?;
        ensure!(said.contains("box-1 owns"), "{by_hand}: {said}");
    }
    let alive = second.dormouse(&["takeover", "box-1"]).unwrap_err().to_string();
    ensure!(alive.contains("it lives"), "{alive}");
    first.end_activator(Signal::SIGKILL)?;
    second.dormouse(&["takeover", "box-1"])?;
    until(PATIENCE, "the second box serves it", || Ok(second.get(HOST, "/")?.status == 200))?;
    ensure!(second.names(HOST)? == ["one"], "nothing durable is lost");
    second.dormouse(&["sleep", HOST])?;
    second.wait_state(HOST, "asleep")?;
    second.dormouse(&["sleep", HOST]).context("asleep already is no error")?;
    ensure!(second.dormouse(&["wake", HOST])?.contains("awake"), "it is waited for");
    // The first comes back: its session is over, its host lives elsewhere.
    first.start_activator()?;
    let refused = first.get(HOST, "/")?;
    ensure!(refused.status == 503, "{}", refused.status);
    first.stop()?;
    second.stop()
}

#[test]
fn requests_in_flight_end_when_the_proxy_drains() -> Result<()> {
    let mut world = world("1h")?;
    world.get(HOST, "/")?;
    let address = world.address();
    let slow =
        std::thread::spawn(move || client::request(address, "GET", HOST, "/slow?ms=700", None));
    until(PATIENCE, "it is in flight", || Ok(world.host(HOST)?["in_flight"] == 1))?;
    world.end_proxy(Signal::SIGTERM)?;
    let answer = slow.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
    ensure!(answer.status == 200 && answer.text() == "slept\n", "{}", answer.status);
    let refused = TcpStream::connect_timeout(&address, Duration::from_secs(1));
    ensure!(refused.is_err(), "nobody listens any more");
    world.stop()
}

#[test]
fn what_is_written_after_a_restore_from_a_snapshot_survives_the_activators_death() -> Result<()> {
    let bin = programs()?;
    let config = World::guestbook(&bin, "path").replace("\"stream\"", "\"batched\"");
    let mut world = World::started(&bin, &Plan { config, ..Plan::default() })?;
    world.add(HOST, "guestbook")?;
    let snapshots = world.path("store/dormouse").join(HOST).join("ltx/9");
    let mut signed = Vec::new();
    while !snapshots.is_dir() {
        ensure!(signed.len() < 20, "no snapshot after {} visits", signed.len());
        signed.push(format!("visit {}", signed.len()));
        world.sign(HOST, signed.last().context("a name")?)?;
        world.dormouse(&["sleep", HOST])?;
        world.wait_state(HOST, "asleep")?;
    }
    world.lose_copy(HOST)?;
    signed.push("after".into());
    world.sign(HOST, "after")?;
    world.end_activator(Signal::SIGKILL)?;
    ensure!(world.names_stored(HOST)?.len() + 1 == signed.len(), "not uploaded yet");
    world.start_activator()?;
    ensure!(world.names(HOST)? == signed, "the copy on disk is the newest there is");
    world.stop()
}

#[test]
fn a_stop_that_comes_while_the_activator_starts_ends_it() -> Result<()> {
    let mut world = world("1h")?;
    world.end_activator(Signal::SIGKILL)?;
    // It waits for this proxy to come to its table.
    let proxy = world.proxy_pid()?;
    kill(proxy, Signal::SIGSTOP)?;
    world.begin_activator()?;
    kill(world.activator_pid()?, Signal::SIGTERM)?;
    let heard = || Ok(world.log("activator.log")?.contains("asked to stop"));
    let waited = until(PATIENCE, "the signal is heard", heard);
    kill(proxy, Signal::SIGCONT)?;
    waited?;
    world.end_activator(Signal::SIGTERM)?;
    world.start_activator()?;
    world.sign(HOST, "one")?;
    world.stop()
}
