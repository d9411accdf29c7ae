//! What becomes of a field on its way through, by its name.

use crate::answer::Reject;

/// Whether two field names are the same.
pub(crate) fn is(name: &str, other: &str) -> bool {
    name.eq_ignore_ascii_case(other)
}

/// Fields that belong to one connection (RFC 9110 section 7.6.1), and those that frame a message:
/// never copied, always written anew.
pub(crate) fn is_hop(name: &str) -> bool {
    const HOP: [&str; 9] = [
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "transfer-encoding",
        "upgrade",
        "content-length",
    ];
    HOP.iter().any(|hop| is(name, hop))
}

/// Fields that say who the client is; from an untrusted peer they are replaced.
pub(crate) fn is_forwarding(name: &str) -> bool {
    const PREFIX: &str = "x-forwarded-";
    let prefixed = name.get(..PREFIX.len()).is_some_and(|start| is(start, PREFIX));
    prefixed || is(name, "forwarded") || is(name, "x-real-ip")
}

/// Fields that must not come in a trailer section: they frame, route, authenticate or describe the
/// message (RFC 9110 section 6.5.1).
pub(crate) fn is_barred_trailer(name: &str) -> bool {
    const BARRED: [&str; 14] = [
        "host",
        "trailer",
        "expect",
        "range",
        "max-forwards",
        "cache-control",
        "authorization",
        "cookie",
        "set-cookie",
        "content-encoding",
        "content-type",
        "content-range",
        "location",
        "x-dormouse-sidecar",
    ];
    let barred = BARRED.iter().any(|each| is(name, each));
    barred || is_hop(name) || is_forwarding(name) || name.contains('_')
}

/// Elements of a comma-separated list, trimmed, empty ones left out.
pub(crate) fn list(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii).filter(|each| !each.is_empty())
}

/// The values of all `Connection` fields.
pub(crate) struct ConnectionList<'h, 'b>(pub(crate) &'h [httparse::Header<'b>]);

impl ConnectionList<'_, '_> {
    /// Whether a name is listed: the field belongs to this connection only.
    pub(crate) fn names(&self, name: &str) -> bool {
        self.0.iter().filter(|field| is(field.name, "connection")).any(|field| {
            list(field.value).any(|listed| listed.eq_ignore_ascii_case(name.as_bytes()))
        })
    }
}

/// `Content-Length: 1*DIGIT`, one field with one value.
pub(crate) fn content_length(value: &[u8]) -> Option<u64> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    value
        .iter()
        .try_fold(0_u64, |sum, digit| sum.checked_mul(10)?.checked_add(u64::from(digit - b'0')))
}

/// How the fields frame a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framed {
    Unsaid,
    Length(u64),
    Chunked,
}

/// Reads `Content-Length` and `Transfer-Encoding`; any doubt is an error (RFC 9112 section 6.3).
pub(crate) fn framing(fields: &[httparse::Header<'_>]) -> Result<Framed, Reject> {
    let mut framed = Framed::Unsaid;
    for field in fields {
        let this = if is(field.name, "content-length") {
            let length = content_length(field.value);
            Framed::Length(length.ok_or(Reject::bad("content-length is not a number"))?)
        } else if is(field.name, "transfer-encoding") {
            if !field.value.eq_ignore_ascii_case(b"chunked") {
                return Err(Reject::bad("transfer-encoding is not chunked"));
            }
            Framed::Chunked
        } else {
            continue;
        };
        if framed != Framed::Unsaid {
            return Err(Reject::bad("the message has more than one length"));
        }
        framed = this;
    }
    Ok(framed)
}

/// Whether every line of a head ends with CR LF, and no CR stands elsewhere.
pub(crate) fn lines_are_strict(head: &[u8]) -> bool {
    memchr::memchr2_iter(b'\r', b'\n', head).all(|at| match head.get(at) {
        Some(b'\r') => head.get(at + 1) == Some(&b'\n'),
        Some(_) | None => at > 0 && head.get(at - 1) == Some(&b'\r'),
    })
}

/// Appends `name: value` and CR LF.
pub(crate) fn put(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}
