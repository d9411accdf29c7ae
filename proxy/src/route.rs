//! From a held request to an upstream, or to a refusal: routes, wakes, waiting, connecting.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use dormouse_link::protocol::Request;
use dormouse_link::{Refusal, RunNumber, Word};
use dormouse_proxy_core::request::Method;
use dormouse_proxy_core::{Answer, Host};
use dormouse_ring::{Engine, connect_tcp, connect_unix};
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::client::{Client, Gone, Upstream};
use crate::clock;
use crate::event_loop::{Found, Plain};
use crate::host::{HostState, Notice, TooMany};
use crate::pool::Pool;
use crate::settings::Target;

/// Longest wait for a place in an app's backlog, and for a TCP connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Longest wait for the first routes: an activator that starts beside us takes less.
const ROUTES_MAX: Duration = Duration::from_secs(5);

/// What a request that is held may lead to.
enum Held {
    /// Try to enter again.
    Again,
    Refused(Answer),
}

/// What is remembered of a request over several tries.
struct Wish {
    host: Host,
    sidecar: bool,
    repeatable: bool,
    fresh: bool,
}

impl<E: Engine> Client<E> {
    /// Finds the held request an upstream, or refuses it. `fresh`: no connection that served
    /// before. An error: the client is gone.
    pub(crate) async fn route(&mut self, fresh: bool) -> Result<(), Gone> {
        let Some(request) = self.conn.request() else { return Ok(()) };
        let wish = Wish {
            host: request.host.clone(),
            sidecar: request.sidecar,
            repeatable: match request.method {
                Method::Head | Method::Idempotent => true,
                Method::Other => false,
            },
            fresh,
        };
        let mut found = self.at.find(&wish.host);
        if matches!(found, Found::TooEarly) {
            match self.await_routes().await? {
                Held::Again => found = self.at.find(&wish.host),
                Held::Refused(answer) => {
                    self.refuse(&answer);
                    return Ok(());
                }
            }
        }
        match found {
            Found::Plain(plain) => self.plain(&plain, &wish).await,
            Found::Managed(host) => return self.managed(&host, &wish).await,
            Found::TooEarly => self.refuse(&refusal(Refusal::NoActivator, 5)),
            Found::Unknown => {
                self.at.stats.unknown_host.add();
                self.refuse(&Answer::UNKNOWN_HOST);
            }
        }
        Ok(())
    }

    /// Waits for the activator to say which hosts there are: a new proxy serves before it knows.
    async fn await_routes(&mut self) -> Result<Held, Gone> {
        self.at.stats.waited.add();
        let Ok(_place) = self.at.take_waiting() else { return Ok(self.too_many()) };
        let at = self.at.clone();
        let mut settled = std::pin::pin!(at.settled.notified());
        let mut sleep = std::pin::pin!(tokio::time::sleep(ROUTES_MAX));
        poll_fn(|cx| {
            if settled.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(Held::Again));
            }
            while let Poll::Ready(read) = self.poll_client(cx) {
                if read.is_err() {
                    return Poll::Ready(Err(Gone));
                }
            }
            sleep.as_mut().poll(cx).map(|()| Ok(Held::Refused(refusal(Refusal::NoActivator, 5))))
        })
        .await
    }

    async fn plain(&mut self, plain: &Rc<Plain<E::Stream>>, wish: &Wish) {
        const NO_RUN: RunNumber = RunNumber(0);
        if self.pooled(&plain.pool, NO_RUN, wish, None) {
            return;
        }
        let engine = self.at.engine;
        let connected = tokio::time::timeout(CONNECT_MAX, async {
            match &plain.target {
                Target::Unix(path) => connect_unix(engine, path).await,
                Target::Tcp(address) => connect_tcp(engine, *address).await,
            }
        })
        .await;
        match connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(stream) => self.connected(stream, NO_RUN, plain.pool.clone(), None, wish),
            Err(error) => {
                if let Some(times) = plain.unreached.due(clock::monotonic_ns()) {
                    warn!(host = %wish.host, %error, times, "upstream does not take connections");
                }
                self.refuse(&Answer::BAD_GATEWAY);
            }
        }
    }

    async fn managed(&mut self, host: &Rc<HostState<E::Stream>>, wish: &Wish) -> Result<(), Gone> {
        let limits = host.limits();
        if let Err(reject) = self.conn.limit_body(limits.body_bytes) {
            self.refuse(&reject.into());
            return Ok(());
        }
        let deadline = clock::now() + Duration::from_millis(u64::from(limits.wake_wait_ms));
        // A run that refused this request is not tried again until the activator has spoken.
        let mut avoid = None;
        loop {
            if host.is_past_deadline() {
                self.at.stats.session_expired.add();
                self.refuse(&session_expired());
                return Ok(());
            }
            let word = match self.enter(host, wish, avoid) {
                Ok(run) => match self.reach(host, run, wish, deadline).await {
                    Reached::Yes => return Ok(()),
                    Reached::Refused(answer) => {
                        self.counted = None;
                        self.refuse(&answer);
                        return Ok(());
                    }
                    Reached::Gone => {
                        self.counted = None;
                        self.at.report_gone(host.slot(), run);
                        debug!(host = %wish.host, %run, "instance is gone");
                        avoid = Some(run);
                        Word::Stopping { run }
                    }
                },
                Err(word) => word,
            };
            match self.hold(host, wish, word, avoid, deadline).await? {
                Held::Again => avoid = None,
                Held::Refused(answer) => {
                    self.refuse(&answer);
                    return Ok(());
                }
            }
        }
    }

    /// Counts the request in; a sidecar's is only let pass.
    fn enter(
        &mut self,
        host: &Rc<HostState<E::Stream>>,
        wish: &Wish,
        avoid: Option<RunNumber>,
    ) -> Result<RunNumber, Word> {
        let run = if wish.sidecar {
            match host.peek() {
                Word::Awake { run } => run,
                word @ (Word::Asleep
                | Word::Waking
                | Word::Stopping { .. }
                | Word::Refusing { .. }) => return Err(word),
            }
        } else {
            let (run, mut counted) = host.enter()?;
            counted.on_retired(self.at.on_retired.clone());
            self.counted = Some(counted);
            run
        };
        debug_assert_ne!(avoid, Some(run), "invariant 8: held until the activator has spoken");
        Ok(run)
    }

    /// Sends the request to a run, on a kept or a new connection.
    async fn reach(
        &mut self,
        host: &Rc<HostState<E::Stream>>,
        run: RunNumber,
        wish: &Wish,
        deadline: Instant,
    ) -> Reached {
        if self.pooled(&host.pool, run, wish, Some(host.clone())) {
            return Reached::Yes;
        }
        let path = host.socket(run);
        let connect = connect_unix(self.at.engine, &path);
        match tokio::time::timeout_at(deadline, connect).await {
            Ok(Ok(stream)) => {
                self.connected(stream, run, host.pool.clone(), Some(host.clone()), wish);
                Reached::Yes
            }
            Ok(Err(error)) if is_gone(&error) => Reached::Gone,
            Ok(Err(error)) => {
                if let Some(times) = host.unreached.due(clock::monotonic_ns()) {
                    warn!(host = %wish.host, %run, %error, times, "instance cannot be reached");
                }
                Reached::Refused(Answer::BAD_GATEWAY)
            }
            Err(_) => Reached::Refused(Answer::unavailable(
                "backlog-full",
                "the app takes no further connections",
                5,
            )),
        }
    }

    fn pooled(
        &mut self,
        pool: &Rc<Pool<E::Stream>>,
        run: RunNumber,
        wish: &Wish,
        host: Option<Rc<HostState<E::Stream>>>,
    ) -> bool {
        if wish.fresh {
            return false;
        }
        let Some(stream) = pool.take(run, wish.repeatable, clock::now()) else { return false };
        self.at.stats.upstream_reused.add();
        self.forward(Upstream { stream, run, pool: pool.clone(), host }, true);
        true
    }

    fn connected(
        &mut self,
        stream: E::Stream,
        run: RunNumber,
        pool: Rc<Pool<E::Stream>>,
        host: Option<Rc<HostState<E::Stream>>>,
        wish: &Wish,
    ) {
        self.at.stats.upstream_connects.add();
        // An app that dies accepts into its backlog until it is gone.
        self.forward(Upstream { stream, run, pool, host }, !wish.fresh);
    }

    /// Waits for a host that is not awake.
    async fn hold(
        &mut self,
        host: &Rc<HostState<E::Stream>>,
        wish: &Wish,
        word: Word,
        avoid: Option<RunNumber>,
        deadline: Instant,
    ) -> Result<Held, Gone> {
        match word {
            Word::Refusing { reason } => return Ok(Held::Refused(refusal(reason, 5))),
            Word::Asleep | Word::Stopping { .. } if wish.sidecar => {
                if avoid.is_some() || word != Word::Asleep || !host.is_requested() {
                    return Ok(Held::Refused(refusal(Refusal::SidecarAsleep, 5)));
                }
            }
            Word::Asleep | Word::Waking | Word::Stopping { .. } | Word::Awake { .. } => (),
        }
        self.at.stats.waited.add();
        let Ok(_place) = self.at.take_waiting() else { return Ok(self.too_many()) };
        // Listed before the bit is set: a notice in between must find this waiter.
        let Ok(ticket) = host.wait(wish.sidecar) else { return Ok(self.too_many()) };
        if !wish.sidecar {
            match host.request() {
                Some(Request::Post) => self.at.post(host.slot()),
                Some(Request::AlreadyPosted) => (),
                Some(Request::Awake { run, post }) => {
                    if post {
                        self.at.post(host.slot());
                    }
                    if avoid != Some(run) {
                        return Ok(Held::Again);
                    }
                }
                None => return Ok(Held::Refused(refusal(Refusal::Unknown, 5))),
            }
        }
        let mut sleep = std::pin::pin!(tokio::time::sleep_until(deadline));
        let notice = poll_fn(|cx| {
            if let Poll::Ready(notice) = ticket.poll(cx) {
                return Poll::Ready(Ok(Some(notice)));
            }
            while let Poll::Ready(read) = self.poll_client(cx) {
                if read.is_err() {
                    return Poll::Ready(Err(Gone));
                }
            }
            sleep.as_mut().poll(cx).map(|()| Ok(None))
        })
        .await?;
        Ok(match notice {
            Some(Notice::Look) => Held::Again,
            Some(Notice::Refused { reason, retry_after_s }) => {
                Held::Refused(refusal(reason, retry_after_s))
            }
            None => {
                self.at.stats.wake_timed_out.add();
                Held::Refused(refusal(Refusal::WakeTimedOut, 5))
            }
        })
    }

    fn too_many(&self) -> Held {
        self.at.stats.too_many_waiters.add();
        Held::Refused(refusal(Refusal::TooManyWaiters, 5))
    }
}

enum Reached {
    Yes,
    /// The run's socket is missing or refuses: nothing of the request was sent.
    Gone,
    Refused(Answer),
}

impl<E: Engine> crate::event_loop::Loop<E> {
    /// A place among the box's waiters.
    fn take_waiting(&self) -> Result<impl Drop + use<E>, TooMany> {
        struct Place(std::sync::Arc<std::sync::atomic::AtomicU32>);
        impl Drop for Place {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let place = Place(self.waiting.clone());
        if before >= self.settings().waiters { Err(TooMany) } else { Ok(place) }
    }
}

/// Whether a socket is missing or nobody listens on it.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Past the session's deadline nothing is served.
pub(crate) fn session_expired() -> Answer {
    refusal(Refusal::SessionExpired, 5)
}

fn refusal(reason: Refusal, retry_after_s: u32) -> Answer {
    let why = match reason {
        Refusal::Elsewhere => "another box serves this host",
        Refusal::Broken => "the app cannot start",
        Refusal::Unproven => "the app's last stop is not proven",
        Refusal::Backoff | Refusal::WakeFailed => "the app did not start",
        Refusal::StoreDown => "the store does not answer",
        Refusal::TooManyWaiters => "too many requests wait for this host",
        Refusal::WakeTimedOut => "the app did not start in time",
        Refusal::SessionExpired => "this box may not serve apps now",
        Refusal::NoActivator => "the proxy does not know its hosts yet",
        Refusal::SidecarAsleep => "the host is asleep",
        Refusal::Held => "the host is held down",
        Refusal::ReplicaDamaged => "the host's replica is damaged",
        Refusal::DatabaseUnfit => "the host's database cannot be replicated",
        Refusal::ShuttingDown => "shutting down",
        Refusal::Unknown => "the host cannot be served",
    };
    Answer::unavailable(reason.text(), why, retry_after_s)
}
