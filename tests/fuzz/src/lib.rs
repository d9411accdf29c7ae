//! Byte fuzzing of every parser: what the tests share. `PROPTEST_CASES` says how many cases run.
//!
//! [`Wire`] drives the proxy's connection machine without any socket: bytes of a client go in, in
//! any pieces; an app that answers each complete request stands on the other side.
#![expect(clippy::expect_used, reason = "a broken promise of the machine fails the test")]

use dormouse_proxy_core::body::{Body, Framing, Output};
use dormouse_proxy_core::request::{self, Peer, Request};
use dormouse_proxy_core::{Conn, Settings, Step, Timer};

/// Far more steps than any input of the tests takes: a machine that goes on is in a circle.
const STEPS_MAX: usize = 100_000;

/// What came of a client's bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Everything that the client got.
    pub to_client: Vec<u8>,
    /// Complete requests as the app saw them: head, and payload without its framing.
    pub seen: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A connection whose other ends are plain buffers.
#[derive(Debug)]
pub struct Wire {
    conn: Conn,
    app: Vec<u8>,
    answer: Vec<u8>,
    pieces: usize,
    outcome: Outcome,
    has_upstream: bool,
}

fn peer() -> Peer {
    Peer { address: "192.0.2.1".to_owned(), trusted: false, scheme: "http" }
}

impl Wire {
    /// The app answers each request with `answer`, in pieces of `pieces` bytes.
    #[must_use]
    pub fn new(answer: &[u8], pieces: usize) -> Self {
        let settings = Settings { head_bytes: 16 * 1024, head_fields: 100, body_bytes: 1 << 20 };
        Self {
            conn: Conn::new(settings, peer()),
            app: Vec::new(),
            answer: answer.to_vec(),
            pieces: pieces.max(1),
            outcome: Outcome::default(),
            has_upstream: false,
        }
    }

    /// The client sends these pieces, then nothing more.
    #[must_use]
    pub fn run<'a>(mut self, pieces: impl IntoIterator<Item = &'a [u8]>) -> Outcome {
        for piece in pieces {
            if !self.conn.wants_client() {
                break;
            }
            self.conn.from_client().tail().extend_from_slice(piece);
            self.settle();
        }
        self.conn.client_closed();
        self.settle();
        // What the app has not answered by now is awaited in vain.
        if self.conn.timer() == Timer::Upstream {
            self.conn.upstream_closed(true);
            self.settle();
        }
        self.outcome
    }

    fn settle(&mut self) {
        for _ in 0..STEPS_MAX {
            self.flush();
            match self.conn.advance() {
                Step::Wait => {
                    self.flush();
                    if !self.app_speaks() && self.conn.to_client().is_empty() {
                        return;
                    }
                }
                Step::Route => {
                    // Any host has a route here: whether an unknown one or a malformed body is
                    // told first depends on what has arrived.
                    self.has_upstream = true;
                    self.app.clear();
                    self.conn.forward(false);
                }
                Step::Retry => panic!("a fresh upstream is never tried again"),
                Step::Finished { .. } => self.has_upstream = false,
                Step::ShutdownClient | Step::ShutdownUpstream => (),
                Step::Closed => return,
            }
        }
        panic!("the machine goes in a circle");
    }

    fn flush(&mut self) {
        let out = self.conn.to_client();
        self.outcome.to_client.extend_from_slice(out.data());
        out.clear();
        let up = self.conn.to_upstream();
        self.app.extend_from_slice(up.data());
        up.clear();
    }

    /// The app answers, once its request is complete. Whether it said something.
    fn app_speaks(&mut self) -> bool {
        if !self.has_upstream {
            return false;
        }
        let Some((head, payload, request)) = complete(&self.app) else { return false };
        self.outcome.seen.push((head, payload));
        self.app.clear();
        assert!(!request.upgrade || request.framing == Framing::Empty);
        for piece in self.answer.clone().chunks(self.pieces) {
            self.conn.from_upstream().tail().extend_from_slice(piece);
            match self.conn.advance() {
                Step::Wait => (),
                Step::Finished { .. } => {
                    self.has_upstream = false;
                    break;
                }
                other @ (Step::Route
                | Step::Retry
                | Step::ShutdownClient
                | Step::ShutdownUpstream
                | Step::Closed) => panic!("an answer leads to {other:?}"),
            }
            self.flush();
        }
        true
    }
}

/// Reads a complete request as an app would, strictly.
fn complete(bytes: &[u8]) -> Option<(Vec<u8>, Vec<u8>, Request)> {
    let parsed = request::parse(bytes, 256, &peer(), &mut Vec::new());
    let (request, length) = parsed.expect("what is sent on can be read")?;
    let mut body = Body::new(request.framing, Output::Raw, u64::MAX);
    let (head, rest) = bytes.split_at(length);
    let mut payload = Vec::new();
    let read = body.feed(rest, &mut payload, usize::MAX).expect("a well-formed body");
    if !body.is_done() {
        return None;
    }
    assert_eq!(read, rest.len(), "no byte follows a request on its upstream");
    Some((head.to_vec(), payload, request))
}
