//! Accepting, the same for both engines: wait for readiness, then accept without waiting.
//!
//! An accept in flight on a ring cannot be taken back: it would take a connection that nobody
//! serves. So none is ever in flight.

use std::io;
use std::net::IpAddr;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::sys::socket::{SockFlag, accept4};
use socket2::{SockRef, TcpKeepalive};

use crate::{Engine, Watched};

/// Finds clients that vanished without a word.
const KEEPALIVE: Duration = Duration::from_mins(1);

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    fd: Watched,
    is_tcp: bool,
}

/// A connection.
pub struct Accepted<E: Engine> {
    /// Its bytes.
    pub stream: E::Stream,
    /// Who connected; none on a unix socket.
    pub peer: Option<IpAddr>,
}

impl Listener {
    /// Takes a socket that listens: TCP or unix.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let reference = SockRef::from(&socket);
        reference.set_nonblocking(true)?;
        let is_tcp = !reference.local_addr()?.is_unix();
        Ok(Self { fd: Watched::new(socket)?, is_tcp })
    }

    /// Waits for a connection. Dropping this future loses none.
    pub async fn accept<E: Engine>(&self, engine: E) -> io::Result<Accepted<E>> {
        self.fd.read_with(|fd| self.accept_now(engine, fd)).await
    }

    fn accept_now<E: Engine>(&self, engine: E, fd: BorrowedFd<'_>) -> io::Result<Accepted<E>> {
        let mut flags = SockFlag::SOCK_CLOEXEC;
        flags.set(SockFlag::SOCK_NONBLOCK, E::NONBLOCKING);
        let socket = accept4(fd, flags)?;
        if !self.is_tcp {
            return Ok(Accepted { stream: engine.unix(socket.into())?, peer: None });
        }
        let reference = SockRef::from(&socket);
        reference.set_tcp_nodelay(true)?;
        reference.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE))?;
        // A client that is gone already has no address; it is served its end.
        let peer = reference.peer_addr().ok().and_then(|address| address.as_socket());
        let stream = engine.tcp(socket.into())?;
        Ok(Accepted { stream, peer: peer.map(|address| address.ip().to_canonical()) })
    }
}

/// Takes over a descriptor that this process inherited (`LISTEN_FDS`).
///
/// # Errors
/// When it is not open.
pub fn inherited(raw: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: borrowed for this one call only, which reports a descriptor that is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(raw) };
    nix::fcntl::fcntl(borrowed, nix::fcntl::FcntlArg::F_GETFD)?;
    // SAFETY: open, as just seen; its number came from the parent process, once, for us to own.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}
