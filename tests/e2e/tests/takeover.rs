//! Automatic takeover with real processes, and hosts that an outside supervisor runs for a while.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use dormouse_e2e::{client, programs};
use dormouse_test_store::{Fault, FaultProxy, Server};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const HOST: &str = "a.test";
/// What is restored from a slow store; each way takes 300 ms.
const LARGE_MB: i64 = 25;
const SESSION: &str = "[session]\nttl = \"2s\"\nmargin = \"500ms\"\ntakeover = \"automatic\"\n";

fn plan(bin: &Path, name: &str, session: &str) -> Plan {
    Plan {
        config: format!("{session}{}", World::guestbook(bin, "path")),
        name: name.to_owned(),
        ..Plan::default()
    }
}

fn instance(world: &World) -> Result<i32> {
    let host = world.host(HOST)?;
    Ok(i32::try_from(host["pid"].as_i64().with_context(|| host.to_string())?)?)
}

/// A restore has these names; none that another box could not have uploaded.
fn in_the_store(world: &World, names: &[&str]) -> Result<()> {
    until(PATIENCE, "the host is in the store", || {
        let there = world.names_stored(HOST).unwrap_or_default();
        ensure!(!there.contains(&"late".to_owned()), "an upload past the deadline was accepted");
        Ok(there == names)
    })
}

fn forks(world: &World) -> Result<Vec<String>> {
    let host = world.host(HOST)?;
    let forks = host["forks"].as_array().cloned().unwrap_or_default();
    Ok(forks.iter().filter_map(|fork| Some(fork.as_str()?.to_owned())).collect())
}

fn problem(world: &World) -> Result<String> {
    Ok(world.host(HOST)?["problem"].as_str().unwrap_or_default().to_owned())
}

/// The first box is suspended past its deadline with a commit that it could not upload; the second
/// takes the host; then the first goes on.
fn suspended(mut first: World, mut second: World) -> Result<()> {
    first.start_activator()?;
    first.start_proxy()?;
    first.add(HOST, "guestbook")?;
    first.sign(HOST, "one")?;
    in_the_store(&first, &["one"])?;
    let app = Pid::from_raw(instance(&first)?);
    kill(first.activator_pid()?, Signal::SIGSTOP)?;
    first.sign(HOST, "late")?;
    kill(app, Signal::SIGSTOP)?;
    // A request that is under way somewhere: its app answers once it goes on, if it got so far.
    let address = first.address();
    let held = std::thread::spawn(move || {
        let entry = r#"{"name":"held","text":"a text"}"#;
        client::request(address, "POST", HOST, "/api/entries", Some(entry))
    });
    kill(first.proxy_pid()?, Signal::SIGSTOP)?;

    second.start_activator()?;
    second.start_proxy()?;
    second.add(HOST, "guestbook")?;
    until(PATIENCE, "the second box takes the host", || {
        let answer = second.get(HOST, "/api/entries")?;
        if answer.field("x-dormouse-reason") == Some("elsewhere") {
            let told = problem(&second)?;
            ensure!(told.contains("is taken over in"), "until when it waits: {told}");
            let wait_s: u64 = answer.field("retry-after").context("when to ask again")?.parse()?;
            ensure!((1..=5).contains(&wait_s), "TTL + margin, and two seconds: {wait_s} s");
        }
        Ok(answer.status == 200)
    })?;
    ensure!(second.names(HOST)? == ["one"], "what was durable, and nothing else");
    second.sign(HOST, "two")?;

    for pid in [app, first.proxy_pid()?, first.activator_pid()?] {
        kill(pid, Signal::SIGCONT)?;
    }
    let held = held.join().map_err(|_| anyhow::anyhow!("a request panicked"))??;
    ensure!(held.status == 503, "what is answered past the deadline: {}", held.status);
    until(PATIENCE, "the suspended instance is stopped", || {
        Ok(kill(app, None).is_err() || first.host(HOST)?["state"] == "asleep")
    })?;
    until(PATIENCE, "what it could not upload is set aside", || Ok(!forks(&first)?.is_empty()))?;
    ensure!(kill(app, None).is_err(), "the suspended instance is gone");
    let answer = first.get(HOST, "/api/entries")?;
    ensure!(answer.status == 503, "the first box serves nothing: {}", answer.status);
    in_the_store(&second, &["one", "two"])?;
    let forks = forks(&first)?;
    let [fork] = forks.as_slice() else { anyhow::bail!("one fork: {forks:?}") };
    let database =
        rusqlite::Connection::open_with_flags(fork, rusqlite::OpenFlags::SQLITE_OPEN_READ_WRITE)
            .with_context(|| fork.to_owned())?;
    let rows: i64 = database
        .query_row("SELECT count(*) FROM entries WHERE name = 'late'", (), |row| row.get(0))
        .with_context(|| fork.to_owned())?;
    ensure!(rows == 1, "what was not uploaded is in the fork {fork}");
    first.stop()?;
    second.stop()
}

#[test]
fn a_box_that_was_suspended_past_its_deadline_stops_its_instances_and_uploads_nothing() -> Result<()>
{
    let (bin, shared) = (programs()?, tempfile::tempdir()?);
    let world = |name: &str| {
        let store = Some(shared.path().to_owned());
        World::new(&bin, &Plan { store, ..plan(&bin, name, SESSION) })
    };
    suspended(world("box-1")?, world("box-2")?)
}

#[test]
fn a_suspended_box_on_s3_is_fenced_by_the_stores_own_clock_too() -> Result<()> {
    let (bin, server) = (programs()?, Server::seaweed()?);
    server.make_bucket("e2e")?;
    let section = server.section(&server.endpoint(), "e2e", "suspended")?;
    let world = |name: &str| {
        let store_section = Some(section.clone());
        World::new(&bin, &Plan { store_section, ..plan(&bin, name, SESSION) })
    };
    suspended(world("box-1")?, world("box-2")?)
}

#[test]
fn with_automatic_takeover_an_outage_stops_the_host_and_its_last_commits_are_uploaded_afterwards()
-> Result<()> {
    let (bin, server) = (programs()?, Server::seaweed()?);
    server.make_bucket("e2e")?;
    let network = FaultProxy::start(server.address())?;
    let section = server.section(&network.endpoint(), "e2e", "outage")?;
    let plan = Plan { store_section: Some(section), ..plan(&bin, "box-1", SESSION) };
    let world = World::started(&bin, &plan)?;
    world.add(HOST, "guestbook")?;
    world.sign(HOST, "one")?;
    in_the_store(&world, &["one"])?;
    network.set(Fault::Refuse);
    world.sign(HOST, "two")?;
    until(PATIENCE, "the host is stopped at the deadline", || {
        Ok(world.host(HOST)?["state"] == "asleep")
    })?;
    ensure!(world.host(HOST)?["unsynced"] == true, "and said to be behind");
    let answer = world.get(HOST, "/api/entries")?;
    ensure!(answer.status == 503, "nothing runs without a session: {}", answer.status);
    network.set(Fault::None);
    // Nobody asks for it: what it wrote last is uploaded all the same.
    until(PATIENCE, "everything is in the store", || Ok(world.host(HOST)?["unsynced"] == false))?;
    ensure!(world.names_stored(HOST)? == ["one", "two"]);
    ensure!(world.names(HOST)? == ["one", "two"]);
    world.stop()
}

#[test]
fn a_host_goes_to_an_outside_supervisor_and_comes_back_with_what_was_written_there() -> Result<()> {
    let (bin, shared) = (programs()?, tempfile::tempdir()?);
    let world = |name: &str| {
        let store = Some(shared.path().to_owned());
        World::started(&bin, &Plan { store, ..plan(&bin, name, "") })
    };
    let (mut first, second) = (world("box-1")?, world("box-2")?);
    first.add(HOST, "guestbook")?;
    first.sign(HOST, "one")?;
    let said = first.dormouse(&["hibernate", HOST, "--off"])?;
    ensure!(said.contains("outside"), "{said}");
    ensure!(first.names_stored(HOST)? == ["one"], "everything was uploaded before");
    // It is told as what it is, before and after a restart and a removal.
    ensure!(first.host(HOST)?["state"] == "outside", "{}", first.host(HOST)?);
    ensure!(first.dormouse(&["status"])?.contains("outside"));
    first.end_activator(Signal::SIGTERM)?;
    first.start_activator()?;
    first.wait_state(HOST, "outside")?;
    let said = first.dormouse(&["rm", HOST])?;
    ensure!(said.contains("stays outside") && said.contains("--on"), "{said}");
    first.add(HOST, "guestbook")?;
    ensure!(first.host(HOST)?["state"] == "outside", "{}", first.host(HOST)?);
    second.add(HOST, "guestbook")?;
    for box_ in [&first, &second] {
        let answer = box_.get(HOST, "/api/entries")?;
        ensure!(answer.status == 503, "no box wakes it: {}", answer.status);
        ensure!(problem(box_)?.contains("outside supervisor"), "{}", problem(box_)?);
        ensure!(box_.host(HOST)?["state"] == "outside", "{}", box_.host(HOST)?);
        ensure!(box_.metrics()?.contains_key("dormouse_hosts{state=\"outside\"}"));
    }
    for by_hand in ["wake", "sleep"] {
        let said = first.dormouse_fails(&[by_hand, HOST], 1)?;
        ensure!(said.contains("outside"), "{by_hand}: {said}");
    }
    let refused = second.dormouse(&["hibernate", HOST, "--on"]);
    let refused = refused.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(refused.contains("--on` on that box"), "not the second box's file: {refused}");

    // The supervisor's app writes, with whatever journal it likes.
    let database = rusqlite::Connection::open(first.database(HOST))?;
    database.execute("INSERT INTO entries (name, text) SELECT 'outside', text FROM entries", ())?;
    database.close().map_err(|(_, error)| error)?;

    first.dormouse(&["hibernate", HOST, "--on"])?;
    ensure!(first.host(HOST)?["state"] == "asleep", "{}", first.host(HOST)?);
    ensure!(first.names_stored(HOST)? == ["one", "outside"], "the local file is the truth");
    ensure!(first.names(HOST)? == ["one", "outside"]);
    first.stop()?;
    second.stop()
}

#[test]
fn a_large_host_of_a_box_that_is_gone_is_taken_over_from_a_slow_store() -> Result<()> {
    let (bin, server) = (programs()?, Server::seaweed()?);
    server.make_bucket("e2e")?;
    let proxy = FaultProxy::start(server.address())?;
    let session = "[session]\nttl = \"2s\"\nmargin = \"500ms\"\n";
    let on = |name: &str, endpoint: &str| -> Result<Plan> {
        let section = server.section(endpoint, "e2e", "large")?;
        Ok(Plan { store_section: Some(section), ..plan(&bin, name, session) })
    };
    let mut first = World::started(&bin, &on("box-1", &server.endpoint())?)?;
    first.add(HOST, "guestbook")?;
    first.sign(HOST, "one")?;
    let writer = rusqlite::Connection::open(first.database(HOST))?;
    writer.busy_timeout(PATIENCE)?;
    writer.execute(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
         INSERT INTO entries (name, text) SELECT 'bulk', hex(randomblob(50000)) FROM n",
        [LARGE_MB * 10],
    )?;
    drop(writer);
    first.sign(HOST, "two")?;
    first.dormouse(&["sleep", HOST])?;
    ensure!(
        first.host(HOST)?["unsynced"] == false,
        "{}\n{}",
        first.host(HOST)?,
        first.log("activator.log")?
    );
    let rows = first.names_all(HOST)?;
    first.end_activator(Signal::SIGKILL)?;
    let second = World::started(&bin, &on("box-2", &proxy.endpoint())?)?;
    proxy.delay(std::time::Duration::from_millis(300));
    second.add(HOST, "guestbook")?;
    ensure!(second.get(HOST, "/")?.field("x-dormouse-reason") == Some("elsewhere"));
    second.dormouse(&["takeover", "box-1"])?;
    let woken = second.dormouse(&["wake", HOST])?;
    ensure!(woken.contains("awake"), "{woken}");
    ensure!(second.names_all(HOST)? == rows, "all of it");
    second.sign(HOST, "three")?;
    second.dormouse(&["sleep", HOST])?;
    ensure!(second.host(HOST)?["unsynced"] == false, "{}", second.host(HOST)?);
    second.stop()
}
