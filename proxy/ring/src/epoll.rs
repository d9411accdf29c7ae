//! epoll by tokio, on one thread.

use std::future::Future;
use std::io;
use std::mem;
use std::net::Shutdown;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{Engine, Stream};

/// epoll.
#[derive(Clone, Copy, Debug)]
pub struct Epoll;

impl Engine for Epoll {
    type Stream = EpollStream;
    const NAME: &'static str = "epoll";
    const NONBLOCKING: bool = true;

    fn probe(self) -> io::Result<()> {
        Ok(())
    }

    fn run<F: Future>(self, future: F) -> io::Result<F::Output> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(tokio::task::LocalSet::new().block_on(&runtime, future))
    }

    fn tcp(self, socket: std::net::TcpStream) -> io::Result<EpollStream> {
        Ok(EpollStream::new(Socket::Tcp(tokio::net::TcpStream::from_std(socket)?)))
    }

    fn unix(self, socket: std::os::unix::net::UnixStream) -> io::Result<EpollStream> {
        Ok(EpollStream::new(Socket::Unix(tokio::net::UnixStream::from_std(socket)?)))
    }
}

enum Socket {
    Tcp(tokio::net::TcpStream),
    Unix(tokio::net::UnixStream),
}

/// A socket under epoll.
pub struct EpollStream {
    socket: Socket,
    out: Vec<u8>,
    written: usize,
}

impl EpollStream {
    fn new(socket: Socket) -> Self {
        Self { socket, out: Vec::new(), written: 0 }
    }

    fn poll_write_some(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let rest = self.out.get(self.written..).unwrap_or_default();
        match &mut self.socket {
            Socket::Tcp(socket) => Pin::new(socket).poll_write(cx, rest),
            Socket::Unix(socket) => Pin::new(socket).poll_write(cx, rest),
        }
    }
}

impl Stream for EpollStream {
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut Vec<u8>,
        size: usize,
    ) -> Poll<io::Result<usize>> {
        into.reserve(size);
        let length = into.len();
        let spare = into.spare_capacity_mut();
        let spare = spare.get_mut(..size).unwrap_or_default();
        let mut buffer = ReadBuf::uninit(spare);
        ready!(match &mut self.socket {
            Socket::Tcp(socket) => Pin::new(socket).poll_read(cx, &mut buffer),
            Socket::Unix(socket) => Pin::new(socket).poll_read(cx, &mut buffer),
        })?;
        let count = buffer.filled().len();
        // SAFETY: `filled` says that the first `count` bytes of the spare capacity were written.
        unsafe { into.set_len(length + count) };
        Poll::Ready(Ok(count))
    }

    fn poll_unexpected(&mut self, cx: &mut Context<'_>, _size: usize) -> Poll<()> {
        let mut byte = [0];
        let mut buffer = ReadBuf::new(&mut byte);
        match &mut self.socket {
            Socket::Tcp(socket) => Pin::new(socket).poll_read(cx, &mut buffer),
            Socket::Unix(socket) => Pin::new(socket).poll_read(cx, &mut buffer),
        }
        .map(drop)
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, from: &mut Vec<u8>) -> Poll<io::Result<()>> {
        loop {
            if self.written == self.out.len() {
                self.out.clear();
                self.written = 0;
                if from.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                mem::swap(&mut self.out, from);
            }
            match ready!(self.poll_write_some(cx)) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(count) => self.written += count,
                Err(error) => {
                    self.out.clear();
                    self.written = 0;
                    return Poll::Ready(Err(error));
                }
            }
        }
    }

    fn writing(&self) -> usize {
        self.out.len() - self.written
    }

    fn shutdown_write(&self) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(socket) => socket2::SockRef::from(socket).shutdown(Shutdown::Write),
            Socket::Unix(socket) => socket2::SockRef::from(socket).shutdown(Shutdown::Write),
        }
    }
}
