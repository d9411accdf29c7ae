//! Listening sockets: from systemd by name, or from the config.

use std::net::SocketAddr;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use dormouse_link::config::Listen;
use libsystemd::activation::{IsType, receive_descriptors_with_names};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tracing::info;

/// Connections that wait to be accepted; the kernel bounds it by `net.core.somaxconn`.
const BACKLOG: i32 = 1024;

/// Opens or takes over every listener of the config.
pub(crate) fn open(listeners: &[Listen]) -> Result<Vec<OwnedFd>> {
    let mut inherited = receive_descriptors_with_names(false).context("LISTEN_FDS")?;
    let mut sockets = Vec::new();
    for listen in listeners {
        let (ours, others): (Vec<_>, Vec<_>) =
            inherited.into_iter().partition(|(_, name)| *name == listen.name);
        inherited = others;
        let from_systemd = ours.len();
        for (descriptor, name) in ours {
            if !descriptor.is_inet() && !descriptor.is_unix() {
                bail!("the descriptor {name:?} from systemd is not a socket");
            }
            let socket = dormouse_ring::inherited(descriptor.into_raw_fd())
                .with_context(|| format!("the descriptor {name:?} from systemd"))?;
            sockets.push(socket);
        }
        match (&listen.address, from_systemd) {
            (_, 1..) => info!(listener = %listen.name, sockets = from_systemd, "from systemd"),
            (Some(address), 0) => {
                let socket = bind(address)
                    .with_context(|| format!("edge.listen {:?}: {address}", listen.name))?;
                sockets.push(socket);
                info!(listener = %listen.name, %address, "listening");
            }
            (None, 0) => bail!(
                "edge.listen {:?}: no address, and systemd hands over no socket of that name \
                 (FileDescriptorName=)",
                listen.name
            ),
        }
    }
    if let Some((_, name)) = inherited.first() {
        bail!("systemd hands over the socket {name:?}, which no edge.listen names");
    }
    if sockets.is_empty() {
        bail!("edge.listen is empty: nothing to serve");
    }
    Ok(sockets)
}

fn bind(address: &str) -> Result<OwnedFd> {
    if let Some(path) = address.strip_prefix("unix:") {
        let path = Path::new(path);
        if let Err(error) = std::fs::remove_file(path)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(error).context("a file is in the way");
        }
        return Ok(UnixListener::bind(path)?.into());
    }
    let address: SocketAddr =
        address.parse().map_err(|_| anyhow!("allowed: ADDRESS:PORT or unix:PATH"))?;
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&SockAddr::from(address))?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}
