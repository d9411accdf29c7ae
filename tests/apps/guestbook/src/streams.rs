//! Connections that stay: a WebSocket echo, and a clock of server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::extract::Query;
use axum::extract::ws::{WebSocket, WebSocketUpgrade};
use axum::response::Response;
use axum::response::sse::{Event, Sse};
use axum::routing::get;
use futures_util::Stream;
use serde::Deserialize;

use crate::Shared;

pub(crate) fn routes() -> Router<Shared> {
    Router::new().route("/ws", get(upgrade)).route("/clock", get(clock))
}

async fn upgrade(upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(echo)
}

async fn echo(mut socket: WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        if socket.send(message).await.is_err() {
            return;
        }
    }
}

#[derive(Deserialize)]
struct Clock {
    #[serde(default = "second")]
    every_ms: u64,
}

const fn second() -> u64 {
    1000
}

async fn clock(Query(clock): Query<Clock>) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let every = Duration::from_millis(clock.every_ms.max(1));
    let ticks = futures_util::stream::unfold(0_u64, move |tick| async move {
        tokio::time::sleep(every).await;
        Some((Ok(Event::default().data(tick.to_string())), tick + 1))
    });
    Sse::new(ticks)
}
