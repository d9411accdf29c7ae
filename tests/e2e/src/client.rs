//! A plain HTTP/1.1 client: one request, one answer, connection closed.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Head, as it came.
    pub head: String,
    /// Body, out of its chunks.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// A field's value.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        let own = |line: &&str| {
            line.split_once(':').is_some_and(|(field, _)| field.eq_ignore_ascii_case(name))
        };
        self.head.lines().find(own)?.split_once(':').map(|(_, value)| value.trim())
    }
}

/// Longer than any deadline of the proxy.
const TIMEOUT: Duration = Duration::from_secs(150);

/// Sends a request over TCP.
pub fn request(
    address: SocketAddr,
    method: &str,
    host: &str,
    path: &str,
    json: Option<&str>,
) -> Result<Answer> {
    let stream = TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    exchange(stream, method, host, path, json)
}

/// Sends a GET over a unix socket.
pub fn over_unix(socket: &Path, path: &str) -> Result<Answer> {
    let stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    exchange(stream, "GET", "localhost", path, None)
}

fn exchange(
    mut stream: impl Read + Write,
    method: &str,
    host: &str,
    path: &str,
    json: Option<&str>,
) -> Result<Answer> {
    let body = json.unwrap_or_default();
    let fields = json.map(|body| {
        format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len())
    });
    let fields = fields.unwrap_or_default();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{fields}\r\n{body}"
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).with_context(|| format!("the answer of {host}{path}"))?;
    parse(&answer).with_context(|| format!("the answer of {host}{path}"))
}

fn parse(answer: &[u8]) -> Result<Answer> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").context("no whole head")?;
    let (head, rest) = answer.split_at(end);
    let head = String::from_utf8_lossy(head).into_owned();
    let rest = rest.get(4..).unwrap_or_default();
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no status")?;
    let mut answer = Answer { status, head, body: Vec::new() };
    let chunked = answer.field("transfer-encoding").is_some();
    let length = answer.field("content-length").and_then(|length| length.parse::<usize>().ok());
    answer.body = match (chunked, length) {
        (true, _) => unchunk(rest).context("damaged chunks")?,
        (false, Some(length)) => rest.get(..length).context("a short body")?.to_vec(),
        (false, None) => rest.to_vec(),
    };
    Ok(answer)
}

fn unchunk(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(rest.get(..end)?).ok()?, 16).ok()?;
        if size == 0 {
            return Some(body);
        }
        let start = end.checked_add(2)?;
        let stop = start.checked_add(size)?;
        body.extend_from_slice(rest.get(start..stop)?);
        rest = rest.get(stop.checked_add(2)?..)?;
    }
}
