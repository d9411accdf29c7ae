//! A request's head: read strictly, and written anew for the app (RFC 9112 section 3).

use std::io::Write;
use std::mem::MaybeUninit;

use httparse::{Header, Status};

use crate::answer::Reject;
use crate::body::Framing;
use crate::fields::{self, ConnectionList, Framed, is};
use crate::host::Authority;
pub use crate::host::Host;

/// The most fields any setting may allow: their parsed form lies on the stack, 32 bytes each.
pub const FIELDS_MAX: usize = 256;

/// Who sent the request.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its address, without the port; `unknown` on a unix socket.
    pub address: String,
    /// Whether its forwarded fields are kept.
    pub trusted: bool,
    /// Scheme it used: `http` or `https`.
    pub scheme: &'static str,
}

/// What decides the method's fate; other names pass unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// HEAD: the answer has no body.
    Head,
    /// Safe to send twice (RFC 9110 section 9.2.2).
    Idempotent,
    /// Anything else.
    Other,
}

/// A request, read.
#[expect(clippy::struct_excessive_bools, reason = "independent facts of one head")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Whom it is for.
    pub host: Host,
    /// What its method means here.
    pub method: Method,
    /// HTTP/1.1 or later 1.x; else 1.0, which knows no chunks and no 1xx.
    pub is_11: bool,
    /// How its body is framed.
    pub framing: Framing,
    /// The client wants the connection closed afterwards.
    pub close: bool,
    /// It asks for another protocol.
    pub upgrade: bool,
    /// To WebSocket and nothing else.
    pub websocket: bool,
    /// It waits for 100 before its body.
    pub expect: bool,
    /// It says that it comes from a sidecar.
    pub sidecar: bool,
}

/// Reads the head at the front of `buffer`. `None`: more is needed. Otherwise the request and the
/// head's length; the head for the app is in `out`.
pub fn parse(
    buffer: &[u8],
    fields_max: usize,
    peer: &Peer,
    out: &mut Vec<u8>,
) -> Result<Option<(Request, usize)>, Reject> {
    if buffer == b"\r" {
        return Ok(None);
    }
    // At most one empty line may stand before a request (RFC 9112 section 2.2).
    let skipped = if buffer.starts_with(b"\r\n") { 2 } else { 0 };
    let input = buffer.get(skipped..).unwrap_or_default();
    if matches!(input.first(), Some(b'\r' | b'\n')) {
        return Err(Reject::bad("more than one empty line before a request"));
    }
    let mut space = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let allowed = space.get_mut(..fields_max.min(FIELDS_MAX)).unwrap_or_default();
    let mut parsed = httparse::Request::new(&mut []);
    let length = match parsed.parse_with_uninit_headers(input, allowed) {
        Ok(Status::Complete(length)) => length,
        Ok(Status::Partial) => return Ok(None),
        // What stands in the version's place is known only when the line has ended.
        Err(httparse::Error::Version) if !input.contains(&b'\n') => return Ok(None),
        Err(error) => return Err(reject_of(error, input)),
    };
    let head = input.get(..length).unwrap_or(input);
    if !fields::lines_are_strict(head) {
        return Err(Reject::bad("a line of the head does not end with CR LF"));
    }
    let (Some(method), Some(target), Some(minor)) = (parsed.method, parsed.path, parsed.version)
    else {
        return Err(Reject::bad("not an HTTP request"));
    };
    let line = Line { method, target, is_11: minor >= 1 };
    let request = read(&line, parsed.headers, peer, out)?;
    Ok(Some((request, skipped + length)))
}

fn reject_of(error: httparse::Error, input: &[u8]) -> Reject {
    match error {
        httparse::Error::HeaderName => Reject::bad("a field has a bad name"),
        httparse::Error::HeaderValue => Reject::bad("a field has a bad value"),
        httparse::Error::NewLine => Reject::bad("a line of the head does not end with CR LF"),
        httparse::Error::TooManyHeaders => Reject { status: 431, why: "too many fields" },
        httparse::Error::Version if has_three_parts(input) => {
            Reject { status: 505, why: "not HTTP/1.0 or HTTP/1.1" }
        }
        httparse::Error::Token | httparse::Error::Status | httparse::Error::Version => {
            Reject::bad("a bad request line")
        }
    }
}

/// Whether the first line is a method, a target and something else: only then is that a version.
fn has_three_parts(input: &[u8]) -> bool {
    let line = input.split(|&byte| byte == b'\r' || byte == b'\n').next().unwrap_or_default();
    memchr::memchr_iter(b' ', line).count() == 2
}

struct Line<'b> {
    method: &'b str,
    target: &'b str,
    is_11: bool,
}

fn read(
    line: &Line<'_>,
    all: &[Header<'_>],
    peer: &Peer,
    out: &mut Vec<u8>,
) -> Result<Request, Reject> {
    let named = host_field(all)?;
    let (authority, path) = target(line, named)?;
    let framing = match fields::framing(all)? {
        Framed::Unsaid => Framing::Empty,
        Framed::Length(length) => Framing::Length(length),
        Framed::Chunked if line.is_11 => Framing::Chunked,
        Framed::Chunked => return Err(Reject::bad("chunked in an HTTP/1.0 request")),
    };
    let connection = ConnectionList(all);
    let has = |name: &str| all.iter().any(|field| is(field.name, name));
    let has_body = !matches!(framing, Framing::Empty | Framing::Length(0));
    // A request with a body, or to HTTP/2, is sent on as an ordinary one: the app may not switch.
    let upgrade = line.is_11
        && !has_body
        && has("upgrade")
        && connection.names("upgrade")
        && !all.iter().any(|field| is(field.name, "upgrade") && names_h2(field.value));
    let mut offers = all.iter().filter(|field| is(field.name, "upgrade"));
    let websocket = upgrade && offers.all(|field| field.value.eq_ignore_ascii_case(b"websocket"));
    let request = Request {
        method: method(line.method),
        is_11: line.is_11,
        framing,
        close: !line.is_11 || connection.names("close"),
        upgrade,
        websocket,
        expect: line.is_11 && expects_continue(all)?,
        sidecar: has("x-dormouse-sidecar"),
        host: authority.host,
    };
    out.clear();
    out.extend_from_slice(line.method.as_bytes());
    out.push(b' ');
    out.extend_from_slice(path.as_bytes());
    out.extend_from_slice(b" HTTP/1.1\r\n");
    write_head(&request, authority.port, all, peer, out);
    Ok(request)
}

fn host_field<'b>(all: &[Header<'b>]) -> Result<&'b [u8], Reject> {
    let mut hosts = all.iter().filter(|field| is(field.name, "host"));
    match (hosts.next(), hosts.next()) {
        (Some(field), None) => Ok(field.value),
        (None, _) => Err(Reject::bad("no Host field")),
        (Some(_), Some(_)) => Err(Reject::bad("more than one Host field")),
    }
}

/// Whom the target names, and its path for the app. An absolute target wins over `Host`.
fn target<'b>(line: &Line<'b>, named: &[u8]) -> Result<(Authority, &'b str), Reject> {
    const BAD_HOST: Reject = Reject::bad("the Host field is not a host");
    if line.method == "CONNECT" {
        return Err(Reject { status: 405, why: "this proxy makes no tunnels" });
    }
    if !line.target.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Reject::bad("the target has bytes outside ASCII"));
    }
    let host = Authority::parse(named).map_err(|_| BAD_HOST)?;
    if line.target.starts_with('/') || (line.target == "*" && line.method == "OPTIONS") {
        return Ok((host, line.target));
    }
    let scheme_end = line.target.find("://").ok_or(Reject::bad("the target is no path"))?;
    let (scheme, rest) = line.target.split_at(scheme_end);
    if !is(scheme, "http") && !is(scheme, "https") {
        return Err(Reject::bad("the target has another scheme"));
    }
    let rest = rest.get(3..).unwrap_or_default();
    let (authority, path) = match rest.find(['/', '?']) {
        Some(at) => rest.split_at(at),
        None => (rest, "/"),
    };
    if path.starts_with('?') {
        return Err(Reject::bad("the target has no path"));
    }
    let authority = Authority::parse(authority.as_bytes())
        .map_err(|_| Reject::bad("the target names no host"))?;
    Ok((authority, path))
}

fn method(name: &str) -> Method {
    match name {
        "HEAD" => Method::Head,
        "GET" | "OPTIONS" | "TRACE" | "PUT" | "DELETE" => Method::Idempotent,
        _ => Method::Other,
    }
}

fn names_h2(value: &[u8]) -> bool {
    fields::list(value).any(|each| each.len() >= 2 && each[..2].eq_ignore_ascii_case(b"h2"))
}

fn expects_continue(all: &[Header<'_>]) -> Result<bool, Reject> {
    let mut expects = false;
    for field in all.iter().filter(|field| is(field.name, "expect")) {
        if !field.value.eq_ignore_ascii_case(b"100-continue") {
            return Err(Reject { status: 417, why: "an unknown expectation" });
        }
        expects = true;
    }
    Ok(expects)
}

fn write_head(
    request: &Request,
    port: Option<u16>,
    all: &[Header<'_>],
    peer: &Peer,
    out: &mut Vec<u8>,
) {
    let connection = ConnectionList(all);
    let host_at = out.len() + "host: ".len();
    out.extend_from_slice(b"host: ");
    out.extend_from_slice(request.host.as_str().as_bytes());
    if let Some(port) = port {
        let written = write!(out, ":{port}");
        debug_assert!(written.is_ok(), "writing to a vector cannot fail");
    }
    let host_end = out.len();
    out.extend_from_slice(b"\r\n");
    for field in all {
        let dropped = is(field.name, "host")
            || is(field.name, "expect")
            || is(field.name, "x-dormouse-sidecar")
            || field.name.contains('_')
            || fields::is_hop(field.name)
            || fields::is_forwarding(field.name)
            || connection.names(field.name);
        if !dropped {
            fields::put(out, field.name, field.value);
        }
    }
    write_forwarding(all, peer, (host_at, host_end), out);
    match request.framing {
        Framing::Empty | Framing::UntilClose => (),
        Framing::Length(length) => {
            let written = write!(out, "content-length: {length}\r\n");
            debug_assert!(written.is_ok(), "writing to a vector cannot fail");
        }
        Framing::Chunked => out.extend_from_slice(b"transfer-encoding: chunked\r\n"),
    }
    if request.expect {
        out.extend_from_slice(b"expect: 100-continue\r\n");
    }
    if request.upgrade {
        for field in all.iter().filter(|field| is(field.name, "upgrade")) {
            fields::put(out, "upgrade", field.value);
        }
        out.extend_from_slice(b"connection: upgrade\r\n");
    }
    out.extend_from_slice(b"\r\n");
}

/// Ours replace the client's, unless the peer is trusted: then its own are kept or added to.
fn write_forwarding(
    all: &[Header<'_>],
    peer: &Peer,
    (host_at, host_end): (usize, usize),
    out: &mut Vec<u8>,
) {
    let one = |name| kept(all, peer, name).next();
    out.extend_from_slice(b"x-forwarded-for: ");
    for value in kept(all, peer, "x-forwarded-for") {
        out.extend_from_slice(value);
        out.extend_from_slice(b", ");
    }
    out.extend_from_slice(peer.address.as_bytes());
    out.extend_from_slice(b"\r\n");
    fields::put(
        out,
        "x-forwarded-proto",
        one("x-forwarded-proto").unwrap_or(peer.scheme.as_bytes()),
    );
    out.extend_from_slice(b"x-forwarded-host: ");
    match one("x-forwarded-host") {
        Some(value) => out.extend_from_slice(value),
        None => out.extend_from_within(host_at..host_end),
    }
    out.extend_from_slice(b"\r\n");
    fields::put(out, "x-real-ip", one("x-real-ip").unwrap_or(peer.address.as_bytes()));
    for value in kept(all, peer, "forwarded") {
        fields::put(out, "forwarded", value);
    }
}

/// Values of a forwarded field that a trusted peer sent.
fn kept<'h, 'b>(
    all: &'h [Header<'b>],
    peer: &'h Peer,
    name: &'static str,
) -> impl Iterator<Item = &'b [u8]> + use<'h, 'b> {
    let connection = ConnectionList(all);
    let trusted = peer.trusted;
    all.iter()
        .filter(move |field| trusted && is(field.name, name) && !connection.names(name))
        .map(|field| field.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(trusted: bool) -> Peer {
        Peer { address: "9.9.9.9".into(), trusted, scheme: "http" }
    }

    fn parse_from(head: &str, peer: &Peer) -> Result<(Request, String), Reject> {
        let mut out = Vec::new();
        let (request, length) = parse(head.as_bytes(), 100, peer, &mut out)?.expect("complete");
        assert_eq!(length, head.len());
        Ok((request, String::from_utf8(out).unwrap()))
    }

    #[test]
    fn hop_by_hop_and_spoofed_fields_do_not_pass() {
        let (_, head) = parse_from(
            "GET /g HTTP/1.1\r\nHost: A.test\r\nConnection: X-Secret, X-Forwarded-For\r\n\
             X-Secret: 1\r\nX-Forwarded-For: 6.6.6.6\r\nX_Forwarded_For: 6.6.6.6\r\n\
             Forwarded: for=6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\nTE: trailers\r\nKept: y\r\n\r\n",
            &peer(false),
        )
        .unwrap();
        assert_eq!(
            head,
            "GET /g HTTP/1.1\r\nhost: a.test\r\nKept: y\r\nx-forwarded-for: 9.9.9.9\r\n\
             x-forwarded-proto: http\r\nx-forwarded-host: a.test\r\nx-real-ip: 9.9.9.9\r\n\r\n"
        );
    }

    #[test]
    fn a_trusted_peer_is_believed() {
        let (_, head) = parse_from(
            "GET / HTTP/1.1\r\nHost: a.test\r\nX-Forwarded-For: 1.1.1.1\r\n\
             X-Forwarded-For: 2.2.2.2\r\nX-Forwarded-Proto: https\r\n\r\n",
            &peer(true),
        )
        .unwrap();
        assert!(head.contains("x-forwarded-for: 1.1.1.1, 2.2.2.2, 9.9.9.9\r\n"), "{head}");
        assert!(head.contains("x-forwarded-proto: https\r\n"), "{head}");
    }

    #[test]
    fn an_absolute_target_names_the_host() {
        let (request, head) =
            parse_from("GET http://a.test:81/g HTTP/1.1\r\nHost: b.test\r\n\r\n", &peer(false))
                .unwrap();
        assert_eq!(request.host.as_str(), "a.test");
        assert!(head.starts_with("GET /g HTTP/1.1\r\nhost: a.test:81\r\n"), "{head}");
        assert!(!head.contains("b.test"));
    }

    #[test]
    fn only_a_bodyless_request_may_upgrade() {
        let upgrade = "Host: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n";
        let parse_one = |text: String| parse_from(&text, &peer(false)).unwrap();
        let (request, head) = parse_one(format!("GET / HTTP/1.1\r\n{upgrade}\r\n"));
        assert!(request.upgrade && head.contains("upgrade: websocket\r\nconnection: upgrade\r\n"));
        let with_body = parse_one(format!("GET / HTTP/1.1\r\n{upgrade}Content-Length: 5\r\n\r\n"));
        assert!(!with_body.0.upgrade && !with_body.1.contains("websocket"));
        let h2c = "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n";
        assert!(!parse_one(h2c.to_owned()).0.upgrade);
    }

    #[test]
    fn a_head_in_pieces_is_awaited() {
        let head = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
        for cut in 0..head.len() {
            let mut out = Vec::new();
            assert_eq!(parse(&head[..cut], 100, &peer(false), &mut out), Ok(None), "{cut}");
        }
    }

    #[test]
    fn rejections_have_their_status() {
        let many = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: y\r\n".repeat(100));
        for (head, status) in [
            ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
            ("GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            ("CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", 405),
            ("PUT / HTTP/1.1\r\nHost: a\r\nExpect: more\r\n\r\n", 417),
            ("GET / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            ("GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            ("GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            ("\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            (&many, 431),
        ] {
            assert_eq!(parse_from(head, &peer(false)).unwrap_err().status, status, "{head}");
        }
    }
}
