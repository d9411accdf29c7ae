//! Connecting without blocking a thread.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};

use crate::Engine;

/// First and longest wait for a full backlog.
const BACKOFF: Duration = Duration::from_millis(1);
const BACKOFF_MAX: Duration = Duration::from_millis(50);

/// Connects to a unix socket. A full backlog is waited for; the caller bounds how long, by
/// dropping this future. A missing or refusing socket is an error at once.
pub async fn connect_unix<E: Engine>(engine: E, path: &Path) -> io::Result<E::Stream> {
    let address = SockAddr::unix(path)?;
    let mut backoff = BACKOFF;
    loop {
        let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
        match socket.connect(&address) {
            Ok(()) => {
                socket.set_nonblocking(E::NONBLOCKING)?;
                return engine.unix(socket.into());
            }
            Err(full) if full.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(backoff).await;
                backoff = (backoff * 2).min(BACKOFF_MAX);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Connects to a TCP address.
pub async fn connect_tcp<E: Engine>(engine: E, address: SocketAddr) -> io::Result<E::Stream> {
    let socket = tokio::net::TcpStream::connect(address).await?.into_std()?;
    socket.set_nodelay(true)?;
    socket.set_nonblocking(E::NONBLOCKING)?;
    engine.tcp(socket)
}
