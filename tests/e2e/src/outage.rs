//! A store that is away for a while, under writes, with manual takeover: the app goes on, the lag
//! is told, and everything is uploaded afterwards.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dormouse_test_store::{Fault, FaultProxy, Server};

use crate::wait::until;
use crate::world::{PATIENCE, Plan, World};

const HOST: &str = "a.test";

/// Requests that the activator may send for hosts into the outage: what was on its way, and then
/// about two a second.
const BURST: u64 = 20;
const REQUESTS_PER_S: u64 = 2;

/// What was seen.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Rows that the app took before, during and after.
    pub rows: usize,
    /// Of them, rows that it took while the store was away.
    pub during: usize,
    /// Requests for the host that were tried while the store was away.
    pub tried: u64,
    /// From the store's return until nothing was behind, milliseconds.
    pub caught_up_ms: u128,
}

fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "how long it took is what is reported")]
    Instant::now()
}

/// Runs it with an outage of this length; `bin` holds the programs under test.
pub fn run(bin: &Path, weed: &Path, length: Duration) -> Result<Report> {
    let server = Server::seaweed_by(weed)?;
    server.make_bucket("e2e")?;
    let proxy = FaultProxy::start(server.address())?;
    let session = "[session]\nttl = \"2s\"\nmargin = \"500ms\"\n";
    let plan = Plan {
        config: format!("{session}{}", World::guestbook(bin, "path")),
        store_section: Some(server.section(&proxy.endpoint(), "e2e", "outage")?),
        ..Plan::default()
    };
    let world = World::started(bin, &plan)?;
    world.add(HOST, "guestbook")?;
    world.sign(HOST, "before")?;
    until(PATIENCE, "the first row is durable", || Ok(world.host(HOST)?["lag_ms"] == 0))?;
    let mut rows = 1;
    proxy.set(Fault::Refuse);
    let tried_before = world.store_requests()?;
    let begin = now();
    let place = world.status()?["store"].as_str().context("a store")?.to_owned();
    let mut told = false;
    while now() - begin < length || !told {
        world.sign(HOST, &format!("during {rows}"))?;
        rows += 1;
        let (status, host) = (world.status()?, world.host(HOST)?);
        let behind = host["lag_ms"].as_u64().is_some_and(|ms| ms > 500);
        let why = host["replica"].as_str().is_some_and(|text| text.contains("stalled"));
        let away = status["store"].as_str().is_some_and(|text| text.contains(": away: "));
        let counted = world.metrics()?.get("dormouse_store_usable") == Some(&0.0);
        told |= status["session"] == "unrenewed" && behind && why && away && counted;
        ensure!(now() - begin < length + PATIENCE, "not told: {status} {host}");
        std::thread::park_timeout(Duration::from_millis(20));
    }
    let tried = world.store_requests()?.saturating_sub(tried_before);
    let most = BURST + REQUESTS_PER_S * (now() - begin).as_secs();
    ensure!(tried <= most, "{tried} requests in {:?}", now() - begin);
    let during = rows - 1;
    proxy.set(Fault::None);
    let back = now();
    until(PATIENCE, "the session is live again", || Ok(world.status()?["session"] == "live"))?;
    ensure!(world.status()?["store"] == place.as_str(), "{}", world.status()?);
    ensure!(world.metrics()?.get("dormouse_store_usable") == Some(&1.0), "it is usable again");
    world.sign(HOST, "after")?;
    rows += 1;
    until(PATIENCE, "nothing is behind", || Ok(world.host(HOST)?["lag_ms"] == 0))?;
    let caught_up_ms = back.elapsed().as_millis();
    let copy = world.path("copy.db");
    world.dormouse(&["restore", HOST, "--to", &copy.display().to_string()])?;
    let database = rusqlite::Connection::open(&copy)?;
    let restored: i64 = database.query_row("SELECT count(*) FROM entries", [], |row| row.get(0))?;
    ensure!(usize::try_from(restored)? == rows, "{restored} of {rows} rows are in the store");
    world.stop().context("after an outage")?;
    Ok(Report { rows, during, tried, caught_up_ms })
}
