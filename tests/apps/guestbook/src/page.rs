//! The page, the JSON API, and the ways to misbehave.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Form, Query, State};
use axum::http::StatusCode;
use axum::response::{Html, IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;

use crate::Shared;
use crate::book::{Book, Entry};

pub(crate) fn routes() -> Router<Shared> {
    Router::new()
        .route("/", get(page))
        .route("/entries", post(sign))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/api/entries", get(list).post(add))
        .route("/api/count", get(count))
        .route("/api/reach", get(reach))
        .route("/api/next-due", get(next_due).post(set_due))
        .route("/slow", get(slow))
        .route("/crash", get(crash))
        .route("/echo", post(|body: Bytes| async move { body }))
        .route("/big", get(big))
}

#[derive(Deserialize)]
struct NewEntry {
    name: String,
    text: String,
}

/// Why a request failed, for the one who asked.
struct Problem(rusqlite::Error);

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, format!("database: {}\n", self.0)).into_response()
    }
}

fn with<T>(book: &Shared, work: impl FnOnce(&Book) -> rusqlite::Result<T>) -> Result<T, Problem> {
    let book = book.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    work(&book).map_err(Problem)
}

async fn page(State(book): State<Shared>) -> Result<Html<String>, Problem> {
    let (entries, count) = with(&book, |book| Ok((book.newest(50)?, book.count()?)))?;
    let row = |e: &Entry| format!("<li><b>{}</b><p>{}</p></li>", escape(&e.name), escape(&e.text));
    let rows = entries.iter().map(row).collect::<Vec<_>>().join("\n");
    Ok(Html(format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>Guestbook</title>\n\
         <style>body{{font:1.1em/1.5 system-ui,sans-serif;max-width:36em;margin:2em auto;\
         padding:0 1em}}input,textarea,button{{font:inherit;width:100%;box-sizing:border-box;\
         margin:.2em 0 .8em;padding:.4em}}ul{{list-style:none;padding:0}}\
         li{{border-top:1px solid #ccc;padding:.6em 0}}p{{margin:.2em 0}}</style>\n\
         <h1>Guestbook</h1>\n<form method=\"post\" action=\"/entries\">\n\
         <label>Name <input name=\"name\" required maxlength=\"80\"></label>\n\
         <label>Text <textarea name=\"text\" required maxlength=\"2000\"></textarea></label>\n\
         <button>Sign</button>\n</form>\n<p>{count} entries</p>\n<ul>\n{rows}</ul>\n"
    )))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

async fn sign(
    State(book): State<Shared>,
    Form(entry): Form<NewEntry>,
) -> Result<Redirect, Problem> {
    with(&book, |book| book.add(&entry.name, &entry.text))?;
    Ok(Redirect::to("/"))
}

async fn list(State(book): State<Shared>) -> Result<Json<Vec<Entry>>, Problem> {
    with(&book, |book| book.newest(1000)).map(Json)
}

async fn add(
    State(book): State<Shared>,
    Json(entry): Json<NewEntry>,
) -> Result<(StatusCode, Json<Entry>), Problem> {
    let entry = with(&book, |book| book.add(&entry.name, &entry.text))?;
    Ok((StatusCode::CREATED, Json(entry)))
}

async fn count(State(book): State<Shared>) -> Result<String, Problem> {
    Ok(format!("{}\n", with(&book, Book::count)?))
}

async fn next_due(State(book): State<Shared>) -> Result<Json<serde_json::Value>, Problem> {
    let due = with(&book, Book::next_due)?;
    Ok(Json(serde_json::json!({ "due": due.unwrap_or(0) })))
}

#[derive(Deserialize)]
struct DueAt {
    at: Option<i64>,
}

async fn set_due(
    State(book): State<Shared>,
    Query(due): Query<DueAt>,
) -> Result<StatusCode, Problem> {
    with(&book, |book| book.set_due(due.at))?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
struct Reach {
    path: std::path::PathBuf,
    #[serde(default)]
    write: bool,
}

/// What this process may do with a file, as a curious app would try.
async fn reach(Query(reach): Query<Reach>) -> String {
    let tried = if reach.write {
        std::fs::OpenOptions::new().append(true).create(true).open(&reach.path).map(drop)
    } else {
        std::fs::File::open(&reach.path).map(drop)
    };
    tried.map_or_else(|error| format!("{:?}", error.kind()), |()| "Reached".to_owned())
}

#[derive(Deserialize)]
struct Slow {
    #[serde(default)]
    ms: u64,
}

async fn slow(Query(slow): Query<Slow>) -> &'static str {
    tokio::time::sleep(Duration::from_millis(slow.ms)).await;
    "slept\n"
}

async fn crash() -> &'static str {
    std::process::abort()
}

#[derive(Deserialize)]
struct Big {
    bytes: usize,
}

async fn big(Query(big): Query<Big>) -> Vec<u8> {
    vec![b'x'; big.bytes.min(256 * 1024 * 1024)]
}
