//! One client connection with at most one upstream at a time, as a state machine.
//!
//! Inputs: bytes in [`Conn::from_client`] and [`Conn::from_upstream`], the `*_closed` and
//! `*_failed` calls, [`Conn::forward`], [`Conn::refuse`], [`Conn::timed_out`]. After each, call
//! [`Conn::advance`] until it says [`Step::Wait`]. Outputs: [`Conn::to_client`],
//! [`Conn::to_upstream`], and what it wants to read.

use crate::answer::{Answer, Reject};
use crate::body::{Body, Framing, Output, TOO_LONG};
use crate::buffer::Buffer;
use crate::exchange::{Exchange, Progress};
use crate::request::{self, Method, Peer, Request};
use crate::tunnel::Tunnel;

/// Bytes that one direction may hold before its source is no longer read.
pub const HIGH_WATER: usize = 64 * 1024;
/// Bytes read and thrown away before a connection is cut after its last answer: a client that
/// still sends would else lose that answer to a reset.
pub const DISCARD_MAX: usize = 16 * 1024 * 1024;
/// Memory a silent connection keeps in each buffer.
const IDLE_BUFFER: usize = 8192;

/// Limits of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Bytes of a request head.
    pub head_bytes: usize,
    /// Fields of a request head, at most [`request::FIELDS_MAX`].
    pub head_fields: usize,
    /// Bytes of a request body.
    pub body_bytes: u64,
}

/// What the driver does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Wait for input or output.
    Wait,
    /// A request is there: answer it by [`Conn::forward`] or [`Conn::refuse`].
    Route,
    /// Nothing of the request reached the app, or it may be sent twice: [`Conn::forward`] again
    /// with a fresh upstream, or [`Conn::refuse`].
    Retry,
    /// Request and answer have ended; the upstream serves others if `reuse`, else it is dropped.
    Finished {
        /// Nothing is left on the upstream's connection.
        reuse: bool,
    },
    /// Close the client's writing side.
    ShutdownClient,
    /// Close the upstream's writing side.
    ShutdownUpstream,
    /// Drop everything.
    Closed,
}

/// What bounds the waiting now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// Nothing.
    Off,
    /// The head must be complete.
    Head,
    /// The next request, or the other side's end, must come.
    Idle,
    /// The app must begin its answer.
    Upstream,
    /// Some byte must move.
    Progress,
    /// The client must close.
    Linger,
    /// During a drain: a last request may come.
    Drain,
}

#[derive(Debug)]
pub(crate) enum Phase {
    Head,
    Held { request: Request, body: Body },
    Exchange(Exchange),
    Tunnel(Tunnel),
    Closing { shut: bool, discarded: usize },
    Closed,
}

/// The machine.
#[derive(Debug)]
pub struct Conn {
    settings: Settings,
    peer: Peer,
    phase: Phase,
    from_client: Buffer,
    to_client: Buffer,
    from_upstream: Buffer,
    to_upstream: Buffer,
    /// The request's head for the app, and what of its body came with it.
    head: Vec<u8>,
    client_closed: bool,
    draining: bool,
    served: bool,
}

impl Conn {
    /// A connection from which nothing was read yet.
    #[must_use]
    pub fn new(settings: Settings, peer: Peer) -> Self {
        Self {
            settings,
            peer,
            phase: Phase::Head,
            from_client: Buffer::default(),
            to_client: Buffer::default(),
            from_upstream: Buffer::default(),
            to_upstream: Buffer::default(),
            head: Vec::new(),
            client_closed: false,
            draining: false,
            served: false,
        }
    }

    // Inputs.

    /// Where bytes from the client go.
    pub fn from_client(&mut self) -> &mut Buffer {
        &mut self.from_client
    }

    /// Where bytes from the upstream go.
    pub fn from_upstream(&mut self) -> &mut Buffer {
        &mut self.from_upstream
    }

    /// The client sends nothing more.
    pub fn client_closed(&mut self) {
        self.client_closed = true;
    }

    /// The upstream sends nothing more; `clean` when it closed rather than broke.
    pub fn upstream_closed(&mut self, clean: bool) {
        match &mut self.phase {
            Phase::Exchange(exchange) => exchange.upstream_closed(clean),
            Phase::Tunnel(tunnel) => tunnel.upstream_closed = true,
            Phase::Head | Phase::Held { .. } | Phase::Closing { .. } | Phase::Closed => (),
        }
    }

    /// The upstream takes nothing more; what it has answered may still be read.
    pub fn upstream_write_failed(&mut self) {
        self.to_upstream.clear();
        match &mut self.phase {
            Phase::Exchange(exchange) => exchange.upstream_deaf = true,
            Phase::Tunnel(tunnel) => tunnel.upstream_closed = true,
            Phase::Head | Phase::Held { .. } | Phase::Closing { .. } | Phase::Closed => (),
        }
    }

    /// The next request on this connection is its last, and is told so. One that is on its way now is
    /// still answered: an idle connection stays open until [`Timer::Drain`] runs out.
    ///
    /// A WebSocket ends with 1012 where a frame of its app ends: its client comes again, and finds the
    /// next process. One that begins later stays until [`Conn::end`].
    pub fn drain(&mut self) {
        self.draining = true;
        if let Phase::Tunnel(tunnel) = &mut self.phase {
            tunnel.leave();
        }
    }

    /// Ends what would go on for as long as its client likes: a relay, and a connection without a
    /// request. The client's side is closed properly, behind what is already on its way there.
    pub fn end(&mut self) -> Step {
        match &mut self.phase {
            Phase::Head if self.from_client.is_empty() => {
                self.phase = Phase::Closing { shut: false, discarded: 0 };
                Step::Wait
            }
            Phase::Tunnel(tunnel) => {
                tunnel.leave();
                // In the middle of a frame it is FIN alone.
                tunnel.has_left(&mut self.from_upstream, &mut self.to_client);
                self.next_request(true);
                Step::Finished { reuse: false }
            }
            Phase::Head
            | Phase::Held { .. }
            | Phase::Exchange(_)
            | Phase::Closing { .. }
            | Phase::Closed => Step::Wait,
        }
    }

    /// Sends the held request to an upstream; on the `first_try` it may be asked
    /// for once more ([`Step::Retry`]).
    pub fn forward(&mut self, first_try: bool) {
        match std::mem::replace(&mut self.phase, Phase::Closed) {
            Phase::Held { request, body } => {
                self.from_upstream.clear();
                self.to_upstream.clear();
                self.to_upstream.tail().extend_from_slice(&self.head);
                self.phase = Phase::Exchange(Exchange::new(request, body, first_try));
            }
            other @ (Phase::Head
            | Phase::Exchange(_)
            | Phase::Tunnel(_)
            | Phase::Closing { .. }
            | Phase::Closed) => self.phase = other,
        }
    }

    /// Answers the held request.
    pub fn refuse(&mut self, answer: &Answer) {
        let Phase::Held { request, body } = &self.phase else { return };
        let close = request.close || !body.is_done() || self.draining;
        answer.write(self.to_client.tail(), request.method == Method::Head, close);
        self.next_request(close);
    }

    /// A timer that [`Conn::timer`] named ran out.
    pub fn timed_out(&mut self, timer: Timer) -> Step {
        match (timer, &self.phase) {
            (Timer::Head, Phase::Head) if !self.from_client.is_empty() => {
                self.say_and_close(&Answer::REQUEST_TIMEOUT, false);
                Step::Wait
            }
            (Timer::Upstream, _) => self.disown(&Answer::GATEWAY_TIMEOUT),
            (Timer::Drain, _) => self.end(),
            (Timer::Head | Timer::Idle | Timer::Progress | Timer::Linger | Timer::Off, _) => {
                self.phase = Phase::Closed;
                Step::Closed
            }
        }
    }

    /// What the upstream says counts no more. A request whose answer has not begun gets this one;
    /// a client that has part of another must see it end too early.
    pub fn disown(&mut self, answer: &Answer) -> Step {
        match &self.phase {
            Phase::Exchange(exchange) if !exchange.has_begun() => {
                let head_only = exchange.request().method == Method::Head;
                self.say_and_close(answer, head_only);
                Step::Finished { reuse: false }
            }
            Phase::Exchange(_)
            | Phase::Tunnel(_)
            | Phase::Head
            | Phase::Held { .. }
            | Phase::Closing { .. }
            | Phase::Closed => {
                self.phase = Phase::Closed;
                Step::Closed
            }
        }
    }

    // Outputs.

    /// Bytes for the client.
    pub fn to_client(&mut self) -> &mut Buffer {
        &mut self.to_client
    }

    /// Bytes for the upstream.
    pub fn to_upstream(&mut self) -> &mut Buffer {
        &mut self.to_upstream
    }

    /// The request that is held, or is being answered.
    #[must_use]
    pub fn request(&self) -> Option<&Request> {
        match &self.phase {
            Phase::Held { request, .. } => Some(request),
            Phase::Exchange(exchange) => Some(exchange.request()),
            Phase::Head | Phase::Tunnel(_) | Phase::Closing { .. } | Phase::Closed => None,
        }
    }

    /// Bounds the held request's body: what it announces, and what comes.
    pub fn limit_body(&mut self, bytes: u64) -> Result<(), Reject> {
        let Phase::Held { request, body } = &mut self.phase else { return Ok(()) };
        match request.framing {
            Framing::Length(length) if length > bytes => return Err(TOO_LONG),
            Framing::Length(_) | Framing::Empty | Framing::Chunked | Framing::UntilClose => (),
        }
        body.limit(bytes)
    }

    /// Whether the client is to be read.
    #[must_use]
    pub fn wants_client(&self) -> bool {
        if self.client_closed {
            return false;
        }
        let held = self.from_client.len();
        match &self.phase {
            Phase::Head | Phase::Held { .. } => held <= self.settings.head_bytes,
            Phase::Exchange(_) | Phase::Tunnel(_) => held < HIGH_WATER,
            Phase::Closing { shut, .. } => *shut,
            Phase::Closed => false,
        }
    }

    /// Whether the upstream is to be read.
    #[must_use]
    pub fn wants_upstream(&self) -> bool {
        let open = match &self.phase {
            Phase::Exchange(exchange) => exchange.wants_upstream(),
            Phase::Tunnel(tunnel) => !tunnel.upstream_closed,
            Phase::Head | Phase::Held { .. } | Phase::Closing { .. } | Phase::Closed => false,
        };
        open && self.from_upstream.len() < HIGH_WATER && self.to_client.len() < HIGH_WATER
    }

    /// Whether large pieces are on their way: reads may use large buffers.
    #[must_use]
    pub fn is_streaming(&self) -> bool {
        match &self.phase {
            Phase::Exchange(exchange) => exchange.is_streaming(),
            Phase::Tunnel(_) | Phase::Closing { .. } => true,
            Phase::Head | Phase::Held { .. } | Phase::Closed => false,
        }
    }

    /// What bounds the waiting now.
    #[must_use]
    pub fn timer(&self) -> Timer {
        if !self.to_client.is_empty() && !matches!(self.phase, Phase::Held { .. }) {
            return Timer::Progress;
        }
        match &self.phase {
            Phase::Head if self.from_client.is_empty() && self.draining => Timer::Drain,
            Phase::Head if self.from_client.is_empty() && self.served => Timer::Idle,
            Phase::Head => Timer::Head,
            Phase::Exchange(exchange) => exchange.timer(!self.to_upstream.is_empty()),
            Phase::Tunnel(_) if !self.to_upstream.is_empty() => Timer::Progress,
            Phase::Tunnel(tunnel) if tunnel.upstream_closed || self.client_closed => Timer::Idle,
            Phase::Held { .. } | Phase::Closed | Phase::Tunnel(_) => Timer::Off,
            Phase::Closing { .. } => Timer::Linger,
        }
    }

    /// Goes as far as the bytes at hand allow.
    pub fn advance(&mut self) -> Step {
        loop {
            let step = match &mut self.phase {
                Phase::Head => self.read_head(),
                Phase::Held { .. } => Some(Step::Route),
                Phase::Exchange(_) => self.exchange(),
                Phase::Tunnel(tunnel) => {
                    if tunnel.has_left(&mut self.from_upstream, &mut self.to_client) {
                        self.next_request(true);
                        return Step::Finished { reuse: false };
                    }
                    let client = (&mut self.from_client, &mut self.to_client, self.client_closed);
                    let upstream = (&mut self.from_upstream, &mut self.to_upstream);
                    let step = tunnel.relay(client, upstream);
                    if matches!(step, Step::Finished { .. }) {
                        self.phase = Phase::Closing { shut: true, discarded: 0 };
                    }
                    Some(step)
                }
                Phase::Closing { .. } => self.linger(),
                Phase::Closed => Some(Step::Closed),
            };
            if let Some(step) = step {
                return step;
            }
        }
    }

    fn read_head(&mut self) -> Option<Step> {
        if self.from_client.is_empty() {
            if !self.client_closed {
                self.from_client.shrink(IDLE_BUFFER);
                self.to_client.shrink(IDLE_BUFFER);
                return Some(Step::Wait);
            }
            self.phase = Phase::Closing { shut: false, discarded: 0 };
            return None;
        }
        let (limit, fields) = (self.settings.head_bytes, self.settings.head_fields);
        let data = self.from_client.data();
        let too_long = Reject { status: 431, why: "the head is too long" };
        let parsed = match request::parse(data, fields, &self.peer, &mut self.head) {
            Ok(Some((_, length))) if length > limit => Err(too_long),
            Ok(None) if data.len() > limit => Err(too_long),
            Ok(None) if self.client_closed => Err(Reject::bad("the head is cut short")),
            Ok(None) => return Some(Step::Wait),
            Ok(Some(parsed)) => Ok(parsed),
            Err(reject) => Err(reject),
        };
        match parsed.and_then(|(request, length)| self.hold(request, length)) {
            Ok(()) => None,
            Err(reject) => {
                self.say_and_close(&reject.into(), false);
                None
            }
        }
    }

    /// Reads what came of the body before anything is sent: a body that is malformed from its
    /// start never reaches the app.
    fn hold(&mut self, request: Request, head_length: usize) -> Result<(), Reject> {
        self.from_client.consume(head_length);
        self.served = true;
        let output = match request.framing {
            Framing::Chunked => Output::Chunked,
            Framing::Empty | Framing::Length(_) | Framing::UntilClose => Output::Raw,
        };
        let mut body = Body::new(request.framing, output, u64::MAX);
        let read = body.feed(self.from_client.data(), &mut self.head, HIGH_WATER)?;
        self.from_client.consume(read);
        self.phase = Phase::Held { request, body };
        self.limit_body(self.settings.body_bytes)
    }

    fn exchange(&mut self) -> Option<Step> {
        let Phase::Exchange(exchange) = &mut self.phase else { return None };
        let client = (&mut self.from_client, &mut self.to_client, self.client_closed);
        let upstream = (&mut self.from_upstream, &mut self.to_upstream);
        match exchange.advance(client, upstream, self.draining) {
            Progress::Wait => Some(Step::Wait),
            Progress::Tunnel => {
                let websocket = exchange.request().websocket;
                self.phase = Phase::Tunnel(Tunnel::new(websocket));
                None
            }
            Progress::Finished { reuse, close } => {
                self.next_request(close);
                Some(Step::Finished { reuse })
            }
            Progress::Failed { answer, close } => {
                let close = close || self.draining;
                let head_only = exchange.request().method == Method::Head;
                answer.write(self.to_client.tail(), head_only, close);
                self.next_request(close);
                Some(Step::Finished { reuse: false })
            }
            Progress::Cut => {
                self.phase = Phase::Closing { shut: false, discarded: 0 };
                Some(Step::Finished { reuse: false })
            }
            Progress::Again => {
                if let Phase::Exchange(exchange) = std::mem::replace(&mut self.phase, Phase::Closed)
                {
                    let (request, body) = exchange.into_held();
                    self.phase = Phase::Held { request, body };
                }
                Some(Step::Retry)
            }
        }
    }

    fn next_request(&mut self, close: bool) {
        self.phase = if close { Phase::Closing { shut: false, discarded: 0 } } else { Phase::Head };
        self.to_upstream.clear();
        self.from_upstream.clear();
    }

    fn say_and_close(&mut self, answer: &Answer, head_only: bool) {
        answer.write(self.to_client.tail(), head_only, true);
        self.next_request(true);
    }

    fn linger(&mut self) -> Option<Step> {
        let Phase::Closing { shut, discarded } = &mut self.phase else { return None };
        if !self.to_client.is_empty() {
            return Some(Step::Wait);
        }
        if !*shut {
            *shut = true;
            return Some(Step::ShutdownClient);
        }
        *discarded += self.from_client.len();
        self.from_client.clear();
        if self.client_closed || *discarded > DISCARD_MAX {
            self.phase = Phase::Closed;
            return None;
        }
        Some(Step::Wait)
    }
}

#[cfg(test)]
#[path = "conn_tests.rs"]
mod tests;
