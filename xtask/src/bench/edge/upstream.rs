//! The app behind every proxy: a thread that answers `GET /SIZE` on a unix socket.
//!
//! One epoll, one read and one write a request, so that it is never what limits a proxy.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::cores;

/// How often it looks whether it is to end.
const LOOK_MS: u16 = 50;
const EVENTS: usize = 128;

/// The thread; ended when dropped.
pub(super) struct Upstream {
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Upstream {
    /// Listens at `path` and serves on that core.
    pub(super) fn start(path: &Path, core: usize) -> Result<Self> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let ending = Arc::new(AtomicBool::new(false));
        let asked = ending.clone();
        let thread = std::thread::Builder::new().name("upstream".to_owned()).spawn(move || {
            if let Err(error) = serve(&listener, core, &asked) {
                println!("the upstream ended: {error:#}");
            }
        })?;
        Ok(Self { ending, thread: Some(thread) })
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// One connection of a proxy.
struct Peer {
    stream: UnixStream,
    asked: Vec<u8>,
    answer: Vec<u8>,
    written: usize,
}

fn serve(listener: &UnixListener, core: usize, ending: &AtomicBool) -> Result<()> {
    cores::pin(core)?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let listening = token(listener.as_raw_fd())?;
    epoll.add(listener, EpollEvent::new(EpollFlags::EPOLLIN, listening))?;
    let mut peers: HashMap<u64, Peer> = HashMap::new();
    let mut events = [EpollEvent::empty(); EVENTS];
    while !ending.load(Ordering::Relaxed) {
        let ready = match epoll.wait(&mut events, EpollTimeout::from(LOOK_MS)) {
            Ok(count) => events.get(..count).unwrap_or_default(),
            Err(nix::errno::Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        };
        for event in ready {
            if event.data() == listening {
                while let Ok((stream, _)) = listener.accept() {
                    stream.set_nonblocking(true)?;
                    let key = token(stream.as_raw_fd())?;
                    epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, key))?;
                    let (asked, answer) = (Vec::new(), Vec::new());
                    peers.insert(key, Peer { stream, asked, answer, written: 0 });
                }
            } else if let Some(peer) = peers.get_mut(&event.data())
                && !peer.go_on(&epoll, event.data())?
            {
                // Closing it takes it out of the epoll.
                peers.remove(&event.data());
            }
        }
    }
    Ok(())
}

fn token(fd: RawFd) -> Result<u64> {
    Ok(u64::try_from(fd)?)
}

impl Peer {
    /// Reads a request or goes on with an answer; false at the end.
    fn go_on(&mut self, epoll: &Epoll, key: u64) -> Result<bool> {
        if self.answer.is_empty() {
            let mut some = [0; 4096];
            match self.stream.read(&mut some) {
                Ok(0) => return Ok(false),
                Ok(count) => self.asked.extend_from_slice(some.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(_) => return Ok(false),
            }
            if !self.asked.ends_with(b"\r\n\r\n") {
                return Ok(true);
            }
            answer(&self.asked, &mut self.answer)?;
            self.asked.clear();
        }
        let was_late = self.written > 0;
        match self.stream.write(self.answer.get(self.written..).unwrap_or_default()) {
            Ok(count) => self.written += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => (),
            Err(_) => return Ok(false),
        }
        let is_done = self.written == self.answer.len();
        if is_done {
            self.answer.clear();
            self.written = 0;
        }
        if was_late || !is_done {
            let flags = if is_done { EpollFlags::EPOLLIN } else { EpollFlags::EPOLLOUT };
            epoll.modify(&self.stream, &mut EpollEvent::new(flags, key))?;
        }
        Ok(true)
    }
}

/// `GET /SIZE`: so many bytes.
fn answer(asked: &[u8], into: &mut Vec<u8>) -> Result<()> {
    let path = asked.strip_prefix(b"GET /").context("not a GET")?;
    let digits: usize = path.iter().take_while(|byte| byte.is_ascii_digit()).count();
    ensure!(digits > 0, "no size is asked for");
    let size: usize = str::from_utf8(path.get(..digits).unwrap_or_default())?.parse()?;
    write!(into, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {size}\r\n\r\n")?;
    into.resize(into.len() + size, b'x');
    Ok(())
}
