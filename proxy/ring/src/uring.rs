//! `io_uring` by tokio-uring 0.5.
//!
//! Each stream keeps one read and one write future for its whole life (a *pump*), so that an
//! operation costs no allocation and outlives whoever waited for it.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::mem;
use std::net::Shutdown;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::{Engine, Stream};

/// Submission queue of one loop; a full one submits early, so this is only a batch's size.
const ENTRIES: u32 = 1024;

/// `io_uring`.
#[derive(Clone, Copy, Debug)]
pub struct Uring;

fn builder() -> tokio_uring::Builder {
    let mut ring = tokio_uring::uring_builder();
    ring.setup_coop_taskrun();
    let mut builder = tokio_uring::builder();
    builder.entries(ENTRIES).uring_builder(&ring);
    builder
}

impl Engine for Uring {
    type Stream = UringStream;
    const NAME: &'static str = "uring";
    const NONBLOCKING: bool = false;

    fn probe(self) -> io::Result<()> {
        tokio_uring::Runtime::new(&builder()).map(drop)
    }

    fn run<F: Future>(self, future: F) -> io::Result<F::Output> {
        Ok(tokio_uring::Runtime::new(&builder())?.block_on(future))
    }

    fn tcp(self, socket: std::net::TcpStream) -> io::Result<UringStream> {
        Ok(UringStream::new(Socket::Tcp(tokio_uring::net::TcpStream::from_std(socket))))
    }

    fn unix(self, socket: std::os::unix::net::UnixStream) -> io::Result<UringStream> {
        Ok(UringStream::new(Socket::Unix(tokio_uring::net::UnixStream::from_std(socket))))
    }
}

enum Socket {
    Tcp(tokio_uring::net::TcpStream),
    Unix(tokio_uring::net::UnixStream),
}

type Done = (io::Result<usize>, Vec<u8>);

impl Socket {
    async fn read(&self, buffer: Vec<u8>) -> Done {
        match self {
            Self::Tcp(socket) => socket.read(buffer).await,
            Self::Unix(socket) => socket.read(buffer).await,
        }
    }

    async fn write_all(&self, buffer: Vec<u8>) -> Done {
        let length = buffer.len();
        let (result, buffer) = match self {
            Self::Tcp(socket) => socket.write_all(buffer).await,
            Self::Unix(socket) => socket.write_all(buffer).await,
        };
        (result.map(|()| length), buffer)
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Tcp(socket) => socket.shutdown(how),
            Self::Unix(socket) => socket.shutdown(how),
        }
    }
}

/// What a pump and its stream hand each other.
enum Cell {
    Empty,
    Asked(Vec<u8>),
    Done(Done),
}

/// A future that runs one operation after another, for ever.
struct Pump {
    future: Pin<Box<dyn Future<Output = Infallible>>>,
    cell: Rc<RefCell<Cell>>,
    /// Bytes of the operation in flight.
    busy: Option<usize>,
    spare: Vec<u8>,
}

impl Pump {
    fn new<F, O>(socket: &Rc<Socket>, operation: F) -> Self
    where
        F: Fn(Rc<Socket>, Vec<u8>) -> O + 'static,
        O: Future<Output = Done> + 'static,
    {
        let cell = Rc::new(RefCell::new(Cell::Empty));
        let (socket, shared) = (socket.clone(), cell.clone());
        let future = Box::pin(async move {
            loop {
                let buffer = poll_fn(|_| match shared.replace(Cell::Empty) {
                    Cell::Asked(buffer) => Poll::Ready(buffer),
                    // Nobody wakes us: the stream polls when it has put something here.
                    other @ (Cell::Empty | Cell::Done(_)) => {
                        shared.replace(other);
                        Poll::Pending
                    }
                })
                .await;
                let done = operation(socket.clone(), buffer).await;
                shared.replace(Cell::Done(done));
            }
        });
        Self { future, cell, busy: None, spare: Vec::new() }
    }

    fn start(&mut self, buffer: Vec<u8>, bytes: usize) {
        debug_assert!(self.busy.is_none(), "one operation at a time");
        self.busy = Some(bytes);
        self.cell.replace(Cell::Asked(buffer));
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Done> {
        match self.future.as_mut().poll(cx) {
            Poll::Ready(never) => match never {},
            Poll::Pending => (),
        }
        match self.cell.replace(Cell::Empty) {
            Cell::Done(done) => {
                self.busy = None;
                Poll::Ready(done)
            }
            other @ (Cell::Empty | Cell::Asked(_)) => {
                self.cell.replace(other);
                Poll::Pending
            }
        }
    }
}

/// A socket on the ring.
pub struct UringStream {
    socket: Rc<Socket>,
    read: Pump,
    write: Pump,
}

impl UringStream {
    fn start_read(&mut self, size: usize) {
        if self.read.busy.is_some() {
            return;
        }
        let mut buffer = mem::take(&mut self.read.spare);
        buffer.clear();
        if buffer.capacity() < size || buffer.capacity() > size.saturating_mul(2) {
            buffer = Vec::with_capacity(size);
        }
        self.read.start(buffer, size);
    }

    fn new(socket: Socket) -> Self {
        let socket = Rc::new(socket);
        let read = Pump::new(&socket, |socket, buffer| async move { socket.read(buffer).await });
        let write =
            Pump::new(&socket, |socket, buffer| async move { socket.write_all(buffer).await });
        Self { socket, read, write }
    }
}

impl Stream for UringStream {
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut Vec<u8>,
        size: usize,
    ) -> Poll<io::Result<usize>> {
        self.start_read(size);
        let (result, mut buffer) = match self.read.poll(cx) {
            Poll::Ready(done) => done,
            Poll::Pending => return Poll::Pending,
        };
        if let Ok(count) = result {
            debug_assert_eq!(count, buffer.len(), "the ring sets the length");
            if into.is_empty() {
                mem::swap(into, &mut buffer);
            } else {
                into.extend_from_slice(&buffer);
            }
        }
        self.read.spare = buffer;
        Poll::Ready(result)
    }

    fn poll_unexpected(&mut self, cx: &mut Context<'_>, size: usize) -> Poll<()> {
        self.start_read(size);
        self.read.poll(cx).map(drop)
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, from: &mut Vec<u8>) -> Poll<io::Result<()>> {
        loop {
            if self.write.busy.is_none() {
                if from.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                let mut buffer = mem::take(&mut self.write.spare);
                buffer.clear();
                mem::swap(from, &mut buffer);
                let bytes = buffer.len();
                self.write.start(buffer, bytes);
            }
            match self.write.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready((result, buffer)) => {
                    self.write.spare = buffer;
                    result?;
                }
            }
        }
    }

    fn writing(&self) -> usize {
        self.write.busy.unwrap_or(0)
    }

    fn shutdown_write(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }
}

impl Drop for UringStream {
    fn drop(&mut self) {
        if self.read.busy.is_some() || self.write.busy.is_some() {
            // Ends what is in flight; the ring holds the descriptor until then. Without this the
            // peer gets no FIN and the descriptor leaks. It fails only when the peer is gone.
            drop(self.socket.shutdown(Shutdown::Both));
        }
    }
}
