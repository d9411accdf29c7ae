//! A host's life on a real S3 server, and what people see when the server is away or says no.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use dormouse_e2e::{outage, programs};
use dormouse_test_store::{Fault, FaultProxy, Scripted, Server};

const HOST: &str = "a.test";

fn plan(bin: &Path, section: String, more: &str) -> Plan {
    Plan {
        config: format!("{more}{}", World::guestbook(bin, "path")),
        store_section: Some(section),
        idle: "300ms".to_owned(),
        ..Plan::default()
    }
}

#[test]
fn a_host_lives_its_life_on_s3_and_another_box_restores_what_was_released() -> Result<()> {
    let (bin, server) = (programs()?, Server::seaweed()?);
    server.make_bucket("e2e")?;
    let section = server.section(&server.endpoint(), "e2e", "life")?;
    let first = World::started(&bin, &plan(&bin, section.clone(), ""))?;
    first.add(HOST, "guestbook")?;
    for name in ["one", "two"] {
        first.sign(HOST, name)?;
        first.wait_state(HOST, "asleep")?;
    }
    first.lose_copy(HOST)?;
    ensure!(first.names(HOST)? == ["one", "two"], "restored on the same box");
    first.wait_state(HOST, "asleep")?;
    first.dormouse(&["rm", HOST])?;
    let second = Plan { name: "box-2".to_owned(), ..plan(&bin, section, "") };
    let second = World::started(&bin, &second)?;
    second.add(HOST, "guestbook")?;
    ensure!(second.names(HOST)? == ["one", "two"], "released, and restored on another box");
    second.sign(HOST, "three")?;
    second.wait_state(HOST, "asleep")?;
    // The first takes it back when it was released again: its own copy is older by now.
    second.dormouse(&["rm", HOST])?;
    first.add(HOST, "guestbook")?;
    ensure!(first.names(HOST)? == ["one", "two", "three"]);
    first.stop()?;
    second.stop()
}

#[test]
fn a_visit_that_writes_nothing_to_an_owned_host_costs_no_request() -> Result<()> {
    let (bin, server) = (programs()?, Server::seaweed()?);
    server.make_bucket("e2e")?;
    let proxy = FaultProxy::start(server.address())?;
    let section = server.section(&proxy.endpoint(), "e2e", "cost")?;
    // What the first life leaves to be gathered and deleted is due in each visit.
    let levels = "[replica]\nlevel_1 = \"1s\"\nl0_retention = \"1s\"\n";
    let world = World::started(&bin, &plan(&bin, section, levels))?;
    world.add(HOST, "guestbook")?;
    world.sign(HOST, "one")?;
    world.wait_state(HOST, "asleep")?;
    let of_host = || proxy.requests().iter().filter(|line| line.contains(HOST)).count();
    let (counted, seen) = (world.store_requests()?, of_host());
    ensure!(counted > 0 && seen > 0, "its first life cost something: {counted} {seen}");
    for _ in 0..3 {
        ensure!(world.names(HOST)? == ["one"]);
        world.wait_state(HOST, "asleep")?;
    }
    let bill = || world.dormouse(&["status", "--cost"]);
    ensure!(
        world.store_requests()? == counted,
        "{counted} at first, {}, {:?}",
        bill()?,
        proxy.requests()
    );
    ensure!(of_host() == seen, "and nothing was sent past the ledger: {:?}", proxy.requests());
    let bill = world.dormouse(&["status", HOST, "--cost"])?;
    ensure!(bill.contains(HOST) && !bill.contains("sessions"), "{bill}");
    let metrics = world.metrics()?;
    let puts = metrics.get("dormouse_store_requests_total{operation=\"put\",of=\"sessions\"}");
    ensure!(puts.is_some_and(|puts| *puts >= 1.0), "{metrics:?}");
    world.stop()
}

#[test]
fn a_store_outage_under_writes_stops_no_app_and_all_is_uploaded_afterwards() -> Result<()> {
    let weed = std::env::var_os("DORMOUSE_WEED").context("DORMOUSE_WEED")?;
    let report = outage::run(&programs()?, Path::new(&weed), Duration::from_secs(3))?;
    ensure!(report.during > 10, "{report:?}");
    println!("{report:?}");
    Ok(())
}

/// A box whose session cannot be live; `says` is what `status` must come to say of the store.
fn unusable(section: String, says: &[&str]) -> Result<World> {
    let bin = programs()?;
    let more = "[edge.limits]\nwake_wait = \"2s\"\n";
    let mut world = World::new(&bin, &plan(&bin, section, more))?;
    world.begin_activator()?;
    until(PATIENCE, "the store's trouble is told", || {
        let text = world.status()?["store"].as_str().unwrap_or_default().to_owned();
        Ok(says.iter().all(|says| text.contains(says)))
    })
    .with_context(|| world.status().map(|status| status.to_string()).unwrap_or_default())?;
    let status = world.status()?;
    ensure!(status["session"] == "claiming", "{status}");
    world.start_proxy()?;
    world.add(HOST, "guestbook")?;
    let answer = world.get(HOST, "/")?;
    let said = format!("{} {}", answer.head, answer.text());
    ensure!(answer.status == 503 && answer.field("retry-after").is_some(), "{said}");
    // A wake waits for the session as long as its waiters do.
    let reason = answer.field("x-dormouse-reason").unwrap_or_default();
    ensure!(["store-down", "wake-timed-out"].contains(&reason), "{said}");
    Ok(world)
}

#[test]
fn a_missing_bucket_is_told_and_can_be_made_while_it_runs() -> Result<()> {
    let server = Server::ministack()?;
    let section = server.section(&server.endpoint(), "not-there", "p")?;
    let says = format!("bucket not-there does not exist at {}: create it", server.endpoint());
    let world = unusable(section, &["refused", &says])?;
    server.make_bucket("not-there")?;
    until(PATIENCE, "it is live", || Ok(world.status()?["session"] == "live"))?;
    world.sign(HOST, "one")?;
    world.stop()
}

#[test]
fn wrong_keys_are_told_and_no_secret_is() -> Result<()> {
    let server = Server::seaweed()?;
    server.make_bucket("e2e")?;
    let section = server.section(&server.endpoint(), "e2e", "p")?;
    let wrong = server.credentials("wrong-secret")?.display().to_string();
    let section: String = section
        .lines()
        .map(|line| {
            let is_keys = line.starts_with("credentials");
            if is_keys { format!("credentials = \"{wrong}\"\n") } else { format!("{line}\n") }
        })
        .collect();
    let world = unusable(section, &["refused", "check the keys", &wrong])?;
    ensure!(world.dormouse(&["status"])?.contains("check the keys"), "for people too");
    ensure!(!world.log("activator.log")?.contains("wrong-secret\""), "no secret is logged");
    world.stop()
}

#[test]
fn a_store_that_is_away_at_the_start_is_used_when_it_is_back() -> Result<()> {
    let server = Server::seaweed()?;
    server.make_bucket("e2e")?;
    let proxy = FaultProxy::start(server.address())?;
    proxy.set(Fault::Refuse);
    let section = server.section(&proxy.endpoint(), "e2e", "p")?;
    let world = unusable(section, &["away", &proxy.address().to_string()])?;
    proxy.set(Fault::None);
    until(PATIENCE, "it is live", || Ok(world.status()?["session"] == "live"))?;
    let place = format!("bucket e2e at {}", proxy.endpoint());
    ensure!(world.status()?["store"] == place.as_str(), "{}", world.status()?);
    world.sign(HOST, "one")?;
    // Away again: what must be restored waits for it, and its visitors are told.
    world.wait_state(HOST, "asleep")?;
    world.lose_copy(HOST)?;
    proxy.set(Fault::Refuse);
    let answer = world.get(HOST, "/")?;
    ensure!(answer.status == 503 && answer.field("retry-after").is_some(), "{}", answer.head);
    ensure!(answer.field("x-dormouse-reason") == Some("store-down"), "{}", answer.head);
    proxy.set(Fault::None);
    until(PATIENCE, "it is served again", || Ok(world.get(HOST, "/")?.status == 200))?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn a_store_that_says_slow_down_is_not_asked_more_often_for_it() -> Result<()> {
    let server = Scripted::start((503, Some("SlowDown")))?;
    let keys = Server::ministack()?;
    let section = keys.section(&server.endpoint(), "e2e", "p")?;
    let world = unusable(section, &["away", "SlowDown"])?;
    let (begin, before) = (now(), server.requests());
    let more = 4;
    until(PATIENCE, "it is asked again", || {
        world.get(HOST, "/")?;
        Ok(server.requests() >= before + more)
    })?;
    let took = begin.elapsed();
    ensure!(took > Duration::from_secs(2), "{more} requests in {took:?}, with visitors all along");
    world.stop()
}

#[test]
fn a_second_box_with_the_name_of_the_first_says_so_and_answers() -> Result<()> {
    let (bin, server) = (programs()?, Server::seaweed()?);
    server.make_bucket("e2e")?;
    let section = server.section(&server.endpoint(), "e2e", "names")?;
    let first = World::started(&bin, &plan(&bin, section.clone(), ""))?;
    first.add(HOST, "guestbook")?;
    first.sign(HOST, "one")?;
    let mut second = World::new(&bin, &plan(&bin, section, ""))?;
    second.begin_activator()?;
    until(PATIENCE, "the name is told", || Ok(second.status()?["session"] == "refused"))?;
    let status = second.status()?;
    let detail = status["session_detail"].as_str().unwrap_or_default();
    ensure!(detail.contains("the name box-1 is in use by another box"), "{status}");
    second.start_proxy()?;
    second.add(HOST, "guestbook")?;
    let answer = second.get(HOST, "/")?;
    ensure!(answer.status == 503, "{}", answer.head);
    ensure!(answer.field("x-dormouse-reason") == Some("session-expired"), "{}", answer.head);
    ensure!(first.names(HOST)? == ["one"], "the first does not notice");
    second.stop()?;
    first.stop()
}

fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "how often is measured in real time")]
    Instant::now()
}
