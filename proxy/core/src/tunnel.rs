//! Bytes both ways after a switch of protocols, each direction with its own end.

use crate::buffer::Buffer;
use crate::conn::{HIGH_WATER, Step};
use crate::exchange::{ClientSide, UpstreamSide};
use crate::frames::{CLOSE_RESTART, Frames};

/// The relay.
#[expect(clippy::struct_excessive_bools, reason = "independent facts of two directions")]
#[derive(Debug, Default)]
pub(crate) struct Tunnel {
    pub(crate) upstream_closed: bool,
    told_client: bool,
    told_upstream: bool,
    /// Of a WebSocket: what its app sends.
    frames: Option<Frames>,
    leaving: bool,
}

impl Tunnel {
    pub(crate) fn new(websocket: bool) -> Self {
        Self { frames: websocket.then(Frames::default), ..Self::default() }
    }

    /// A WebSocket is to end where a frame does; anything else goes on.
    pub(crate) const fn leave(&mut self) {
        self.leaving = true;
    }

    /// Passes the frame that is begun; true when its end has come, and the client was told to come
    /// again.
    pub(crate) fn has_left(&mut self, from_upstream: &mut Buffer, to_client: &mut Buffer) -> bool {
        let Some(frames) = self.frames.as_mut().filter(|_| self.leaving) else { return false };
        if self.upstream_closed || self.told_client {
            return false;
        }
        let passed = frames.pass_to_boundary(from_upstream.data());
        to_client.tail().extend_from_slice(&from_upstream.data()[..passed]);
        from_upstream.consume(passed);
        if frames.at_boundary() {
            to_client.tail().extend_from_slice(CLOSE_RESTART);
        }
        frames.at_boundary()
    }

    pub(crate) fn relay(&mut self, client: ClientSide<'_>, upstream: UpstreamSide<'_>) -> Step {
        let (from_client, to_client, client_closed) = client;
        let (from_upstream, to_upstream) = upstream;
        if to_upstream.len() < HIGH_WATER && !from_client.is_empty() {
            from_client.move_to(to_upstream);
        }
        if to_client.len() < HIGH_WATER && !from_upstream.is_empty() {
            if let Some(frames) = &mut self.frames {
                frames.pass(from_upstream.data());
            }
            from_upstream.move_to(to_client);
        }
        let client_done = client_closed && from_client.is_empty() && to_upstream.is_empty();
        let upstream_done =
            self.upstream_closed && from_upstream.is_empty() && to_client.is_empty();
        if client_done && !self.told_upstream {
            self.told_upstream = true;
            return Step::ShutdownUpstream;
        }
        if upstream_done && !self.told_client {
            self.told_client = true;
            return Step::ShutdownClient;
        }
        if client_done && upstream_done {
            return Step::Finished { reuse: false };
        }
        Step::Wait
    }
}
