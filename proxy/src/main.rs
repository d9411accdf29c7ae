//! The edge: holds the listening sockets, keeps the requests of sleeping hosts waiting, forwards
//! those of awake ones. Starts no process, knows no store.

mod client;
mod clock;
mod delta;
mod door;
mod event_loop;
mod host;
mod link;
mod listen;
mod pool;
mod reload;
mod route;
mod settings;
mod stats;

use std::io::{IsTerminal, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::{io, thread};

use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use dormouse_link::config;
use dormouse_ring::{Engine, Epoll, Uring};
use libsystemd::daemon::{NotifyState, notify};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, mpsc};
use tracing::{error, info, warn};

use crate::event_loop::Setup;
use crate::link::Link;
use crate::reload::Reload;
use crate::settings::Settings;
use crate::stats::Stats;

/// The edge proxy of Dormouse.
#[derive(Debug, Parser)]
#[command(name = "dormouse-proxy", version)]
struct Arguments {
    /// The config file.
    #[arg(long, value_name = "FILE", default_value = "/etc/dormouse/dormouse.toml")]
    config: PathBuf,
    /// What drives the sockets, whatever the config says.
    #[arg(long, value_name = "auto|uring|epoll", value_parser = parse_engine)]
    engine: Option<config::Engine>,
    /// Check the config and exit.
    #[arg(long)]
    check_config: bool,
}

fn parse_engine(text: &str) -> Result<config::Engine, String> {
    match text {
        "auto" => Ok(config::Engine::Auto),
        "uring" => Ok(config::Engine::Uring),
        "epoll" => Ok(config::Engine::Epoll),
        _ => Err("allowed: auto, uring, epoll".to_owned()),
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A log that nobody reads any more: eprintln! would panic.
            drop(writeln!(io::stderr(), "dormouse-proxy: {}", dormouse_link::told(error.chain())));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_from_env("DORMOUSE_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        // A log that nobody reads any more must not end the proxy: eprintln! would panic.
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal())
        .with_env_filter(filter)
        .init();
    let config = config::Config::load(&arguments.config)?;
    let settings = Arc::new(Settings::read(&config, &arguments.config)?);
    if arguments.check_config {
        info!(config = %arguments.config.display(), "the config is good");
        return Ok(());
    }
    let sockets = listen::open(&config.edge.listen)?;
    match arguments.engine.unwrap_or(config.edge.engine) {
        config::Engine::Epoll => serve(Epoll, arguments, &config, &settings, &sockets),
        config::Engine::Uring => {
            Uring.probe().context("this kernel refuses io_uring; allowed here: --engine epoll")?;
            serve(Uring, arguments, &config, &settings, &sockets)
        }
        config::Engine::Auto => match Uring.probe() {
            Ok(()) => serve(Uring, arguments, &config, &settings, &sockets),
            Err(error) => {
                warn!(%error, "io_uring is refused; epoll takes its place");
                serve(Epoll, arguments, &config, &settings, &sockets)
            }
        },
    }
}

fn serve<E: Engine + Send>(
    engine: E,
    arguments: &Arguments,
    config: &config::Config,
    settings: &Arc<Settings>,
    sockets: &[OwnedFd],
) -> Result<()> {
    let count = match usize::try_from(config.edge.loops).unwrap_or(0) {
        0 => thread::available_parallelism().map_or(1, usize::from),
        count => count,
    };
    let connections = usize::try_from(config.edge.limits.connections).unwrap_or(usize::MAX);
    let connections = Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS)));
    let waiting = Arc::default();
    let (to_link, from_loops) = mpsc::unbounded_channel();
    let (is_ready, mut ready) = mpsc::unbounded_channel();
    let (mut threads, mut loops, mut stats) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..count {
        let (to_loop, deltas) = mpsc::unbounded_channel();
        let own: Arc<Stats> = Arc::default();
        let setup = Setup {
            settings: settings.clone(),
            listeners: sockets.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?,
            deltas,
            to_link: to_link.clone(),
            stats: own.clone(),
            connections: connections.clone(),
            waiting: Arc::clone(&waiting),
            drain: config.edge.drain.duration(),
            ready: is_ready.clone(),
        };
        let thread = thread::Builder::new()
            .name(format!("loop-{number}"))
            .spawn(move || event_loop::run(engine, setup))?;
        threads.push(thread);
        loops.push(to_loop);
        stats.push(own);
    }
    drop((to_link, is_ready));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let link = settings
        .managed
        .then(|| Link::new(config.this_box.link_socket(), loops.clone(), from_loops, stats))
        .transpose()?;
    let reload =
        Reload { path: arguments.config.clone(), config: config.clone(), loops: loops.clone() };
    runtime.block_on(async {
        let linked = async {
            match link {
                Some(link) => link.run().await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(linked);
        let mut joined = tokio::task::spawn_blocking(move || join(threads));
        tokio::select! {
            // Once a signal leads to a drain: who hears of it may send one.
            ended = on_signals(reload, say_ready::<E>(&mut ready, count)) => ended?,
            () = &mut linked => bail!("the link has ended"),
            // A loop ends by itself only when it fails.
            joined = &mut joined => return joined?,
        }
        tell_systemd(&[NotifyState::Stopping]);
        for each in &loops {
            // A loop that has ended needs no telling.
            drop(each.send(delta::ToLoop::Drain));
        }
        // The link goes on while requests end: their waiters may still be answered.
        tokio::select! {
            () = &mut linked => bail!("the link has ended"),
            joined = joined => joined?,
        }
    })
}

/// Until a signal ends the process.
async fn on_signals(
    mut reload: Reload,
    ready: impl Future<Output = std::convert::Infallible>,
) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::pin!(ready);
    loop {
        tokio::select! {
            never = &mut ready => match never {},
            _ = hangup.recv() => {
                tell_systemd(&reload::begins()?);
                reload.run();
                tell_systemd(&[NotifyState::Ready]);
            }
            _ = terminate.recv() => {
                info!("SIGTERM");
                return Ok(());
            }
            _ = interrupt.recv() => {
                info!("SIGINT");
                return Ok(());
            }
        }
    }
}

/// Waits until every loop accepts, and says so.
async fn say_ready<E: Engine>(
    ready: &mut mpsc::UnboundedReceiver<()>,
    count: usize,
) -> std::convert::Infallible {
    for _ in 0..count {
        if ready.recv().await.is_none() {
            // A loop has failed; its thread says why.
            std::future::pending::<()>().await;
        }
    }
    info!(engine = E::NAME, loops = count, "serving");
    tell_systemd(&[NotifyState::Ready]);
    std::future::pending().await
}

/// Nothing without systemd.
fn tell_systemd(state: &[NotifyState]) {
    if let Err(error) = notify(false, state) {
        warn!(%error, "systemd cannot be told");
    }
}

fn join(threads: Vec<JoinHandle<io::Result<()>>>) -> Result<()> {
    for thread in threads {
        let name = thread.thread().name().unwrap_or("loop").to_owned();
        match thread.join() {
            Ok(Ok(())) => (),
            Ok(Err(problem)) => {
                error!(name, %problem, "a loop failed");
                bail!("{name}: {problem}");
            }
            Err(_) => return Err(anyhow!("{name} panicked")),
        }
    }
    info!("drained");
    Ok(())
}
