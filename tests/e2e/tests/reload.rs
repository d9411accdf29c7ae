//! `dormouse reload` and SIGHUP: the config is read again while everything is served.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;

use anyhow::{Result, ensure};
use dormouse_e2e::load::Load;
use dormouse_e2e::programs;
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use nix::sys::signal::{Signal, kill};

const HOST: &str = "a.test";

fn world() -> Result<World> {
    let bin = programs()?;
    let config = World::guestbook(&bin, "fd");
    let world = World::started(&bin, &Plan { config, ..Plan::default() })?;
    world.add(HOST, "guestbook")?;
    Ok(world)
}

fn edit(world: &World, from: &str, to: &str) -> Result<()> {
    let text = fs::read_to_string(world.config())?;
    ensure!(text.contains(from), "{from:?} is not in {text}");
    Ok(fs::write(world.config(), text.replacen(from, to, 1))?)
}

#[test]
fn apps_idle_times_and_limits_change_while_requests_are_served() -> Result<()> {
    let world = world()?;
    world.sign(HOST, "one")?;
    let before = world.host(HOST)?;
    let load = Load::start(world.address(), HOST, "/healthz", 4);
    let reach = |count: u64| until(PATIENCE, "requests are served", || Ok(load.done() >= count));
    reach(500)?;
    edit(&world, "listen = \"fd\"", "listen = \"fd\"\nidle = \"300ms\"\nenv = { MORE = \"1\" }")?;
    edit(&world, "[edge]", "[edge.limits]\nbody_bytes = 1000\n[edge]")?;
    let other = World::guestbook(&programs()?, "path").replace("app.guestbook", "app.other");
    edit(&world, "[store]", &format!("{other}[store]"))?;
    let said = world.dormouse(&["reload"])?;
    for key in ["app.guestbook.idle", "app.guestbook.env", "app.other", "edge.limits.body_bytes"] {
        ensure!(said.contains(key), "{key}: {said}");
    }
    ensure!(!said.contains("NOT changed"), "{said}");
    world.add("other.test", "other")?;
    world.sign("other.test", "one")?;
    reach(load.done() + 500)?;
    let entry = serde_json::json!({ "name": "big", "text": "x".repeat(2000) });
    until(PATIENCE, "the new limit holds", || {
        Ok(world.post(HOST, "/api/entries", &entry)?.status == 413)
    })?;
    ensure!(world.host(HOST)?["pid"] == before["pid"], "it runs on");
    let report = load.stop();
    ensure!(report.failed.is_empty(), "{:?} of {}", report.failed, report.answered);
    world.wait_state(HOST, "asleep")?;
    let said = world.dormouse(&["reload"])?;
    ensure!(said.contains("says what it said"), "{said}");
    world.stop()
}

#[test]
fn a_config_with_an_error_changes_nothing_and_what_needs_a_restart_is_named() -> Result<()> {
    let world = world()?;
    world.sign(HOST, "one")?;
    let before = fs::read_to_string(world.config())?;
    edit(&world, "idle = \"1h\"", "idle = \"soon\"")?;
    let said = world.dormouse_fails(&["reload"], 1)?;
    ensure!(said.contains("soon") && said.contains("dormouse.toml"), "{said}");
    kill(world.activator_pid()?, Signal::SIGHUP)?;
    until(PATIENCE, "the log tells", || {
        let log = world.log("activator.log")?;
        Ok(log.contains("everything is as it was") && log.contains("soon"))
    })?;
    fs::write(world.config(), before.replace("app.guestbook", "app.book"))?;
    let said = world.dormouse_fails(&["reload"], 1)?;
    ensure!(said.contains("app.guestbook") && said.contains(HOST), "{said}");
    let text = before.replace("name = \"box-1\"", "name = \"box-2\"");
    fs::write(world.config(), text.replace("idle = \"1h\"", "idle = \"300ms\"\ngrace = \"7s\""))?;
    let said = world.dormouse(&["reload"])?;
    let (live, fixed) = said.split_once("NOT changed until the activator").unwrap_or_default();
    ensure!(live.contains("sleep.idle"), "{said}");
    ensure!(fixed.contains("box.name") && fixed.contains("sleep.grace"), "{said}");
    ensure!(world.status()?["box"] == "box-1");
    world.wait_state(HOST, "asleep")?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn a_proxy_takes_plain_routes_at_sighup_and_keeps_what_it_serves() -> Result<()> {
    let world = world()?;
    world.sign(HOST, "one")?;
    let listener = UnixListener::bind(world.path("plain.sock"))?;
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut head = [0; 4096];
            if stream.read(&mut head).is_ok() {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nplain").ok();
            }
        }
    });
    let load = Load::start(world.address(), HOST, "/healthz", 2);
    let upstream = world.path("plain.sock").display().to_string();
    let route = format!("[[route]]\nhost = \"plain.test\"\nupstream = \"unix:{upstream}\"\n");
    edit(&world, "[store]", &format!("{route}[store]"))?;
    ensure!(world.dormouse(&["reload"])?.contains("read by the proxy at its own reload"));
    ensure!(world.get("plain.test", "/")?.status == 404, "not told yet");
    kill(world.proxy_pid()?, Signal::SIGHUP)?;
    until(PATIENCE, "the route is served", || Ok(world.get("plain.test", "/")?.status == 200))?;
    edit(&world, "[[route]]", "[[route]")?;
    kill(world.proxy_pid()?, Signal::SIGHUP)?;
    until(PATIENCE, "the log tells", || {
        Ok(world.log("proxy.log")?.contains("everything is as it was"))
    })?;
    ensure!(world.get("plain.test", "/")?.status == 200, "as it was");
    edit(&world, "[[route]", "[[route]]")?;
    edit(&world, &route, "")?;
    kill(world.proxy_pid()?, Signal::SIGHUP)?;
    until(PATIENCE, "the route is gone", || Ok(world.get("plain.test", "/")?.status == 404))?;
    let report = load.stop();
    ensure!(report.failed.is_empty() && report.answered > 0, "{:?}", report.failed);
    world.stop()
}
