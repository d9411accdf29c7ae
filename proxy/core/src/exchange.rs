//! One request and its answer between a client and an upstream.

use crate::answer::{Answer, Reject};
use crate::body::Body;
use crate::buffer::Buffer;
use crate::conn::{HIGH_WATER, Timer};
use crate::request::{Method, Request};
use crate::response::{self, Response};

/// A client's side: what it sent, what it gets, whether it sends nothing more.
pub(crate) type ClientSide<'a> = (&'a mut Buffer, &'a mut Buffer, bool);
/// An upstream's side: what it sent, what it gets.
pub(crate) type UpstreamSide<'a> = (&'a mut Buffer, &'a mut Buffer);

#[derive(Debug)]
enum Stage {
    /// No final answer yet; `interim` when a 1xx was passed on.
    Awaiting { interim: bool },
    /// The final answer's body.
    Answering { body: Body, keep: bool, close: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Open,
    Closed,
    Broken,
}

/// What became of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Wait,
    /// The app switched protocols.
    Tunnel,
    /// Complete.
    Finished {
        reuse: bool,
        close: bool,
    },
    /// To be answered by the proxy: nothing of an answer was passed on.
    Failed {
        answer: Answer,
        close: bool,
    },
    /// Nothing can be said any more: cut.
    Cut,
    /// May be sent again.
    Again,
}

/// The exchange.
#[derive(Debug)]
pub(crate) struct Exchange {
    request: Request,
    body: Body,
    stage: Stage,
    upstream: Ending,
    /// The upstream takes nothing more.
    pub(crate) upstream_deaf: bool,
    first_try: bool,
    /// Bytes of the body were sent that [`Conn`](crate::Conn) does not keep.
    unrepeatable: bool,
}

impl Exchange {
    pub(crate) fn new(request: Request, body: Body, first_try: bool) -> Self {
        Self {
            request,
            body,
            stage: Stage::Awaiting { interim: false },
            upstream: Ending::Open,
            upstream_deaf: false,
            first_try,
            unrepeatable: false,
        }
    }

    pub(crate) fn request(&self) -> &Request {
        &self.request
    }

    pub(crate) fn into_held(self) -> (Request, Body) {
        (self.request, self.body)
    }

    pub(crate) fn upstream_closed(&mut self, clean: bool) {
        self.upstream = if clean { Ending::Closed } else { Ending::Broken };
    }

    /// Whether anything was passed to the client.
    pub(crate) fn has_begun(&self) -> bool {
        match self.stage {
            Stage::Awaiting { interim } => interim,
            Stage::Answering { .. } => true,
        }
    }

    pub(crate) fn must_close(&self) -> bool {
        self.request.close || !self.body.is_done()
    }

    pub(crate) fn wants_upstream(&self) -> bool {
        self.upstream == Ending::Open
    }

    pub(crate) fn is_streaming(&self) -> bool {
        !self.body.is_done() || matches!(self.stage, Stage::Answering { .. })
    }

    pub(crate) fn timer(&self, sending: bool) -> Timer {
        match self.stage {
            Stage::Awaiting { .. } if sending || !self.body.is_done() => Timer::Progress,
            Stage::Awaiting { .. } => Timer::Upstream,
            // A stream of events may be silent for as long as its client stays.
            Stage::Answering { .. } => Timer::Off,
        }
    }

    pub(crate) fn advance(
        &mut self,
        client: ClientSide<'_>,
        upstream: UpstreamSide<'_>,
        draining: bool,
    ) -> Progress {
        let (from_client, to_client, client_closed) = client;
        let (from_upstream, to_upstream) = upstream;
        if let Err(reject) = self.send_body(from_client, client_closed, to_upstream) {
            return if self.has_begun() {
                Progress::Cut
            } else {
                Progress::Failed { answer: reject.into(), close: true }
            };
        }
        let close = self.must_close() || draining || (client_closed && from_client.is_empty());
        let progress = self.await_answer(from_upstream, to_client, close);
        if progress != Progress::Wait {
            return progress;
        }
        self.answer(from_upstream, to_client, to_upstream)
    }

    fn send_body(
        &mut self,
        from_client: &mut Buffer,
        client_closed: bool,
        to_upstream: &mut Buffer,
    ) -> Result<(), Reject> {
        if self.body.is_done() || self.upstream_deaf {
            return Ok(());
        }
        if !from_client.is_empty() {
            let room = HIGH_WATER.saturating_sub(to_upstream.len());
            let read = self.body.feed(from_client.data(), to_upstream.tail(), room)?;
            from_client.consume(read);
            self.unrepeatable |= read > 0;
        }
        if client_closed && from_client.is_empty() && !self.body.is_done() {
            return Err(Reject::bad("the body is cut short"));
        }
        Ok(())
    }

    fn await_answer(&mut self, from: &mut Buffer, to: &mut Buffer, close: bool) -> Progress {
        while let Stage::Awaiting { interim } = self.stage {
            if to.len() >= HIGH_WATER {
                return Progress::Wait;
            }
            let before = to.len();
            match response::parse(from.data(), &self.request, close, to.tail()) {
                Ok(None) if self.upstream == Ending::Open => return Progress::Wait,
                Ok(None) => return self.unanswered(from.is_empty()),
                Err(_) if interim => return Progress::Cut,
                Err(reject) => {
                    let answer = Answer { why: reject.why, ..Answer::BAD_GATEWAY };
                    // What follows was meant for an app that is out of step: it ends here.
                    return Progress::Failed { answer, close: true };
                }
                Ok(Some((response, length))) => {
                    from.consume(length);
                    match response {
                        Response::Interim { .. } => {
                            let interim = interim || to.len() > before;
                            self.stage = Stage::Awaiting { interim };
                        }
                        Response::Switching => return Progress::Tunnel,
                        Response::Final { framing, output, keep, close } => {
                            let body = Body::new(framing, output, u64::MAX);
                            self.stage = Stage::Answering { body, keep, close };
                        }
                    }
                }
            }
        }
        Progress::Wait
    }

    /// The upstream ended without an answer.
    fn unanswered(&self, said_nothing: bool) -> Progress {
        let idempotent = match self.request.method {
            Method::Head | Method::Idempotent => true,
            Method::Other => false,
        };
        if self.has_begun() {
            Progress::Cut
        } else if said_nothing && self.first_try && idempotent && !self.unrepeatable {
            Progress::Again
        } else {
            Progress::Failed { answer: Answer::BAD_GATEWAY, close: self.must_close() }
        }
    }

    fn answer(&mut self, from: &mut Buffer, to: &mut Buffer, unsent: &Buffer) -> Progress {
        let Stage::Answering { body, keep, close } = &mut self.stage else {
            return Progress::Wait;
        };
        if !from.is_empty() {
            let room = HIGH_WATER.saturating_sub(to.len());
            if from.len() <= room && to.is_vacant() && body.pass(from.len()) {
                from.move_to(to);
            } else {
                match body.feed(from.data(), to.tail(), room) {
                    Ok(read) => from.consume(read),
                    Err(_) => return Progress::Cut,
                }
            }
        }
        if !body.is_done() && from.is_empty() {
            match self.upstream {
                Ending::Open => (),
                Ending::Closed if body.close(to.tail()) => (),
                Ending::Closed | Ending::Broken => return Progress::Cut,
            }
        }
        if !body.is_done() {
            return Progress::Wait;
        }
        let reuse = *keep
            && self.body.is_done()
            && self.upstream == Ending::Open
            && !self.upstream_deaf
            && unsent.is_empty()
            && from.is_empty();
        Progress::Finished { reuse, close: *close }
    }
}
