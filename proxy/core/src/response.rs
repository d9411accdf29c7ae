//! A response's head: read as strictly as a request's, and written anew for the client.

use std::io::Write;
use std::mem::MaybeUninit;

use httparse::{Header, Status};

use crate::answer::Reject;
use crate::body::{Framing, Output};
use crate::fields::{self, ConnectionList, Framed, is};
use crate::request::{FIELDS_MAX, Method, Request};

/// Bytes of a response head: apps send large cookies and policies.
pub const HEAD_BYTES_MAX: usize = 64 * 1024;

/// A response, read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Response {
    /// 1xx other than 101; the final answer follows.
    Interim {
        /// Its status.
        status: u16,
    },
    /// 101, to a request that asked for it.
    Switching,
    /// The final answer.
    Final {
        /// How the app frames its body.
        framing: Framing,
        /// How the client gets it.
        output: Output,
        /// The app's connection serves further requests afterwards.
        keep: bool,
        /// The client's connection must close: this answer has no other end.
        close: bool,
    },
}

/// Reads the head at the front of `buffer` as the answer to `request`. `None`: more is needed.
/// Otherwise the response and the head's length; what the client gets is appended to `out`, with
/// `Connection: close` when `close` says so.
pub fn parse(
    buffer: &[u8],
    request: &Request,
    close: bool,
    out: &mut Vec<u8>,
) -> Result<Option<(Response, usize)>, Reject> {
    const BAD: Reject = Reject { status: 502, why: "the app's answer has a malformed head" };
    let mut space = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let length = match config.parse_response_with_uninit_headers(&mut parsed, buffer, &mut space) {
        Ok(Status::Complete(length)) => length,
        Ok(Status::Partial) if buffer.len() < HEAD_BYTES_MAX => return Ok(None),
        Ok(Status::Partial) | Err(_) => return Err(BAD),
    };
    let head = buffer.get(..length).unwrap_or(buffer);
    // httparse skips empty lines; an app that sends them is out of step.
    if !fields::lines_are_strict(head) || !head.starts_with(b"HTTP/1.") {
        return Err(BAD);
    }
    let (Some(minor), Some(status)) = (parsed.version, parsed.code) else { return Err(BAD) };
    let line = Line { status, reason: parsed.reason.unwrap_or_default(), is_11: minor >= 1 };
    let response = read(&line, parsed.headers, request, close, out)?;
    Ok(Some((response, length)))
}

struct Line<'b> {
    status: u16,
    reason: &'b str,
    is_11: bool,
}

fn read(
    line: &Line<'_>,
    all: &[Header<'_>],
    request: &Request,
    close: bool,
    out: &mut Vec<u8>,
) -> Result<Response, Reject> {
    match line.status {
        101 if request.upgrade => {
            write_line(line, out);
            write_fields(all, out);
            for field in all.iter().filter(|field| is(field.name, "upgrade")) {
                fields::put(out, "upgrade", field.value);
            }
            out.extend_from_slice(b"connection: upgrade\r\n\r\n");
            return Ok(Response::Switching);
        }
        101 => return Err(Reject { status: 502, why: "the app switches protocols unasked" }),
        100 if !request.expect || !request.is_11 => return Ok(Response::Interim { status: 100 }),
        status @ 100..200 => {
            if request.is_11 {
                write_line(line, out);
                write_fields(all, out);
                out.extend_from_slice(b"\r\n");
            }
            return Ok(Response::Interim { status });
        }
        200..600 => (),
        _ => return Err(Reject { status: 502, why: "the app's status is out of range" }),
    }
    let bad = |_| Reject { status: 502, why: "the app's answer has more than one length" };
    let framed = fields::framing(all).map_err(bad)?;
    let bodiless = request.method == Method::Head || matches!(line.status, 204 | 304);
    let framing = match framed {
        _ if bodiless => Framing::Empty,
        Framed::Length(length) => Framing::Length(length),
        Framed::Chunked => Framing::Chunked,
        Framed::Unsaid => Framing::UntilClose,
    };
    let unsized_body = matches!(framing, Framing::Chunked | Framing::UntilClose);
    let output = if unsized_body && request.is_11 { Output::Chunked } else { Output::Raw };
    let close = close || (unsized_body && !request.is_11);
    let keep = line.is_11
        && framing != Framing::UntilClose
        && !ConnectionList(all).names("close")
        && !(framed == Framed::Chunked && bodiless && request.method != Method::Head);
    write_line(line, out);
    write_fields(all, out);
    match (framed, output) {
        (Framed::Length(length), _) if line.status != 204 => {
            let written = write!(out, "content-length: {length}\r\n");
            debug_assert!(written.is_ok(), "writing to a vector cannot fail");
        }
        (_, Output::Chunked) => out.extend_from_slice(b"transfer-encoding: chunked\r\n"),
        (Framed::Length(_) | Framed::Chunked | Framed::Unsaid, Output::Raw) => (),
    }
    if close {
        out.extend_from_slice(b"connection: close\r\n");
    }
    out.extend_from_slice(b"\r\n");
    Ok(Response::Final { framing, output, keep, close })
}

fn write_line(line: &Line<'_>, out: &mut Vec<u8>) {
    let written = write!(out, "HTTP/1.1 {} {}\r\n", line.status, line.reason);
    debug_assert!(written.is_ok(), "writing to a vector cannot fail");
}

fn write_fields(all: &[Header<'_>], out: &mut Vec<u8>) {
    let connection = ConnectionList(all);
    for field in all {
        if !fields::is_hop(field.name) && !connection.names(field.name) {
            fields::put(out, field.name, field.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Host;

    fn request() -> Request {
        Request {
            host: Host::parse(b"a.test").unwrap(),
            method: Method::Idempotent,
            is_11: true,
            framing: Framing::Empty,
            close: false,
            upgrade: false,
            websocket: false,
            expect: false,
            sidecar: false,
        }
    }

    fn answer(head: &str, request: &Request) -> Result<(Response, String), Reject> {
        let mut out = Vec::new();
        let (response, _) = parse(head.as_bytes(), request, false, &mut out)?.expect("complete");
        Ok((response, String::from_utf8(out).unwrap()))
    }

    #[test]
    fn doubtful_answers_become_502() {
        for head in [
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 4\r\n\r\n",
            "HTTP/1.1 200 OK\r\nX-A: a\0b\r\n\r\n",
            "HTTP/1.1 200 OK\nX-A: b\n\n",
            "HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            "HTTP/1.1 999 What\r\n\r\n",
            "\r\nHTTP/1.1 200 OK\r\n\r\n",
            "SSH-2.0-x\r\n\r\n",
        ] {
            assert_eq!(answer(head, &request()).unwrap_err().status, 502, "{head:?}");
        }
    }

    #[test]
    fn an_old_client_gets_neither_chunks_nor_interim_answers() {
        let old = Request { is_11: false, close: true, ..request() };
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let (response, out) = answer(head, &old).unwrap();
        assert_eq!(out, "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n");
        let raw = Response::Final {
            framing: Framing::Chunked,
            output: Output::Raw,
            keep: true,
            close: true,
        };
        assert_eq!(response, raw);
        let (_, out) = answer("HTTP/1.1 103 Early\r\nLink: x\r\n\r\n", &old).unwrap();
        assert_eq!(out, "");
    }

    #[test]
    fn a_head_answer_keeps_its_length_but_has_no_body() {
        let head = Request { method: Method::Head, ..request() };
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n";
        let (response, out) = answer(text, &head).unwrap();
        assert!(matches!(response, Response::Final { framing: Framing::Empty, keep: true, .. }));
        assert!(out.contains("content-length: 4\r\n"));
    }

    #[test]
    fn fields_of_the_apps_connection_stay_there() {
        let text = "HTTP/1.1 200 OK\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\n\
                    X-Kept: 1\r\nContent-Length: 0\r\n\r\n";
        let (response, out) = answer(text, &request()).unwrap();
        assert_eq!(out, "HTTP/1.1 200 OK\r\nX-Kept: 1\r\ncontent-length: 0\r\n\r\n");
        assert!(matches!(response, Response::Final { keep: false, close: false, .. }));
    }
}
