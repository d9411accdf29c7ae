//! An activator that is suspended past its session's deadline, with automatic takeover: the proxy
//! refuses, the guard kills, both in time, and nothing that was answered is lost.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_gettime};
use serde_json::Value;

use crate::client;
use crate::dice::Dice;
use crate::wait::until;
use crate::world::{PATIENCE, Plan, World};

const HOST: &str = "held.test";
/// `[session] margin`: how long the kill may take. Another box takes over no earlier.
const MARGIN_NS: u64 = 500_000_000;

/// What was suspended and killed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Rounds that were run.
    pub rounds: u32,
    /// Rows that the app answered with 201; none is missing.
    pub answered: usize,
    /// The longest time from a deadline to the last process's end, milliseconds.
    pub latest_kill_ms: u64,
    /// Requests that were refused between a deadline and the activator's return.
    pub refused: usize,
}

/// One request of the writer.
#[derive(Clone, Copy, Debug)]
struct Row {
    number: u64,
    sent_ns: u64,
    status: u16,
}

type Rows = Arc<Mutex<Vec<Row>>>;

fn lock(rows: &Rows) -> std::sync::MutexGuard<'_, Vec<Row>> {
    rows.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nanoseconds of `CLOCK_BOOTTIME`, which the deadline is told in.
fn boottime_ns() -> Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME)?;
    Ok(u64::try_from(now.tv_sec())? * 1_000_000_000 + u64::try_from(now.tv_nsec())?)
}

/// A box with a guard, on a directory, with a session of 2 s and automatic takeover.
pub fn world(bin: &Path) -> Result<World> {
    let config = format!(
        "[session]\nttl = \"2s\"\nmargin = \"500ms\"\ntakeover = \"automatic\"\n{}",
        World::guestbook(bin, "path")
    );
    let mut world = World::new(bin, &Plan { config, ..Plan::default() })?;
    world.start_guard()?;
    world.start_activator()?;
    world.start_proxy()?;
    world.add(HOST, "guestbook")?;
    Ok(world)
}

/// Runs that many rounds.
pub fn rounds(bin: &Path, rounds: u32, seed: u64) -> Result<Report> {
    let world = world(bin)?;
    let mut dice = Dice::new(seed);
    let rows = Rows::default();
    let next = Arc::new(AtomicU64::new(1));
    let mut report = Report::default();
    for round in 0..rounds {
        one(&world, &rows, &next, &mut dice, &mut report).with_context(|| {
            let log = |name| world.log(name).unwrap_or_default();
            format!("round {round}, seed {seed}\n{}{}", log("guard.log"), log("activator.log"))
        })?;
        report.rounds += 1;
    }
    report.answered = lock(&rows).iter().filter(|row| row.status == 201).count();
    world.stop()?;
    Ok(report)
}

fn one(
    world: &World,
    rows: &Rows,
    next: &Arc<AtomicU64>,
    dice: &mut Dice,
    report: &mut Report,
) -> Result<()> {
    serves_again(world)?;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = write_until(world, Arc::clone(&stop), Arc::clone(rows), Arc::clone(next));
    let begun = lock(rows).len();
    let some = usize::try_from(dice.roll(60))?;
    until(PATIENCE, "some rows are written", || Ok(lock(rows).len() > begun + some))?;
    let activator = world.activator_pid()?;
    kill(activator, Signal::SIGSTOP)?;
    let outcome = is_ended_in_time(world, rows, report);
    kill(activator, Signal::SIGCONT)?;
    stop.store(true, Ordering::SeqCst);
    writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
    outcome?;
    serves_again(world)?;
    let names = world.names_all(HOST)?;
    let found: Vec<u64> = names.iter().filter_map(|name| name.parse().ok()).collect();
    let missing: Vec<u64> = lock(rows)
        .iter()
        .filter(|row| row.status == 201 && !found.contains(&row.number))
        .map(|row| row.number)
        .collect();
    ensure!(missing.is_empty(), "answered, and missing: {missing:?}");
    Ok(())
}

fn is_ended_in_time(world: &World, rows: &Rows, report: &mut Report) -> Result<()> {
    let kept: Value = serde_json::from_slice(&std::fs::read(world.path("run/deadline.json"))?)?;
    let deadline = kept["deadline"]["boot"].as_u64().context("a deadline of BOOTTIME")?;
    until(PATIENCE, "nothing runs any more", || Ok(!world.has_instances()?))?;
    let late_ns = boottime_ns()?.saturating_sub(deadline);
    ensure!(late_ns < MARGIN_NS, "killed {late_ns} ns after the deadline");
    report.latest_kill_ms = report.latest_kill_ms.max(late_ns / 1_000_000);
    // Whoever hung in a request is answered now; the next ones are refused.
    let refused = |row: &&Row| row.sent_ns >= deadline && row.status == 503;
    until(PATIENCE, "a request is refused", || Ok(lock(rows).iter().any(|row| refused(&row))))?;
    let sent = lock(rows).iter().filter(|row| row.sent_ns >= deadline).copied().collect::<Vec<_>>();
    ensure!(sent.iter().all(|row| row.status == 503), "served past the deadline: {sent:?}");
    report.refused += sent.len();
    Ok(())
}

fn serves_again(world: &World) -> Result<()> {
    until(PATIENCE, "the host serves", || {
        Ok(world.get(HOST, "/healthz").is_ok_and(|answer| answer.status == 200))
    })
}

/// Signs the book row by row, and notes when each was sent and how it was answered.
fn write_until(
    world: &World,
    stop: Arc<AtomicBool>,
    rows: Rows,
    next: Arc<AtomicU64>,
) -> std::thread::JoinHandle<()> {
    let address = world.address();
    std::thread::spawn(move || {
        while !stop.load(Ordering::SeqCst) {
            let number = next.fetch_add(1, Ordering::SeqCst);
            let entry = serde_json::json!({ "name": number.to_string(), "text": "x" }).to_string();
            let sent_ns = boottime_ns().unwrap_or(u64::MAX);
            let answer = client::request(address, "POST", HOST, "/api/entries", Some(&entry));
            let status = answer.map_or(0, |answer| answer.status);
            lock(&rows).push(Row { number, sent_ns, status });
        }
    })
}
