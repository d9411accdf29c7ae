//! The guestbook: a small real app for demo and tests.
//!
//! One SQLite database in WAL mode, a page that a person can use, a JSON API, a WebSocket echo, an
//! SSE clock, a due time, and a few ways to misbehave. It takes its socket by path, or as the
//! descriptor 3 of `LISTEN_FDS`.

use std::os::fd::FromRawFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use anyhow::Context as _;
use clap::Parser;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

mod book;
mod page;
mod streams;

use book::Book;

#[derive(Parser)]
#[command(about = "The guestbook: a small real app on SQLite")]
struct Arguments {
    /// Socket to bind; with `LISTEN_FDS` the one that was handed over is used.
    #[arg(long)]
    socket: PathBuf,
    /// Database file.
    #[arg(long)]
    db: PathBuf,
    /// Wait this long before serving, as a slow app would.
    #[arg(long, default_value_t = 0)]
    start_ms: u64,
    /// Go on after SIGTERM, as a stubborn app would.
    #[arg(long)]
    ignore_sigterm: bool,
    /// Start a child that detaches itself and ignores SIGTERM, too.
    #[arg(long)]
    detach: bool,
    /// Keep the database locked, as an app does that cannot be replicated.
    #[arg(long)]
    exclusive: bool,
}

/// What all requests share.
pub(crate) type Shared = Arc<Mutex<Book>>;

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let book = Book::open(&arguments.db, arguments.exclusive)
        .with_context(|| format!("database {}", arguments.db.display()))?;
    if arguments.start_ms > 0 {
        tokio::time::sleep(std::time::Duration::from_millis(arguments.start_ms)).await;
    }
    if arguments.detach {
        // Its parent ends at once: nobody waits for it, and its session is its own.
        let child = "trap '' TERM; setsid sh -c 'while :; do sleep 1000; done' &";
        std::process::Command::new("sh").args(["-c", child]).status().context("a child")?;
    }
    let listener = listener(&arguments.socket)?;
    let app = page::routes().merge(streams::routes()).with_state(Arc::new(Mutex::new(book)));
    let stubborn = arguments.ignore_sigterm;
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async move {
        loop {
            terminate.recv().await;
            if !stubborn {
                return;
            }
        }
    };
    axum::serve(listener, app).with_graceful_shutdown(stop).await?;
    Ok(())
}

fn listener(path: &std::path::Path) -> anyhow::Result<UnixListener> {
    let handed = std::env::var("LISTEN_PID").is_ok_and(|pid| pid == std::process::id().to_string());
    if !handed {
        return UnixListener::bind(path).with_context(|| format!("socket {}", path.display()));
    }
    #[expect(unsafe_code, reason = "LISTEN_FDS hands over descriptor 3 by number")]
    // SAFETY: `LISTEN_PID` names this process, so descriptor 3 is ours and open.
    let listener = unsafe { std::os::unix::net::UnixListener::from_raw_fd(3) };
    listener.set_nonblocking(true)?;
    Ok(UnixListener::from_std(listener)?)
}
