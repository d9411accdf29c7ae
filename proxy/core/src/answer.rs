//! What the proxy itself says: rejections of what a client sent, and refusals.

use std::io::Write;

/// A message that is not taken, and why. The text never holds foreign bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {why}")]
pub struct Reject {
    /// Status for the client.
    pub status: u16,
    /// What is wrong.
    pub why: &'static str,
}

impl Reject {
    /// 400.
    #[must_use]
    pub const fn bad(why: &'static str) -> Self {
        Self { status: 400, why }
    }
}

/// An answer of the proxy's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status.
    pub status: u16,
    /// Sentence for the body.
    pub why: &'static str,
    /// Word for the header `x-dormouse-reason`.
    pub reason: &'static str,
    /// Seconds for the header `Retry-After`.
    pub retry_after_s: Option<u32>,
}

impl Answer {
    /// An answer without `Retry-After`.
    #[must_use]
    pub const fn new(status: u16, reason: &'static str, why: &'static str) -> Self {
        Self { status, why, reason, retry_after_s: None }
    }

    /// 503 with `Retry-After`.
    #[must_use]
    pub const fn unavailable(reason: &'static str, why: &'static str, retry_after_s: u32) -> Self {
        Self { status: 503, why, reason, retry_after_s: Some(retry_after_s) }
    }

    /// The app closed or broke its connection without a valid answer.
    pub const BAD_GATEWAY: Self = Self::new(502, "bad-gateway", "the app gave no valid answer");
    /// The app did not begin its answer in time.
    pub const GATEWAY_TIMEOUT: Self =
        Self::new(504, "upstream-timeout", "the app did not answer in time");
    /// The client did not send its request in time.
    pub const REQUEST_TIMEOUT: Self =
        Self::new(408, "request-timeout", "the request did not arrive in time");
    /// No route for this host.
    pub const UNKNOWN_HOST: Self = Self::new(404, "unknown-host", "no such host here");

    /// Writes the answer; without a body for HEAD, with `Connection: close` when `close`.
    pub fn write(&self, out: &mut Vec<u8>, head_only: bool, close: bool) {
        let text = status_text(self.status);
        let length = self.why.len() + 1;
        // Writing to a vector cannot fail.
        let written = write!(
            out,
            "HTTP/1.1 {} {text}\r\nContent-Type: text/plain; charset=utf-8\r\n\
             Content-Length: {length}\r\nCache-Control: no-store\r\nx-dormouse-reason: {}\r\n",
            self.status, self.reason,
        );
        debug_assert!(written.is_ok());
        if let Some(seconds) = self.retry_after_s {
            let written = write!(out, "Retry-After: {seconds}\r\n");
            debug_assert!(written.is_ok());
        }
        if close {
            out.extend_from_slice(b"Connection: close\r\n");
        }
        out.extend_from_slice(b"\r\n");
        if !head_only {
            out.extend_from_slice(self.why.as_bytes());
            out.push(b'\n');
        }
    }
}

impl From<Reject> for Answer {
    fn from(reject: Reject) -> Self {
        Self::new(reject.status, "bad-request", reject.why)
    }
}

fn status_text(status: u16) -> &'static str {
    match status {
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "Error",
    }
}
