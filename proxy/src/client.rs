//! One client connection: drives the pure machine with a stream on each side.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use dormouse_link::RunNumber;
use dormouse_proxy_core::{Answer, Conn, Peer, Step, Timer};
use dormouse_ring::{Accepted, Engine, Stream};
use tokio::time::{Instant, Sleep};

use crate::clock;
use crate::event_loop::Loop;
use crate::host::{Counted, HostState};
use crate::pool::{self, HEAD_READ, Pool};
use crate::route::session_expired;
use crate::settings::Timeouts;

/// Read size while a head is awaited: what a silent connection costs on a ring.
const CLIENT_HEAD_READ: usize = 4 * 1024;
/// Read size while a body flows.
const BODY_READ: usize = 64 * 1024;

/// An upstream that serves this client now.
pub(crate) struct Upstream<E: Engine> {
    pub(crate) stream: E::Stream,
    pub(crate) run: RunNumber,
    pub(crate) pool: Rc<Pool<E::Stream>>,
    /// The managed host whose instance this is.
    pub(crate) host: Option<Rc<HostState<E::Stream>>>,
}

impl<E: Engine> Upstream<E> {
    /// Whether it may be sent to, and be believed.
    fn counts(&self) -> bool {
        self.host.as_ref().is_none_or(|host| host.believes(self.run))
    }
}

/// The connection.
pub(crate) struct Client<E: Engine> {
    pub(crate) at: Rc<Loop<E>>,
    pub(crate) conn: Conn,
    stream: E::Stream,
    pub(crate) upstream: Option<Upstream<E>>,
    pub(crate) counted: Option<Counted<E::Stream>>,
    watch: Watch,
    id: u64,
    known_draining: bool,
    known_ending: bool,
}

/// What ended a wait.
enum Event {
    Moved,
    TimedOut(Timer),
    /// The drain is nearly over.
    Ending,
    ClientGone,
    /// The session's deadline passed while something was still to be sent to an instance, or
    /// before it answered.
    Expired,
}

/// Serves a connection until it ends.
/// `id`: of [`Loop::register`].
pub(crate) async fn serve<E: Engine>(at: Rc<Loop<E>>, id: u64, accepted: Accepted<E>) {
    let settings = at.settings();
    let peer = Peer {
        address: accepted.peer.map_or_else(|| "unknown".to_owned(), |address| address.to_string()),
        trusted: accepted.peer.is_some_and(|address| settings.trusts(address)),
        scheme: "http",
    };
    let mut client = Client {
        conn: Conn::new(settings.conn, peer),
        stream: accepted.stream,
        upstream: None,
        counted: None,
        watch: Watch::new(settings.timeouts),
        known_draining: false,
        known_ending: false,
        id,
        at,
    };
    poll_fn(|cx| {
        client.at.set_waker(id, cx.waker().clone());
        Poll::Ready(())
    })
    .await;
    client.run().await;
}

impl<E: Engine> Drop for Client<E> {
    fn drop(&mut self) {
        self.at.unregister(self.id);
    }
}

impl<E: Engine> Client<E> {
    async fn run(&mut self) {
        loop {
            let step = match self.conn.advance() {
                Step::Wait => match self.wait().await {
                    Event::Moved => Step::Wait,
                    Event::ClientGone => return,
                    Event::Ending => self.conn.end(),
                    Event::Expired => {
                        self.at.stats.session_expired.add();
                        self.conn.disown(&session_expired())
                    }
                    Event::TimedOut(timer) => {
                        self.at.stats.timed_out.add();
                        self.conn.timed_out(timer)
                    }
                },
                step @ (Step::Route
                | Step::Retry
                | Step::Finished { .. }
                | Step::ShutdownClient
                | Step::ShutdownUpstream
                | Step::Closed) => step,
            };
            match step {
                Step::Wait => (),
                Step::Route => {
                    self.at.stats.requests.add();
                    if self.route(false).await.is_err() {
                        return;
                    }
                }
                Step::Retry => {
                    self.at.stats.retried.add();
                    self.finished(false);
                    if self.route(true).await.is_err() {
                        return;
                    }
                }
                Step::Finished { reuse } => self.finished(reuse),
                // They fail only when the other side is gone; its end is read as usual.
                Step::ShutdownClient => drop(self.stream.shutdown_write()),
                Step::ShutdownUpstream => {
                    if let Some(upstream) = &self.upstream {
                        drop(upstream.stream.shutdown_write());
                    }
                }
                Step::Closed => return,
            }
        }
    }

    fn finished(&mut self, reuse: bool) {
        if let Some(Upstream { stream, run, pool, .. }) = self.upstream.take()
            && reuse
        {
            pool::keep(&pool, run, stream);
        }
        self.counted = None;
        self.at.return_buffer(std::mem::take(self.conn.from_upstream().tail()));
        self.at.return_buffer(std::mem::take(self.conn.to_upstream().tail()));
        self.watch.restart();
    }

    /// Sends the held request to an upstream.
    pub(crate) fn forward(&mut self, upstream: Upstream<E>, first_try: bool) {
        self.upstream = Some(upstream);
        *self.conn.from_upstream().tail() = self.at.borrow_buffer();
        *self.conn.to_upstream().tail() = self.at.borrow_buffer();
        self.conn.forward(first_try);
    }

    /// Answers the held request with an answer of the proxy's own.
    pub(crate) fn refuse(&mut self, answer: &Answer) {
        self.at.stats.refused.add();
        self.conn.refuse(answer);
    }

    async fn wait(&mut self) -> Event {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        if self.at.draining.get() && !self.known_draining {
            self.known_draining = true;
            self.conn.drain();
        }
        if !self.conn.to_upstream().is_empty()
            && self.upstream.as_ref().is_some_and(|upstream| !upstream.counts())
        {
            return Poll::Ready(Event::Expired);
        }
        let Ok(mut moved) = self.poll_upstream(cx) else { return Poll::Ready(Event::Expired) };
        if !self.conn.to_client().is_empty() {
            let written = self.stream.poll_write(cx, self.conn.to_client().tail());
            self.conn.to_client().set_lent(self.stream.writing());
            match written {
                Poll::Ready(Ok(())) => moved = true,
                Poll::Ready(Err(_)) => return Poll::Ready(Event::ClientGone),
                Poll::Pending => (),
            }
        }
        match self.poll_client(cx) {
            Poll::Ready(Ok(())) => moved = true,
            Poll::Ready(Err(Gone)) => return Poll::Ready(Event::ClientGone),
            Poll::Pending => (),
        }
        if moved {
            self.watch.moved();
            return Poll::Ready(Event::Moved);
        }
        // Behind the read: a request that has come is answered.
        if self.at.ending.get() && !self.known_ending {
            self.known_ending = true;
            return Poll::Ready(Event::Ending);
        }
        match self.watch.poll(cx, self.conn.timer()) {
            Poll::Ready(timer) => Poll::Ready(Event::TimedOut(timer)),
            Poll::Pending => Poll::Pending,
        }
    }

    fn poll_upstream(&mut self, cx: &mut Context<'_>) -> Result<bool, Expired> {
        let Some(upstream) = &mut self.upstream else { return Ok(false) };
        let mut moved = false;
        if !self.conn.to_upstream().is_empty() {
            let written = upstream.stream.poll_write(cx, self.conn.to_upstream().tail());
            self.conn.to_upstream().set_lent(upstream.stream.writing());
            match written {
                Poll::Ready(Ok(())) => moved = true,
                Poll::Ready(Err(_)) => {
                    self.conn.upstream_write_failed();
                    moved = true;
                }
                Poll::Pending => (),
            }
        }
        if self.conn.wants_upstream() {
            let size = if self.conn.is_streaming() { BODY_READ } else { HEAD_READ };
            match upstream.stream.poll_read(cx, self.conn.from_upstream().tail(), size) {
                // What it has done may be nowhere but here, while another box serves the host.
                Poll::Ready(_) if !upstream.counts() => return Err(Expired),
                Poll::Ready(Ok(0)) => self.conn.upstream_closed(true),
                Poll::Ready(Ok(_)) => (),
                Poll::Ready(Err(_)) => self.conn.upstream_closed(false),
                Poll::Pending => return Ok(moved),
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Reads the client, if the machine wants it.
    pub(crate) fn poll_client(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        if !self.conn.wants_client() {
            return Poll::Pending;
        }
        let size = if self.conn.is_streaming() { BODY_READ } else { CLIENT_HEAD_READ };
        match self.stream.poll_read(cx, self.conn.from_client().tail(), size) {
            Poll::Ready(Ok(0)) => self.conn.client_closed(),
            Poll::Ready(Ok(_)) => {
                if let Some(counted) = &self.counted {
                    counted.stamp();
                }
            }
            Poll::Ready(Err(_)) => return Poll::Ready(Err(Gone)),
            Poll::Pending => return Poll::Pending,
        }
        Poll::Ready(Ok(()))
    }
}

/// The session's deadline has passed.
struct Expired;

/// The client broke its connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gone;

/// One coarse timer: it is armed again only when it fires too early, or is due sooner.
struct Watch {
    timeouts: Timeouts,
    kind: Timer,
    due: Option<Instant>,
    armed: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Watch {
    fn new(timeouts: Timeouts) -> Self {
        Self { timeouts, kind: Timer::Off, due: None, armed: None }
    }

    fn span(&self, kind: Timer) -> Option<Duration> {
        match kind {
            Timer::Off => None,
            Timer::Head => Some(self.timeouts.head),
            Timer::Idle | Timer::Progress => Some(self.timeouts.idle),
            Timer::Upstream => Some(self.timeouts.upstream),
            Timer::Linger => Some(self.timeouts.linger),
            Timer::Drain => Some(self.timeouts.drain_idle),
        }
    }

    /// A byte moved: what bounds progress begins anew.
    fn moved(&mut self) {
        match self.kind {
            Timer::Progress | Timer::Idle => self.restart(),
            Timer::Off | Timer::Head | Timer::Upstream | Timer::Linger | Timer::Drain => (),
        }
    }

    /// The next wait begins anew, even if it is of the same kind.
    fn restart(&mut self) {
        self.kind = Timer::Off;
        self.due = None;
    }

    fn poll(&mut self, cx: &mut Context<'_>, kind: Timer) -> Poll<Timer> {
        if kind != self.kind {
            self.kind = kind;
            self.due = self.span(kind).map(|span| clock::now() + span);
        }
        let Some(due) = self.due else { return Poll::Pending };
        loop {
            match &mut self.armed {
                Some((at, sleep)) if *at <= due => match sleep.as_mut().poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(()) if *at == due => {
                        self.armed = None;
                        return Poll::Ready(kind);
                    }
                    Poll::Ready(()) => {
                        *at = due;
                        sleep.as_mut().reset(due);
                    }
                },
                Some((at, sleep)) => {
                    *at = due;
                    sleep.as_mut().reset(due);
                }
                None => self.armed = Some((due, Box::pin(tokio::time::sleep_until(due)))),
            }
        }
    }
}
