//! Kills at random moments under write load, and then the loss of the local copy: whatever was
//! reported durable is in the restore.
//!
//! A row counts as durable when the newest acknowledged TXID has risen by two since it was
//! answered: the first of the two may have been cut before the row, the second was not.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use dormouse_test_store::Server;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::client;
use crate::dice::Dice;
use crate::wait::until;
use crate::world::{PATIENCE, Plan, World};

const HOST: &str = "kill.test";

/// What was killed and kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Rounds that were run.
    pub rounds: u32,
    /// Rows that the app answered with 201.
    pub answered: usize,
    /// Of them, rows that were reported durable; none is missing.
    pub durable: usize,
}

/// What a round ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    App,
    Activator,
    Proxy,
    All,
}

/// A row that the app answered, and what was durable then.
#[derive(Clone, Copy, Debug)]
struct Row {
    number: u64,
    txid: Option<u64>,
    durable: bool,
}

/// Rows that were answered, and the last number that was tried: one that was not answered may be
/// there all the same.
#[derive(Debug, Default)]
struct Book {
    rows: Mutex<Vec<Row>>,
    tried: AtomicU64,
}

type Rows = Arc<Book>;

fn lock(book: &Rows) -> std::sync::MutexGuard<'_, Vec<Row>> {
    book.rows.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs that many rounds, on a directory, or on the SeaweedFS of `weed`.
pub fn rounds(bin: &Path, weed: Option<&Path>, rounds: u32, seed: u64) -> Result<Report> {
    let config =
        format!("[session]\nttl = \"2s\"\nmargin = \"500ms\"\n{}", World::guestbook(bin, "path"));
    let server = weed.map(Server::seaweed_by).transpose()?;
    let store_section = match &server {
        None => None,
        Some(server) => {
            server.make_bucket("kills")?;
            Some(server.section(&server.endpoint(), "kills", "k")?)
        }
    };
    let mut world = World::started(bin, &Plan { config, store_section, ..Plan::default() })?;
    world.add(HOST, "guestbook")?;
    let mut dice = Dice::new(seed);
    let rows: Rows = Arc::default();
    let mut report = Report::default();
    for round in 0..rounds {
        one(&mut world, &rows, &mut dice).with_context(|| {
            let log = world.log("activator.log").unwrap_or_default();
            format!("round {round}, seed {seed}\n{log}")
        })?;
        report.rounds += 1;
    }
    let rows = lock(&rows);
    report.answered = rows.len();
    report.durable = rows.iter().filter(|row| row.durable).count();
    drop(rows);
    world.stop()?;
    Ok(report)
}

fn one(world: &mut World, rows: &Rows, dice: &mut Dice) -> Result<()> {
    world.get(HOST, "/healthz")?;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = write_until(world, Arc::clone(&stop), Arc::clone(rows));
    let begun = lock(rows).len();
    let some = usize::try_from(dice.roll(40))?;
    // The moment of the kill is told by progress, not by time.
    until(PATIENCE, "some rows are written", || {
        watch(world, rows)?;
        Ok(lock(rows).len() > begun + some)
    })?;
    let victim = match dice.roll(4) {
        0 => Victim::App,
        1 => Victim::Activator,
        2 => Victim::Proxy,
        _ => Victim::All,
    };
    strike(world, victim)?;
    stop.store(true, Ordering::SeqCst);
    writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
    strike(world, Victim::All)?;
    until(PATIENCE, "every instance is gone", || Ok(world.left_running().is_empty()))?;
    world.lose_copy(HOST)?;
    world.start_activator()?;
    world.start_proxy()?;
    check(world, rows)
}

/// Signs the book row by row, whatever happens to those who answer.
fn write_until(world: &World, stop: Arc<AtomicBool>, rows: Rows) -> std::thread::JoinHandle<()> {
    let address = world.address();
    std::thread::spawn(move || {
        while !stop.load(Ordering::SeqCst) {
            let number = rows.tried.fetch_add(1, Ordering::SeqCst) + 1;
            let entry = serde_json::json!({ "name": number.to_string(), "text": "x" }).to_string();
            let answer = client::request(address, "POST", HOST, "/api/entries", Some(&entry));
            if answer.is_ok_and(|answer| answer.status == 201) {
                lock(&rows).push(Row { number, txid: None, durable: false });
            }
        }
    })
}

/// Looks at what is durable now, and marks the rows that it covers.
fn watch(world: &World, rows: &Rows) -> Result<()> {
    let answered = lock(rows).len();
    let Some(durable) = world.host(HOST)?["durable_txid"].as_u64() else { return Ok(()) };
    for row in lock(rows).iter_mut().take(answered) {
        let since = *row.txid.get_or_insert(durable);
        row.durable |= durable >= since + 2;
    }
    Ok(())
}

fn strike(world: &mut World, victim: Victim) -> Result<()> {
    let app = world.host(HOST).ok().and_then(|host| host["pid"].as_i64());
    if matches!(victim, Victim::Activator | Victim::All) {
        world.end_activator(Signal::SIGKILL)?;
    }
    if matches!(victim, Victim::Proxy | Victim::All) {
        world.end_proxy(Signal::SIGKILL)?;
    }
    if let (Victim::App | Victim::All, Some(pid)) = (victim, app) {
        // One that has ended by itself is as dead.
        kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL).ok();
    }
    for pid in if victim == Victim::All { world.left_running() } else { Vec::new() } {
        kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
    }
    match victim {
        Victim::Activator => world.start_activator(),
        Victim::Proxy => world.start_proxy(),
        Victim::App | Victim::All => Ok(()),
    }
}

fn check(world: &World, rows: &Rows) -> Result<()> {
    until(PATIENCE, "the host serves again", || {
        Ok(world.get(HOST, "/healthz").is_ok_and(|answer| answer.status == 200))
    })?;
    let names = world.names_all(HOST)?;
    let found: Vec<u64> = names.iter().filter_map(|name| name.parse().ok()).collect();
    ensure!(found.windows(2).all(|pair| pair[0] < pair[1]), "rows are out of order or doubled");
    let mut rows = lock(rows);
    let missing: Vec<u64> = rows
        .iter()
        .filter(|row| row.durable && found.binary_search(&row.number).is_err())
        .map(|row| row.number)
        .collect();
    ensure!(missing.is_empty(), "reported durable, and missing: {missing:?}");
    // What was lost without a promise is forgotten; what is there now is durable.
    rows.retain(|row| found.binary_search(&row.number).is_ok());
    for row in rows.iter_mut() {
        row.durable = true;
    }
    Ok(())
}
