//! `io_uring` and its epoll twin behind one trait, each on one thread with local tasks.
//!
//! What a user of [`Stream`] can rely on, and tokio-uring alone does not give:
//! - an operation in flight is never dropped: it stays inside the stream over any time-out, so no
//!   byte that it reads is lost;
//! - a stream that is dropped with a read in flight sends FIN and frees its descriptor;
//! - accepting waits for readiness and then does not wait: no accept is ever in flight;
//! - connecting to a unix socket with a full backlog blocks no thread.
//!
//! Knows no HTTP, starts no thread, sets no timer of its own but the back-off of a connect.
#![expect(
    unsafe_code,
    reason = "custody of read buffers and of descriptors that a reactor watches"
)]

mod connect;
mod epoll;
mod listener;
mod uring;
mod watched;

use std::future::Future;
use std::io;
use std::task::{Context, Poll};

pub use connect::{connect_tcp, connect_unix};
pub use epoll::Epoll;
pub use listener::{Accepted, Listener, inherited};
pub use uring::Uring;
pub use watched::Watched;

/// Bytes both ways. Reads and writes are independent; one of each may be in flight.
pub trait Stream: Unpin + 'static {
    /// Reads up to `size` bytes to the end of `into`; 0 is the end. A pending read goes on inside
    /// the stream, whoever stops waiting for it.
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut Vec<u8>,
        size: usize,
    ) -> Poll<io::Result<usize>>;

    /// Ready when bytes or an end came for a stream from which nothing is expected: it is of no
    /// use any more. Until then a read of `size` bytes may go on inside the stream.
    fn poll_unexpected(&mut self, cx: &mut Context<'_>, size: usize) -> Poll<()>;

    /// Takes all bytes of `from`, unless earlier ones are still being written, and writes them.
    /// Ready when nothing is left to write on either side.
    fn poll_write(&mut self, cx: &mut Context<'_>, from: &mut Vec<u8>) -> Poll<io::Result<()>>;

    /// Bytes that were taken and are not yet written.
    fn writing(&self) -> usize;

    /// Sends FIN after what was written.
    fn shutdown_write(&self) -> io::Result<()>;
}

/// One way to drive sockets.
pub trait Engine: Copy + 'static {
    /// Its streams.
    type Stream: Stream;
    /// Name for the log.
    const NAME: &'static str;
    /// Whether its sockets are non-blocking. A ring waits itself, and gives `EAGAIN` at once for
    /// a non-blocking socket.
    const NONBLOCKING: bool;

    /// Whether this kernel lets us use it.
    fn probe(self) -> io::Result<()>;

    /// Runs a future, and all that it spawns locally, on this thread.
    fn run<F: Future>(self, future: F) -> io::Result<F::Output>;

    /// Takes a connected TCP socket.
    fn tcp(self, socket: std::net::TcpStream) -> io::Result<Self::Stream>;

    /// Takes a connected unix socket.
    fn unix(self, socket: std::os::unix::net::UnixStream) -> io::Result<Self::Stream>;
}
