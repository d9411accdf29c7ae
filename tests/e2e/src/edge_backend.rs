//! The scripted app of the h1 cases: logs every request it parsed, and answers by path.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::edge::PATIENCE;

/// One request, as the app saw it.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Connection and its request number.
    pub at: (u64, u64),
    /// The head, byte for byte as latin-1.
    pub head: String,
    /// Length of the body, once it was complete.
    pub body: Option<usize>,
    /// Trailer lines.
    pub trailers: String,
}

#[derive(Debug, Default)]
struct Log {
    seen: Mutex<Vec<Seen>>,
    open: Mutex<usize>,
    closed: Condvar,
}

/// The app; serves until the process ends.
#[derive(Clone, Debug, Default)]
pub struct Backend(Arc<Log>);

impl Backend {
    /// Serves on a unix socket; several sockets share the log.
    pub fn serve(&self, path: &Path) -> io::Result<()> {
        static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
        let listener = UnixListener::bind(path)?;
        let log = self.0.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let log = log.clone();
                *log.open.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                std::thread::spawn(move || {
                    let connection = CONNECTIONS.fetch_add(1, Ordering::Relaxed);
                    // A broken or truncated request ends the connection, as in any app.
                    drop(converse(stream, connection, &log));
                    *log.open.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
                    log.closed.notify_all();
                });
            }
        });
        Ok(())
    }

    /// Waits until no connection is open, then gives what was seen.
    #[must_use]
    pub fn log(&self) -> Vec<Seen> {
        let open = self.0.open.lock().unwrap_or_else(PoisonError::into_inner);
        let all = self.0.closed.wait_timeout_while(open, PATIENCE, |open| *open > 0);
        drop(all);
        self.0.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Log {
    fn push(&self, seen: Seen) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
    }

    fn complete(&self, at: (u64, u64), body: usize, trailers: String) {
        let mut all = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(seen) = all.iter_mut().find(|seen| seen.at == at) {
            seen.body = Some(body);
            seen.trailers = trailers;
        }
    }
}

struct Head {
    method: String,
    path: String,
    text: String,
}

impl Head {
    fn read(from: &mut impl BufRead) -> io::Result<Option<Self>> {
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"\r\n\r\n") {
            if from.read_until(b'\n', &mut bytes)? == 0 {
                return Ok(None);
            }
        }
        let text: String = bytes.iter().copied().map(char::from).collect();
        let line = text.lines().next().unwrap_or_default().to_owned();
        let mut parts = line.split(' ');
        let method = parts.next().unwrap_or_default().to_owned();
        let target = parts.next().unwrap_or_default();
        let path = target.split('?').next().unwrap_or_default().to_owned();
        Ok(Some(Self { method, path, text }))
    }

    fn fields(&self, name: &str) -> impl Iterator<Item = String> {
        self.text.lines().skip(1).filter_map(move |line| {
            let (field, value) = line.split_once(':')?;
            let same = field.trim().eq_ignore_ascii_case(name);
            same.then(|| value.trim().to_ascii_lowercase())
        })
    }

    fn has(&self, name: &str) -> bool {
        self.fields(name).next().is_some()
    }
}

fn converse(stream: UnixStream, connection: u64, log: &Log) -> io::Result<()> {
    let mut out = stream.try_clone()?;
    let mut from = BufReader::new(stream);
    let mut number = 0;
    while let Some(head) = Head::read(&mut from)? {
        number += 1;
        let at = (connection, number);
        log.push(Seen { at, head: head.text.clone(), ..Seen::default() });
        if !before_body(&head, &mut from, &mut out)? {
            return Ok(());
        }
        let (body, trailers) = read_body(&head, &mut from)?;
        log.complete(at, body, trailers);
        if !answer(&head, body, &mut from, &mut out)? {
            return Ok(());
        }
        if head.fields("connection").any(|value| value.contains("close")) {
            return Ok(());
        }
    }
    Ok(())
}

/// What is said before the body is read. Whether the connection goes on.
fn before_body(
    head: &Head,
    from: &mut BufReader<UnixStream>,
    out: &mut UnixStream,
) -> io::Result<bool> {
    if head.path == "/early" {
        out.write_all(
            b"HTTP/1.1 413 Payload Too Large\r\nContent-Length: 5\r\nConnection: close\r\n\r\nearly",
        )?;
        // The body goes on arriving for a moment before this app closes.
        from.get_ref().set_read_timeout(Some(Duration::from_millis(200)))?;
        let mut some = [0; 4096];
        drop(from.read(&mut some));
        return Ok(false);
    }
    if head.path.starts_with("/earlykeep") {
        out.write_all(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 5\r\n\r\nearly")?;
    }
    if head.has("expect") && head.path.starts_with("/continue") {
        out.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    if head.has("expect") && head.path.starts_with("/refuse") {
        out.write_all(
            b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        )?;
        return Ok(false);
    }
    Ok(true)
}

fn read_body(head: &Head, from: &mut BufReader<UnixStream>) -> io::Result<(usize, String)> {
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    if head.fields("transfer-encoding").last().is_some_and(|value| value.contains("chunked")) {
        let (mut body, mut trailers) = (0, String::new());
        loop {
            let mut line = String::new();
            from.read_line(&mut line)?;
            let size = line.split(';').next().unwrap_or_default().trim();
            let size = usize::from_str_radix(size, 16).map_err(|_| bad())?;
            if size == 0 {
                break;
            }
            let mut chunk = vec![0; size + 2];
            from.read_exact(&mut chunk)?;
            body += size;
        }
        loop {
            let mut line = String::new();
            if from.read_line(&mut line)? == 0 {
                return Err(bad());
            }
            if line == "\r\n" {
                return Ok((body, trailers));
            }
            trailers.push_str(&line);
        }
    }
    match head.fields("content-length").next() {
        None => Ok((0, String::new())),
        Some(length) => {
            let mut body = vec![0; length.parse().map_err(|_| bad())?];
            from.read_exact(&mut body)?;
            Ok((body.len(), String::new()))
        }
    }
}

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Answers by path. Whether the connection goes on.
fn answer(
    head: &Head,
    body: usize,
    from: &mut BufReader<UnixStream>,
    out: &mut UnixStream,
) -> io::Result<bool> {
    let fixed = |text: &str, goes_on| Some((text.to_owned(), goes_on));
    let said = match head.path.as_str() {
        "/headbody" => fixed("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL", false),
        "/204body" => fixed("HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\nEVIL", true),
        "/304body" => fixed("HTTP/1.1 304 Not Modified\r\nContent-Length: 4\r\n\r\nEVIL", true),
        "/103" => {
            out.write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </s.css>; rel=preload\r\n\r\n")?;
            fixed(OK, true)
        }
        "/many1xx" => Some(("HTTP/1.1 102 Processing\r\n\r\n".repeat(200) + OK, true)),
        "/trailers" => fixed(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n\
             2\r\nok\r\n0\r\nX-T: 1\r\n\r\n",
            true,
        ),
        "/clte" => fixed(
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n\
             2\r\nok\r\n0\r\n\r\n",
            true,
        ),
        "/twocl" => {
            fixed("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 4\r\n\r\nokEV", false)
        }
        "/badhdr" => fixed("HTTP/1.1 200 OK\r\nX-A: a\0b\r\nContent-Length: 2\r\n\r\nok", false),
        "/extra" => Some((format!("{OK}HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nPOISON"), true)),
        "/short" => fixed("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nok", false),
        "/shortchunk" => {
            fixed("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok", false)
        }
        "/eof" => fixed("HTTP/1.1 200 OK\r\n\r\nuntil-eof", false),
        "/fake101" => fixed(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
            true,
        ),
        "/noresp" => fixed("", false),
        "/upg" if head.has("upgrade") => {
            echo(from, out)?;
            return Ok(false);
        }
        "/slow" => {
            // Slow for the proxy's eyes: the client's next request must not overtake.
            from.get_ref().set_read_timeout(Some(Duration::from_millis(500)))?;
            let early = from.fill_buf().map(<[u8]>::len);
            from.get_ref().set_read_timeout(None)?;
            match early {
                Ok(0) => return Ok(false),
                Ok(_) => panic!("nothing may come before this is answered"),
                Err(_in_time) => (),
            }
            None
        }
        _ => None,
    };
    if let Some((text, goes_on)) = said {
        out.write_all(text.as_bytes())?;
        return Ok(goes_on);
    }
    let text = format!("{{\"body_len\": {body}}}");
    if head.method == "HEAD" {
        write!(out, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", text.len())?;
    } else if !head.path.starts_with("/earlykeep") {
        write!(
            out,
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{text}",
            text.len()
        )?;
    }
    Ok(true)
}

fn echo(from: &mut BufReader<UnixStream>, out: &mut UnixStream) -> io::Result<()> {
    out.write_all(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\nHELLO",
    )?;
    io::copy(from, out).map(drop)
}
