//! `cargo xtask demo`: three guestbooks to play with; `--check`: the whole story by itself.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dormouse_e2e::client;
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use nix::sys::signal::Signal;

use crate::shell::build;

const HOSTS: [&str; 3] = ["ada.localhost", "bob.localhost", "eve.localhost"];
/// Short enough to watch.
const IDLE: &str = "10s";
/// Short enough for the story.
const IDLE_CHECK: &str = "1s";
/// Simultaneous requests to a sleeping host; below `waiters_per_host`.
const CROWD: usize = 200;

fn plan(bin: &Path, idle: &str) -> Plan {
    Plan { config: World::guestbook(bin, "fd"), idle: idle.to_owned(), ..Plan::default() }
}

/// Runs until Ctrl-C, and shows wakes and sleeps as they happen.
pub(crate) fn play() -> Result<()> {
    let stop = stop_on_interrupt()?;
    println!("demo: building");
    let bin = build("dev")?;
    let world = World::started(&bin, &plan(&bin, IDLE))?;
    println!("demo: a host sleeps after {IDLE} without a request; open");
    for host in HOSTS {
        world.add(host, "guestbook")?;
        println!("  http://{host}:{}", world.address().port());
    }
    println!("demo: its files are below {}; Ctrl-C ends it", world.path("").display());
    let mut seen = std::collections::BTreeMap::new();
    let mut shown = |world: &World| -> Result<()> {
        for host in world.status()?["hosts"].as_array().into_iter().flatten() {
            let text = |key: &str| host[key].as_str().unwrap_or_default().to_owned();
            let (name, state) = (text("host"), text("state"));
            if seen.insert(name.clone(), state.clone()).as_ref() != Some(&state) {
                println!("  {name:<16} {state}");
            }
        }
        Ok(())
    };
    while !stop.load(Ordering::SeqCst) {
        shown(&world)?;
        std::thread::park_timeout(Duration::from_millis(50));
    }
    println!("demo: putting every host to sleep");
    world.stop()?;
    println!("demo: ended, nothing is left running");
    Ok(())
}

/// Ctrl-C and SIGTERM ask for an end. Handled, not blocked: a mask would be inherited by children.
fn stop_on_interrupt() -> Result<Arc<AtomicBool>> {
    use tokio::signal::unix::{SignalKind, signal};
    let stop = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&stop);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    drop(guard);
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        raised.store(true, Ordering::SeqCst);
    });
    Ok(stop)
}

/// The story's steps, told and counted.
struct Story {
    world: World,
    steps: u32,
}

impl Story {
    fn step(&mut self, what: &str, work: impl FnOnce(&mut World) -> Result<()>) -> Result<()> {
        let told = work(&mut self.world);
        if told.is_err() {
            println!("{}", self.world.log("activator.log")?);
            println!("{}", self.world.log("proxy.log")?);
        }
        told.with_context(|| format!("demo: step {}: {what}", self.steps + 1))?;
        self.steps += 1;
        println!("demo: {what}");
        Ok(())
    }
}

/// The whole story; its last line is `demo: N steps passed`.
pub(crate) fn check() -> Result<()> {
    let bin = build("dev")?;
    let world = World::started(&bin, &plan(&bin, IDLE_CHECK))?;
    let [host, _, crowded] = HOSTS;
    let mut story = Story { world, steps: 0 };
    for host in HOSTS {
        story.world.add(host, "guestbook")?;
    }
    story.step("a request wakes a sleeping host", |world| {
        ensure!(world.get(host, "/")?.status == 200);
        Ok(())
    })?;
    story.step("it is written to", |world| {
        world.sign(host, "first")?;
        world.sign(host, "second")
    })?;
    story.step("it sleeps by idleness", |world| world.wait_state(host, "asleep"))?;
    story.step("it wakes warm", |world| names_are(world, host, &["first", "second"]))?;
    story.step("it sleeps again", |world| world.wait_state(host, "asleep"))?;
    story.step("its local database is deleted", |world| world.lose_copy(host))?;
    story.step("it wakes restored, the rows are there", |world| {
        names_are(world, host, &["first", "second"])
    })?;
    story.step("it is written to once more", |world| world.sign(host, "third"))?;
    story.step("the activator is killed and started again", |world| {
        world.end_activator(Signal::SIGKILL)?;
        world.start_activator()
    })?;
    story.step("the rows are there", |world| {
        names_are(world, host, &["first", "second", "third"])
    })?;
    story.step("200 simultaneous requests make one wake, and all get 200", |world| {
        crowd(world, crowded)
    })?;
    story.step("nothing is left running", |world| {
        world.end_proxy(Signal::SIGTERM)?;
        world.end_activator(Signal::SIGTERM)?;
        until(PATIENCE, "every process is gone", || Ok(world.left_running().is_empty()))
    })?;
    println!("demo: {} steps passed", story.steps);
    Ok(())
}

fn names_are(world: &World, host: &str, want: &[&str]) -> Result<()> {
    let names = world.names(host)?;
    ensure!(names == want, "{host} has {names:?}, not {want:?}");
    Ok(())
}

fn crowd(world: &World, host: &'static str) -> Result<()> {
    world.get(host, "/")?;
    world.wait_state(host, "asleep")?;
    let wakes = |world: &World| -> Result<f64> {
        let all = world.metrics()?;
        Ok(all.get("dormouse_wakes_total").copied().unwrap_or(0.0))
    };
    let before = wakes(world)?;
    let (address, barrier) = (world.address(), Arc::new(Barrier::new(CROWD)));
    let threads: Vec<_> = (0..CROWD)
        .map(|_| {
            let barrier = Arc::clone(&barrier);
            std::thread::spawn(move || {
                barrier.wait();
                client::request(address, "GET", host, "/api/count", None)
            })
        })
        .collect();
    let mut good = 0;
    for thread in threads {
        let answer = thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        good += usize::from(answer.status == 200);
    }
    let woken = wakes(world)? - before;
    ensure!(good == CROWD, "{good} of {CROWD} got 200");
    ensure!((woken - 1.0).abs() < f64::EPSILON, "{woken} wakes");
    Ok(())
}
