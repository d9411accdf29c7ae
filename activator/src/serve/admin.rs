//! The admin socket: HTTP for people and tools, readable and writable by our own user alone.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::{fs, io};

use axum::extract::{Path as Segment, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::commands::{Ask, Body, Command, Reply};
use super::driver::Input;

type Inputs = mpsc::UnboundedSender<Input>;

/// Starts to serve; a stale socket file is replaced (the state directory's lock is held).
pub(crate) fn start(socket: &Path, inputs: Inputs) -> io::Result<JoinHandle<()>> {
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let listener = UnixListener::bind(socket)?;
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600))?;
    let app = Router::new()
        .route("/status", get(|State(inputs)| ask(inputs, Ask::Status)))
        .route("/metrics", get(|State(inputs)| ask(inputs, Ask::Metrics)))
        .route("/cost", get(|State(inputs)| ask(inputs, Ask::Cost)))
        .route("/hosts/{host}", get(host).post(add).delete(remove))
        .route("/hosts/{host}/wake", post(wake))
        .route("/hosts/{host}/sleep", post(sleep))
        .route("/hosts/{host}/wait", get(wait))
        .route("/hosts/{host}/hibernate", post(hibernate))
        .route("/takeover/{name}", post(takeover))
        .route("/reload", post(|State(inputs)| ask(inputs, Ask::Reload)))
        .with_state(inputs);
    Ok(tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            tracing::error!(%error, "the admin socket failed");
        }
    }))
}

impl IntoResponse for Reply {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        match self.body {
            Body::Json(value) => (status, Json(value)).into_response(),
            Body::Text(text) => (status, text).into_response(),
        }
    }
}

async fn ask(inputs: Inputs, ask: Ask) -> Reply {
    let (reply, answer) = oneshot::channel();
    let gone = || Reply::failed("the activator is going");
    if inputs.send(Input::Command(Command { ask, reply })).is_err() {
        return gone();
    }
    answer.await.unwrap_or_else(|_| gone())
}

async fn host(State(inputs): State<Inputs>, Segment(host): Segment<String>) -> Reply {
    ask(inputs, Ask::Host(host)).await
}

#[derive(Deserialize)]
struct Add {
    app: String,
}

async fn add(
    State(inputs): State<Inputs>,
    Segment(host): Segment<String>,
    Json(add): Json<Add>,
) -> Reply {
    ask(inputs, Ask::Add { host, app: add.app }).await
}

async fn remove(State(inputs): State<Inputs>, Segment(host): Segment<String>) -> Reply {
    ask(inputs, Ask::Remove(host)).await
}

async fn wake(State(inputs): State<Inputs>, Segment(host): Segment<String>) -> Reply {
    ask(inputs, Ask::Wake(host)).await
}

#[derive(Deserialize)]
struct SleepHow {
    #[serde(default = "yes")]
    wait: bool,
}

const fn yes() -> bool {
    true
}

async fn sleep(
    State(inputs): State<Inputs>,
    Segment(host): Segment<String>,
    Query(SleepHow { wait }): Query<SleepHow>,
) -> Reply {
    ask(inputs, Ask::Sleep { host, wait }).await
}

#[derive(Deserialize)]
struct Hibernate {
    on: bool,
}

async fn hibernate(
    State(inputs): State<Inputs>,
    Segment(host): Segment<String>,
    Json(Hibernate { on }): Json<Hibernate>,
) -> Reply {
    ask(inputs, Ask::Hibernate { host, on }).await
}

#[derive(Deserialize)]
struct WaitFor {
    state: String,
}

async fn wait(
    State(inputs): State<Inputs>,
    Segment(host): Segment<String>,
    Query(wait): Query<WaitFor>,
) -> Reply {
    ask(inputs, Ask::Wait { host, state: wait.state }).await
}

async fn takeover(State(inputs): State<Inputs>, Segment(name): Segment<String>) -> Reply {
    ask(inputs, Ask::Takeover(name)).await
}
