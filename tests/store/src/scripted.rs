//! An HTTP server that always gives the answer it was told; but a PUT in parts can be begun.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;

/// An answer: status, S3 code in the body (none: no body).
pub type Said = (u16, Option<&'static str>);

#[derive(Debug)]
struct State {
    answer: Said,
    requests: u64,
    /// First lines of those that were read.
    lines: Vec<String>,
    /// PUTs in parts that were begun.
    begun: u64,
    ended: bool,
}

/// The server. One request a connection.
#[derive(Debug)]
pub struct Scripted {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Scripted {
    /// Listens on a free port of the loopback.
    pub fn start(answer: Said) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let state = Arc::new(Mutex::new(State {
            answer,
            requests: 0,
            lines: Vec::new(),
            begun: 0,
            ended: false,
        }));
        let own = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut state = own.lock().unwrap_or_else(PoisonError::into_inner);
                if state.ended {
                    return;
                }
                state.requests += 1;
                drop(state);
                let state = Arc::clone(&own);
                thread::spawn(move || serve(stream, &state));
            }
        });
        Ok(Self { address, state })
    }

    /// Its URL.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What it says from now on.
    pub fn say(&self, answer: Said) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).answer = answer;
    }

    /// First lines of the requests until now, oldest first. The uploads in parts have the ids
    /// `upload-1`, `upload-2` …
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).lines.clone()
    }

    /// Requests until now.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).requests
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        // Lets the thread see it.
        drop(TcpStream::connect(self.address));
    }
}

/// Reads one request with its body, answers, closes.
fn serve(mut stream: TcpStream, state: &Mutex<State>) -> Option<()> {
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    let mut request = Vec::new();
    let mut room = [0; 4096];
    let head_len = loop {
        let len = stream.read(&mut room).ok().filter(|len| *len > 0)?;
        request.extend_from_slice(room.get(..len)?);
        if let Some(end) = request.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
    };
    let head = String::from_utf8_lossy(request.get(..head_len)?).to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    while request.len() < head_len + length {
        let len = stream.read(&mut room).ok().filter(|len| *len > 0)?;
        request.extend_from_slice(room.get(..len)?);
    }
    let (status, body) = answer(&head, state);
    write!(
        stream,
        "HTTP/1.1 {status} Told\r\nConnection: close\r\nContent-Type: application/xml\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .ok()
}

fn answer(head: &str, state: &Mutex<State>) -> (u16, String) {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    let line = head.lines().next().unwrap_or_default().to_owned();
    let begins = line.starts_with("post ") && line.contains("?uploads");
    state.lines.push(line);
    if begins {
        state.begun += 1;
        let body = format!(
            "<?xml version=\"1.0\"?><InitiateMultipartUploadResult>\
             <UploadId>upload-{}</UploadId></InitiateMultipartUploadResult>",
            state.begun
        );
        return (200, body);
    }
    let (status, code) = state.answer;
    let body = match code {
        Some(code) if !head.starts_with("head ") => format!(
            "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>so it was told</Message>\
             </Error>"
        ),
        Some(_) | None => String::new(),
    };
    (status, body)
}
