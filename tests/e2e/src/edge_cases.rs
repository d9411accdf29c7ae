//! The h1 cases: what a client sends, and how what became of it is judged.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::edge_backend::Seen;

/// After this long without a byte nothing more is expected; a proxy that must close has done so.
const QUIET: Duration = Duration::from_millis(1500);
const LATEST: Duration = Duration::from_secs(12);

/// One case.
#[derive(Clone, Debug)]
pub struct Case {
    /// Its name in the file.
    pub id: String,
    value: Value,
}

/// What the client saw.
#[derive(Debug)]
pub struct Outcome {
    token: String,
    bytes: Vec<u8>,
    closed: bool,
}

/// Reads the case file.
pub fn load(path: &Path) -> Result<Vec<Case>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let file: Value = serde_json::from_str(&text)?;
    let cases = file["cases"].as_array().context("a list of cases")?;
    Ok(cases
        .iter()
        .map(|value| Case {
            id: value["id"].as_str().unwrap_or_default().to_owned(),
            value: value.clone(),
        })
        .collect())
}

/// The strings of the file are latin-1, and name a token.
fn bytes_of(text: &str, token: &str) -> Vec<u8> {
    let text = text.replace("{ID}", token);
    text.chars().map(|c| u8::try_from(u32::from(c)).unwrap_or(b'?')).collect()
}

struct Client {
    stream: TcpStream,
    bytes: Vec<u8>,
    closed: bool,
}

impl Client {
    fn send(&mut self, bytes: &[u8]) {
        // The proxy may have closed already: what it said is judged.
        if self.stream.write_all(bytes).is_err() {
            self.closed = true;
        }
    }

    /// Reads until the end, `quiet` without a byte, or what is awaited.
    fn read(&mut self, quiet: Duration, until: Option<&[u8]>) -> Result<()> {
        let started = now();
        self.stream.set_read_timeout(Some(quiet))?;
        let mut buffer = vec![0; 65536];
        while started.elapsed() < LATEST {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.closed = true,
                Ok(count) => {
                    self.bytes.extend(buffer.iter().take(count));
                    if until.is_some_and(|text| contains(&self.bytes, text)) {
                        return Ok(());
                    }
                    continue;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => (),
                Err(_reset) => self.closed = true,
            }
            break;
        }
        Ok(())
    }
}

#[expect(clippy::disallowed_methods, reason = "a test's client bounds its own reading")]
fn now() -> Instant {
    Instant::now()
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    part.is_empty() || bytes.windows(part.len()).any(|window| window == part)
}

impl Case {
    /// Plays the client's part.
    pub fn play(&self, stream: TcpStream, tag: &str) -> Result<Outcome> {
        let token = format!("{tag}-{}", self.id);
        stream.set_write_timeout(Some(Duration::from_secs(3)))?;
        let mut client = Client { stream, bytes: Vec::new(), closed: false };
        let mut gone = false;
        if let Some(raw) = self.value["raw"].as_str() {
            client.send(&bytes_of(raw, &token));
        } else if let Some(parts) = self.value["parts"].as_array() {
            let mut all = Vec::new();
            for part in parts {
                match part.as_str() {
                    Some(text) => all.extend(bytes_of(text, &token)),
                    None => all.extend(repeated(&part["repeat"], &part["count"])),
                }
            }
            client.send(&all);
        }
        for step in self.value["steps"].as_array().into_iter().flatten() {
            gone |= play_step(&mut client, step, &token)?;
        }
        if !gone {
            let slow = self.value.to_string().contains("/slow");
            client.read(if slow { QUIET * 2 } else { QUIET }, None)?;
        }
        Ok(Outcome { token, bytes: client.bytes, closed: client.closed })
    }

    /// What is wrong with the outcome; empty when all is as expected.
    #[must_use]
    pub fn judge(&self, outcome: &Outcome, log: &[Seen]) -> Vec<String> {
        let expect = &self.value["expect"];
        let mut wrong = Vec::new();
        let all = statuses(&outcome.bytes);
        let finals: Vec<&String> =
            all.iter().filter(|status| !status.starts_with('1') || *status == "101").collect();
        let allowed: Vec<&str> = strings(&expect["status"]);
        let first = finals.first().copied().or(all.first());
        if !allowed.is_empty() && !first.is_some_and(|status| allowed.contains(&status.as_str())) {
            wrong.push(format!("status {first:?} is not in {allowed:?}"));
        }
        if expect["conn"] == "close" && !outcome.closed {
            wrong.push("kept open".to_owned());
        }
        let count = u64::try_from(finals.len()).unwrap_or(u64::MAX);
        let bound = |key: &str| expect[key].as_u64();
        if bound("max_final_responses").is_some_and(|most| count > most)
            || bound("min_final_responses").is_some_and(|least| count < least)
        {
            wrong.push(format!("{count} final responses"));
        }
        for text in strings(&expect["client_must_contain"]) {
            if !contains(&outcome.bytes, &bytes_of(text, "")) {
                wrong.push(format!("the client lacks {text:?}"));
            }
        }
        for text in strings(&expect["client_must_not_contain"]) {
            if contains(&outcome.bytes, &bytes_of(text, "")) {
                wrong.push(format!("the client got {text:?}"));
            }
        }
        judge_upstream(expect, &outcome.token, log, &mut wrong);
        wrong
    }
}

fn judge_upstream(expect: &Value, token: &str, log: &[Seen], wrong: &mut Vec<String>) {
    let mark = format!("id={token} ");
    let ours: Vec<&Seen> = log.iter().filter(|seen| seen.head.contains(&mark)).collect();
    let count = u64::try_from(ours.len()).unwrap_or(u64::MAX);
    if expect["upstream_requests"].as_u64().is_some_and(|expected| expected != count) {
        wrong.push(format!("{count} requests reached the app"));
    }
    let text: String = ours.iter().flat_map(|seen| [&*seen.head, &*seen.trailers]).collect();
    for part in strings(&expect["upstream_must_contain"]) {
        if !text.contains(part) {
            wrong.push(format!("the app lacks {part:?}"));
        }
    }
    for part in strings(&expect["upstream_must_not_contain"]) {
        if text.contains(part) {
            wrong.push(format!("the app got {part:?}"));
        }
    }
    if expect["upstream_body_complete"] == false && ours.iter().any(|seen| seen.body.is_some()) {
        wrong.push("the app saw a complete body".to_owned());
    }
}

/// Whether the client closed its connection.
fn play_step(client: &mut Client, step: &Value, token: &str) -> Result<bool> {
    let millis = |key: &str| step[key].as_u64().map(Duration::from_millis);
    if let Some(text) = step["send"].as_str() {
        client.send(&bytes_of(text, token));
    } else if step["send_repeat"].is_string() {
        client.send(&repeated(&step["send_repeat"], &step["count"]));
    } else if let Some(quiet) = millis("wait_ms") {
        client.read(quiet, None)?;
    } else if let Some(status) = step["await_status"].as_str() {
        let quiet = millis("timeout_ms").unwrap_or(QUIET);
        client.read(quiet, Some(format!(" {status} ").as_bytes()))?;
    } else if step["half_close"] == true {
        drop(client.stream.shutdown(Shutdown::Write));
    } else if step["close"] == true {
        drop(client.stream.shutdown(Shutdown::Both));
        return Ok(true);
    }
    Ok(false)
}

fn repeated(text: &Value, count: &Value) -> Vec<u8> {
    let count = usize::try_from(count.as_u64().unwrap_or(0)).unwrap_or(0);
    bytes_of(text.as_str().unwrap_or_default(), "").repeat(count)
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Status codes of everything that looks like a response's first line.
fn statuses(bytes: &[u8]) -> Vec<String> {
    let text: String = bytes.iter().copied().map(char::from).collect();
    let mut found = Vec::new();
    for (at, _) in text.match_indices("HTTP/1.") {
        let line = text.get(at..).unwrap_or_default();
        let version_ok = matches!(line.as_bytes().get(7..9), Some([b'0' | b'1', b' ']));
        let code = line.get(9..12).unwrap_or_default();
        let ends = matches!(line.as_bytes().get(12), Some(b' ' | b'\r'));
        if version_ok && ends && code.bytes().all(|byte| byte.is_ascii_digit()) {
            found.push(code.to_owned());
        }
    }
    found
}
