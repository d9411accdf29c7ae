//! Is it ready? Connected to, and asked, with no polling where an event can tell.
//!
//! A bind makes an inotify event, a listen does not: between the two a refused connection is
//! repeated every millisecond.

use std::io;
use std::path::Path;
use std::time::Duration;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// What counts as ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It was handed a listening socket: a client can connect before it is ready.
    Handed,
    /// It accepts a connection.
    Connects,
    /// A GET of this path answers 2xx.
    Answers(String),
}

/// Between two attempts that nothing announces.
const RETRY: Duration = Duration::from_millis(1);
/// Longest head of a health answer: status line and a few fields.
const ANSWER_BYTES_MAX: usize = 4096;

/// Returns when the instance at `socket` is ready; bounded by the caller.
pub async fn wait_healthy(socket: &Path, host: &str, health: &Health) -> io::Result<()> {
    if *health == Health::Handed {
        return Ok(());
    }
    let mut watch: Option<Watch> = None;
    let outcome = loop {
        match (attempt(socket, host, health).await, &watch) {
            (Ok(true), _) => break Ok(()),
            (Err(error), Some(watch)) if error.kind() == io::ErrorKind::NotFound => {
                watch.changed().await?;
            }
            // Watched before the next attempt: what comes after it makes an event.
            (Err(error), None) if error.kind() == io::ErrorKind::NotFound => {
                watch = Some(Watch::over(socket)?);
            }
            (Ok(false) | Err(_), _) => tokio::time::sleep(RETRY).await,
        }
    };
    // Closing an inotify descriptor waits for an SRCU grace period, 10 ms and more: not in the way
    // of the wake.
    drop(tokio::task::spawn_blocking(move || drop(watch)));
    outcome
}

/// Watches a socket's directory.
struct Watch(AsyncFd<Events>);

impl Watch {
    fn over(socket: &Path) -> io::Result<Self> {
        let none = || io::Error::other("a socket has a directory");
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let what = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO;
        inotify.add_watch(socket.parent().ok_or_else(none)?, what)?;
        // SAFETY: the descriptor is owned by the `AsyncFd` and closed with it.
        Ok(Self(unsafe { AsyncFd::register(Events(inotify)) }?))
    }

    /// Returns when something was made in the directory since the last return.
    async fn changed(&self) -> io::Result<()> {
        self.0.readable().await?.clear_ready();
        // What the events say is asked of the socket itself.
        drop(self.0.get_ref().0.read_events());
        Ok(())
    }
}

struct Events(Inotify);

impl std::os::fd::AsRawFd for Events {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        use std::os::fd::AsFd;
        self.0.as_fd().as_raw_fd()
    }
}

async fn attempt(socket: &Path, host: &str, health: &Health) -> io::Result<bool> {
    let mut stream = UnixStream::connect(socket).await?;
    let path = match health {
        Health::Handed | Health::Connects => return Ok(true),
        Health::Answers(path) => path,
    };
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    while answer.len() < ANSWER_BYTES_MAX && !answer.contains(&b'\n') {
        if stream.read_buf(&mut answer).await? == 0 {
            break;
        }
    }
    Ok(answer.starts_with(b"HTTP/1.") && answer.get(9) == Some(&b'2'))
}
