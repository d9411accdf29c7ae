//! How long a sleeping host takes to its first byte, beside the bare start of the same app.
//!
//! `bare-start` is the same program on the same database with its socket bound before: a client
//! connects, the process is started, the answer's first byte is awaited. The phases are read from
//! the activator's own event log.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use dormouse_core::event::{Answer, Event, Line};
use dormouse_e2e::world::{Plan, World};
use dormouse_instances::{Limits, Nursery, Start, environment_of};

use super::{Bench, Row, quantile};
use crate::shell::build;

const CASE: &str = "wake/dir";
const FROZEN: &str = "wake/frozen";
const HOST: &str = "bench.test";
/// Wakes a round; rounds alternate with the peer's.
const WAKES: usize = 10;
const ROUNDS: usize = 9;

pub(crate) fn run(bench: &Bench) -> Result<Vec<Row>> {
    let bin = build("release")?;
    let mut rows = Vec::new();
    if bench.wants(CASE) {
        rows.extend(dir(&bin, bench)?);
    }
    if bench.wants(FROZEN) {
        rows.extend(frozen(&bin, bench)?);
    }
    Ok(rows)
}

fn row(case: &str, metric: &str, ours: f64, theirs: Option<f64>) -> Row {
    Row {
        case: case.to_owned(),
        metric: metric.to_owned(),
        unit: "ms",
        ours,
        peer: theirs.map(|theirs| ("bare-start", theirs)),
    }
}

const QUANTILES: [(&str, f64); 2] = [("p50", 0.5), ("p99", 0.99)];

/// A host whose instance is frozen when the request comes, beside the bare start of the same app.
fn frozen(bin: &Path, bench: &Bench) -> Result<Vec<Row>> {
    let config = format!("{}freeze = \"1h\"\n", World::guestbook(bin, "fd"));
    let plan = Plan { config, idle: "100ms".to_owned(), ..Plan::default() };
    let world = World::started(bin, &plan)?;
    world.add(HOST, "guestbook")?;
    world.sign(HOST, "one")?;
    let bare = Bare::new(bin)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds(ROUNDS) * WAKES {
        world.wait_state(HOST, "frozen")?;
        ours.push(first_byte(&world)?);
        theirs.push(bare.first_byte()?);
    }
    let thaws = world.metrics()?.get("dormouse_wakes_total").copied();
    ensure!(thaws == Some(1.0), "it was started more than once: {thaws:?}");
    world.stop()?;
    let rows = QUANTILES.map(|(name, share)| {
        let (mine, other) = (quantile(&ours, share), quantile(&theirs, share));
        row(FROZEN, &format!("first_byte_ms_{name}"), mine, Some(other))
    });
    Ok(rows.into())
}

/// A directory store on a disk, an owned host with a current copy.
fn dir(bin: &Path, bench: &Bench) -> Result<Vec<Row>> {
    let config = format!("next_due = \"1s\"\n{}", World::guestbook(bin, "fd"));
    let plan = Plan { config, ..Plan::default() };
    let world = World::started(bin, &plan)?;
    world.add(HOST, "guestbook")?;
    world.sign(HOST, "one")?;
    sleep(&world)?;
    let bare = Bare::new(bin)?;
    let (mut ours, mut theirs, mut over) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..bench.rounds(ROUNDS) {
        for _ in 0..WAKES {
            let woken = first_byte(&world)?;
            sleep(&world)?;
            let started = bare.first_byte()?;
            ours.push(woken);
            theirs.push(started);
            over.push(woken - started);
        }
    }
    let phases = phases(&world.path("data/events.log"))?;
    world.stop()?;
    let mut rows = Vec::new();
    for (name, share) in QUANTILES {
        let (mine, other) = (quantile(&ours, share), quantile(&theirs, share));
        rows.push(row(CASE, &format!("first_byte_ms_{name}"), mine, Some(other)));
        rows.push(row(CASE, &format!("over_bare_ms_{name}"), quantile(&over, share), None));
    }
    for (phase, samples) in phases {
        rows.push(row(CASE, &format!("phase_{phase}_ms_p50"), quantile(&samples, 0.5), None));
    }
    Ok(rows)
}

fn sleep(world: &World) -> Result<()> {
    world.dormouse(&["sleep", HOST])?;
    world.wait_state(HOST, "asleep")
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn clock() -> Instant {
    Instant::now()
}

fn ask(mut stream: impl Read + Write, start: Instant) -> Result<f64> {
    write!(stream, "GET /api/count HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n")?;
    let mut first = [0];
    stream.read_exact(&mut first)?;
    let taken = millis(start);
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest)?;
    ensure!(rest.starts_with(b"TTP/1.1 200"), "{}", String::from_utf8_lossy(&rest));
    Ok(taken)
}

fn first_byte(world: &World) -> Result<f64> {
    let start = clock();
    ask(std::net::TcpStream::connect(world.address())?, start)
}

/// The same app, started by hand.
struct Bare {
    dir: tempfile::TempDir,
    nursery: Nursery,
    runtime: tokio::runtime::Runtime,
    program: std::path::PathBuf,
}

impl Bare {
    fn new(bin: &Path) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let nursery = Nursery::open(dir.path())?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { dir, nursery, runtime, program: bin.join("guestbook") })
    }

    fn first_byte(&self) -> Result<f64> {
        let at = |name: &str| self.dir.path().join(name);
        let socket = at("bare.sock");
        fs::remove_file(&socket).ok();
        let text = |path: &Path| path.display().to_string();
        let start = Start {
            host: "bare".to_owned(),
            run: 1,
            program: self.program.clone(),
            args: vec![
                "--socket".to_owned(),
                text(&socket),
                "--db".to_owned(),
                text(&at("app.db")),
            ],
            env: environment_of(self.dir.path(), "bare"),
            dir: self.dir.path().to_owned(),
            log: at("app.log"),
            listener: None,
            user: None,
            confine: None,
            limits: Limits::default(),
        };
        let begun = clock();
        let listener = UnixListener::bind(&socket)?;
        let _inside = self.runtime.enter();
        let start = Start { listener: Some(listener.into()), ..start };
        let instance = self.nursery.start(start).context("the bare start")?;
        let taken = ask(UnixStream::connect(&socket)?, begun)?;
        instance.terminate();
        self.runtime.block_on(instance.gone())?;
        Ok(taken)
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        self.nursery.close();
    }
}

/// Milliseconds from one step of a wake to the next, a phase.
fn phases(log: &Path) -> Result<BTreeMap<&'static str, Vec<f64>>> {
    let mut phases: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    let mut last: Option<u64> = None;
    for line in fs::read_to_string(log)?.lines() {
        let Line::Step(now, event) = serde_json::from_str(line)? else { continue };
        let at = now.mono.0;
        if let Event::Requested(..) = event {
            last = Some(at);
        }
        let Event::Answer(_, answer) = event else { continue };
        let Some(phase) = phase_of(&answer) else { continue };
        if let Some(before) = last.replace(at) {
            let nanos = u32::try_from(at.saturating_sub(before)).unwrap_or(u32::MAX);
            phases.entry(phase).or_default().push(f64::from(nanos) / 1e6);
        }
        if phase == "4_attach" {
            last = None;
        }
    }
    Ok(phases)
}

const fn phase_of(answer: &Answer) -> Option<&'static str> {
    if matches!(answer, Answer::Inspected(_)) {
        Some("1_inspect")
    } else if matches!(answer, Answer::Opened(_)) {
        Some("2_open")
    } else if matches!(answer, Answer::Healthy(_)) {
        Some("3_start")
    } else if matches!(answer, Answer::Attached(_)) {
        Some("4_attach")
    } else {
        None
    }
}
