//! The link's threads: one accepts, two a proxy read and write. They decide nothing.
//!
//! A proxy that does not read fast enough is cut off and connects again; the activator's loop never
//! waits for one.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use dormouse_link::message::{
    ActivatorHello, MESSAGE_BYTES_MAX, ProxyHello, ToActivator, ToProxy, decode, decode_hello,
    encode, encode_hello,
};
use dormouse_link::socket::{AcceptError, Connection, Listener};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

/// What the link's threads tell the driver.
#[derive(Debug)]
pub(crate) enum LinkEvent {
    /// A proxy introduced itself.
    Connected { connection: u64, hello: ProxyHello, sender: Sender },
    /// It said something.
    Said { connection: u64, message: ToActivator },
    /// It is gone, or was cut off.
    Gone { connection: u64 },
}

/// Messages that may wait for a proxy that does not read: all routes of a large box, and more.
const QUEUE_MAX: usize = 262_144; // × about 100 bytes = 26 MiB, only while a proxy stalls

/// A message and the descriptors that go with it.
type Parcel = (Vec<u8>, Vec<OwnedFd>);

/// The sending half of one proxy's connection.
#[derive(Clone, Debug)]
pub(crate) struct Sender {
    queue: mpsc::Sender<Parcel>,
    /// Parcels that the writer has not taken: a bounded channel would take the memory for all of
    /// them at once.
    waiting: Arc<AtomicUsize>,
    connection: Arc<Connection>,
}

impl Sender {
    pub(crate) fn hello(&self, hello: &ActivatorHello, fds: Vec<OwnedFd>) {
        if let Ok(bytes) = encode_hello(hello) {
            self.push(bytes, fds);
        }
    }

    pub(crate) fn send(&self, message: &ToProxy) {
        match encode(message) {
            Ok(bytes) => self.push(bytes, Vec::new()),
            Err(error) => tracing::error!(%error, "a link message cannot be sent"),
        }
    }

    /// A full queue or a dead writer cuts the connection: a proxy that misses one message must
    /// miss all, so that it comes again and is told everything anew.
    fn push(&self, bytes: Vec<u8>, fds: Vec<OwnedFd>) {
        // Never counted down again where it was full: the next one is missed, too.
        let is_full = self.waiting.fetch_add(1, Ordering::Relaxed) >= QUEUE_MAX;
        if is_full || self.queue.send((bytes, fds)).is_err() {
            let cut = shutdown(self.connection.as_raw_fd(), Shutdown::Both);
            tracing::warn!(cut = cut.is_ok(), "a proxy does not read its link");
        }
    }
}

/// Starts to accept proxies; `tell` hands events to the driver, and says false when it is gone.
pub(crate) fn start(
    listener: Listener,
    tell: impl Fn(LinkEvent) -> bool + Clone + Send + 'static,
) -> io::Result<()> {
    let numbers = AtomicU64::new(1);
    thread::Builder::new().name("link-accept".to_owned()).spawn(move || {
        loop {
            if wait(&listener, PollFlags::POLLIN).is_err() {
                return;
            }
            match listener.accept() {
                Ok((connection, peer)) => {
                    let number = numbers.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!(pid = peer.pid, connection = number, "a proxy connected");
                    if let Err(error) = serve(connection, number, tell.clone()) {
                        tracing::error!(%error, "no thread for a proxy's link");
                    }
                }
                Err(AcceptError::Denied(peer)) => {
                    tracing::warn!(
                        pid = peer.pid,
                        uid = peer.uid,
                        "a process may not connect to the link; add its user to box.proxy_users"
                    );
                }
                Err(AcceptError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(AcceptError::Io(error)) => {
                    tracing::warn!(%error, "the link cannot accept");
                }
            }
        }
    })?;
    Ok(())
}

fn wait(fd: &impl AsFd, what: PollFlags) -> io::Result<()> {
    loop {
        let mut fds = [PollFd::new(fd.as_fd(), what)];
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) => return Ok(()),
            Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn serve(
    connection: Connection,
    number: u64,
    tell: impl Fn(LinkEvent) -> bool + Clone + Send + 'static,
) -> io::Result<()> {
    let connection = Arc::new(connection);
    let (queue, messages) = mpsc::channel::<Parcel>();
    let waiting = Arc::new(AtomicUsize::new(0));
    let sender =
        Sender { queue, waiting: Arc::clone(&waiting), connection: Arc::clone(&connection) };
    let writer = Arc::clone(&connection);
    thread::Builder::new().name("link-write".to_owned()).spawn(move || {
        for (bytes, fds) in messages {
            waiting.fetch_sub(1, Ordering::Relaxed);
            if write(&writer, &bytes, &fds).is_err() {
                return;
            }
        }
    })?;
    thread::Builder::new().name("link-read".to_owned()).spawn(move || {
        if let Err(error) = read(&connection, number, sender, &tell) {
            tracing::warn!(%error, connection = number, "a proxy's link broke");
        }
        tell(LinkEvent::Gone { connection: number });
    })?;
    Ok(())
}

fn write(connection: &Connection, bytes: &[u8], fds: &[OwnedFd]) -> io::Result<()> {
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    loop {
        match connection.send(bytes, &borrowed) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(connection, PollFlags::POLLOUT)?;
            }
            other => return other,
        }
    }
}

fn read(
    connection: &Arc<Connection>,
    number: u64,
    sender: Sender,
    tell: &impl Fn(LinkEvent) -> bool,
) -> io::Result<()> {
    let mut buffer = vec![0; MESSAGE_BYTES_MAX];
    let mut next = || -> io::Result<Option<Vec<u8>>> {
        loop {
            match connection.recv(&mut buffer) {
                Ok(received) if received.len == 0 => return Ok(None),
                Ok(received) => return Ok(buffer.get(..received.len).map(<[u8]>::to_vec)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait(connection, PollFlags::POLLIN)?;
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    };
    let Some(first) = next()? else { return Ok(()) };
    let hello: ProxyHello = decode_hello(&first).map_err(io::Error::other)?;
    if !tell(LinkEvent::Connected { connection: number, hello, sender }) {
        return Ok(());
    }
    while let Some(bytes) = next()? {
        let message: ToActivator = decode(&bytes).map_err(io::Error::other)?;
        if !tell(LinkEvent::Said { connection: number, message }) {
            return Ok(());
        }
    }
    Ok(())
}
