//! A relay of bytes from TCP to a unix socket: what the proxy's engines cost without its HTTP.
//!
//! `relay ENGINE LISTEN UPSTREAM`: one loop, one upstream connection for each client, bounded by
//! one buffer each way. A figure of a proxy is read against it; it has no limits and no time-outs.

use std::future::poll_fn;
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::task::{Context, Poll, ready};

use dormouse_ring::{Accepted, Engine, Epoll, Listener, Stream, Uring, connect_unix};

/// Bytes of one read.
const READ: usize = 64 * 1024;

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [engine, listen, upstream] = arguments.as_slice() else {
        return Err(io::Error::other("usage: relay uring|epoll ADDRESS:PORT UPSTREAM"));
    };
    let listener = TcpListener::bind(listen)?;
    let upstream = PathBuf::from(upstream);
    match engine.as_str() {
        "uring" => serve(Uring, listener, upstream),
        "epoll" => serve(Epoll, listener, upstream),
        _ => Err(io::Error::other("allowed: uring, epoll")),
    }
}

fn serve<E: Engine>(engine: E, listener: TcpListener, upstream: PathBuf) -> io::Result<()> {
    engine.run(async move {
        let listener = Listener::new(listener.into())?;
        loop {
            let accepted = listener.accept(engine).await?;
            let upstream = upstream.clone();
            tokio::task::spawn_local(async move {
                // Whoever broke off, both sides end.
                drop(relay(engine, accepted, &upstream).await);
            });
        }
    })?
}

async fn relay<E: Engine>(engine: E, accepted: Accepted<E>, upstream: &Path) -> io::Result<()> {
    let mut client = accepted.stream;
    let mut app = connect_unix(engine, upstream).await?;
    let (mut to_app, mut to_client) = (Vec::new(), Vec::new());
    poll_fn(|cx| {
        if let Poll::Ready(ended) = pass(cx, &mut client, &mut app, &mut to_app) {
            return Poll::Ready(ended);
        }
        pass(cx, &mut app, &mut client, &mut to_client)
    })
    .await
}

/// Passes bytes one way; ready at the end or an error.
fn pass<S: Stream>(
    cx: &mut Context<'_>,
    from: &mut S,
    to: &mut S,
    held: &mut Vec<u8>,
) -> Poll<io::Result<()>> {
    loop {
        if (!held.is_empty() || to.writing() > 0)
            && let Poll::Ready(written) = to.poll_write(cx, held)
        {
            written?;
        }
        if !held.is_empty() {
            return Poll::Pending;
        }
        if ready!(from.poll_read(cx, held, READ))? == 0 {
            return Poll::Ready(Ok(()));
        }
    }
}
