//! Bytes both ways after a switch of protocols, each direction with its own end.

use crate::conn::{HIGH_WATER, Step};
use crate::exchange::{ClientSide, UpstreamSide};

/// The relay.
#[derive(Debug, Default)]
pub(crate) struct Tunnel {
    pub(crate) upstream_closed: bool,
    told_client: bool,
    told_upstream: bool,
}

impl Tunnel {
    pub(crate) fn relay(&mut self, client: ClientSide<'_>, upstream: UpstreamSide<'_>) -> Step {
        let (from_client, to_client, client_closed) = client;
        let (from_upstream, to_upstream) = upstream;
        if to_upstream.len() < HIGH_WATER && !from_client.is_empty() {
            from_client.move_to(to_upstream);
        }
        if to_client.len() < HIGH_WATER && !from_upstream.is_empty() {
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
