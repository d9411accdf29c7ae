//! The link's socket: `SOCK_SEQPACKET`, one datagram a message, descriptors beside it.
//!
//! Non-blocking, with `AsFd` and `AsRawFd`, so that any reactor can drive it. The listener checks
//! who connects by `SO_PEERCRED`.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
    UnixAddr, accept4, bind, connect, getsockopt, listen, recvmsg, sendmsg, socket, sockopt,
};

use crate::message::{HELLO_FDS, MESSAGE_BYTES_MAX};

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its process.
    pub pid: u32,
    /// Its effective user when it connected.
    pub uid: u32,
}

/// Why a peer was turned away.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// Nobody waits, or a system call failed.
    #[error("link: accept: {0}")]
    Io(#[from] io::Error),
    /// The peer's user is not on the list.
    #[error("link: a process of user {} (pid {}) may not connect", .0.uid, .0.pid)]
    Denied(Peer),
}

/// One received message.
#[derive(Debug)]
pub struct Received {
    /// Length of the message in the caller's buffer; 0 = the peer is gone.
    pub len: usize,
    /// Descriptors that came with it, close-on-exec.
    pub fds: Vec<OwnedFd>,
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    Ok(socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?)
}

/// The activator's end that proxies connect to.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    allowed_uids: Vec<u32>,
}

impl Listener {
    /// Listens at `path`, replacing a stale socket file; root and `allowed_uids` may connect.
    pub fn bind(path: &Path, allowed_uids: Vec<u32>) -> io::Result<Self> {
        let address = UnixAddr::new(path)?;
        let fd = new_socket()?;
        match std::fs::remove_file(path) {
            Err(gone) if gone.kind() == io::ErrorKind::NotFound => (),
            removed => removed?,
        }
        bind(fd.as_raw_fd(), &address)?;
        listen(&fd, Backlog::new(16)?)?;
        Ok(Self { fd, path: path.to_owned(), allowed_uids })
    }

    /// Accepts one connection; `WouldBlock` when nobody waits.
    pub fn accept(&self) -> Result<(Connection, Peer), AcceptError> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let fd = accept4(&self.fd, flags).map_err(io::Error::from)?;
        let connection = Connection { fd };
        let peer = connection.peer()?;
        if peer.uid != 0 && !self.allowed_uids.contains(&peer.uid) {
            return Err(AcceptError::Denied(peer));
        }
        Ok((connection, peer))
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One end of the link.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
}

impl Connection {
    /// Connects to a listener; does not block.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let fd = new_socket()?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(Self { fd })
    }

    /// Who is at the other end.
    pub fn peer(&self) -> io::Result<Peer> {
        let credentials = getsockopt(&self.fd, sockopt::PeerCredentials)?;
        let pid = u32::try_from(credentials.pid()).unwrap_or(0);
        Ok(Peer { pid, uid: credentials.uid() })
    }

    /// Sends one message with descriptors; `WouldBlock` when the peer's buffer is full.
    pub fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(io::Error::from(Errno::EMSGSIZE));
        }
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &rights[..0] } else { &rights[..] };
        let parts = [IoSlice::new(message)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        let sent = sendmsg::<()>(self.fd.as_raw_fd(), &parts, control, flags, None)?;
        debug_assert_eq!(sent, message.len(), "a datagram is sent whole");
        Ok(())
    }

    /// Receives one message into `buffer`, which must hold [`MESSAGE_BYTES_MAX`].
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<Received> {
        // One more than ever expected, so that a surplus shows as such.
        let mut control = cmsg_space!([RawFd; HELLO_FDS + 1]);
        let mut parts = [IoSliceMut::new(buffer)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let received = recvmsg::<()>(self.fd.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
        let mut fds = Vec::new();
        for message in received.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = message {
                fds.extend(raw.into_iter().map(own));
            }
        }
        if received.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
            return Err(io::Error::from(Errno::EMSGSIZE));
        }
        Ok(Received { len: received.bytes, fds })
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Takes over a descriptor that the kernel has just made for this process.
fn own(raw: RawFd) -> OwnedFd {
    // SAFETY: `raw` comes from SCM_RIGHTS; nobody else knows it yet.
    unsafe { OwnedFd::from_raw_fd(raw) }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    fn pair(uids: Vec<u32>) -> (tempfile::TempDir, Listener, Connection) {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&dir.path().join("link.sock"), uids).unwrap();
        let client = Connection::connect(listener.path()).unwrap();
        (dir, listener, client)
    }

    #[test]
    fn messages_and_descriptors_arrive_whole() {
        let me = nix::unistd::geteuid().as_raw();
        let (_dir, listener, client) = pair(vec![me]);
        let (server, peer) = listener.accept().unwrap();
        assert_eq!(peer, Peer { pid: std::process::id(), uid: me });
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let empty = client.recv(&mut buffer).unwrap_err();
        assert_eq!(empty.kind(), io::ErrorKind::WouldBlock);

        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, b"inside").unwrap();
        io::Seek::rewind(&mut file).unwrap();
        server.send(b"one", &[file.as_fd()]).unwrap();
        server.send(&vec![7; MESSAGE_BYTES_MAX], &[]).unwrap();
        let first = client.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..first.len], b"one");
        let mut passed = std::fs::File::from(first.fds.into_iter().next().unwrap());
        let mut text = String::new();
        passed.read_to_string(&mut text).unwrap();
        assert_eq!(text, "inside");
        let second = client.recv(&mut buffer).unwrap();
        assert_eq!((second.len, second.fds.len()), (MESSAGE_BYTES_MAX, 0));
        drop(server);
        assert_eq!(client.recv(&mut buffer).unwrap().len, 0, "the peer is gone");
    }

    #[test]
    fn a_message_that_does_not_fit_is_refused_and_leaks_no_descriptor() {
        let (_dir, listener, client) = pair(vec![nix::unistd::geteuid().as_raw()]);
        let (server, _) = listener.accept().unwrap();
        assert!(client.send(&vec![0; MESSAGE_BYTES_MAX + 1], &[]).is_err());
        let fd = tempfile::tempfile().unwrap();
        client.send(b"x", &[fd.as_fd(); 8]).unwrap();
        let mut buffer = [0; 16];
        assert!(server.recv(&mut buffer).is_err());
        client.send(&[0; 64], &[]).unwrap();
        assert!(server.recv(&mut buffer).is_err());
    }

    #[test]
    fn a_listener_replaces_a_stale_socket_file() {
        let (dir, listener, _client) = pair(vec![]);
        let path = dir.path().join("link.sock");
        drop(listener);
        assert!(Listener::bind(&path, vec![]).is_ok());
    }
}
