//! Message bodies: decoded from one framing and written in another while they stream.

use std::io::Write;

use crate::answer::Reject;
use crate::chunked::{Chunked, Piece};

/// The body exceeds its limit.
pub const TOO_LONG: Reject = Reject { status: 413, why: "the body is too long" };

/// How a body's end is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// No body.
    Empty,
    /// Exactly this many bytes.
    Length(u64),
    /// Chunked coding.
    Chunked,
    /// Until the sender closes.
    UntilClose,
}

/// How a body is written on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// The payload alone.
    Raw,
    /// Chunked coding, trailers included.
    Chunked,
}

#[derive(Debug)]
enum Decoder {
    Done,
    Length(u64),
    Chunked(Chunked),
    UntilClose,
}

/// A body on its way.
#[derive(Debug)]
pub struct Body {
    decoder: Decoder,
    output: Output,
    payload: u64,
    limit: u64,
}

impl Body {
    /// A body of this framing; `limit` bounds its payload in bytes.
    #[must_use]
    pub fn new(framing: Framing, output: Output, limit: u64) -> Self {
        let decoder = match framing {
            Framing::Empty | Framing::Length(0) => Decoder::Done,
            Framing::Length(length) => Decoder::Length(length),
            Framing::Chunked => Decoder::Chunked(Chunked::new()),
            Framing::UntilClose => Decoder::UntilClose,
        };
        Self { decoder, output, payload: 0, limit }
    }

    /// Bounds the payload from now on; an error when it is exceeded already.
    pub fn limit(&mut self, bytes: u64) -> Result<(), Reject> {
        self.limit = self.limit.min(bytes);
        if self.payload > self.limit { Err(TOO_LONG) } else { Ok(()) }
    }

    /// Whether the end was read (and written).
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.decoder, Decoder::Done)
    }

    /// Payload bytes so far.
    #[must_use]
    pub fn payload(&self) -> u64 {
        self.payload
    }

    /// Reads from `input` and writes to `out` until the body ends, the input ends, or `out` has
    /// `room` bytes more. Gives the number of input bytes read.
    pub fn feed(&mut self, input: &[u8], out: &mut Vec<u8>, room: usize) -> Result<usize, Reject> {
        let stop = out.len().saturating_add(room);
        let mut read = 0;
        while let Some(rest) = input.get(read..).filter(|rest| !rest.is_empty()) {
            let space = stop.saturating_sub(out.len());
            if space == 0 {
                break;
            }
            let piece = match &mut self.decoder {
                Decoder::Done => break,
                Decoder::Length(left) => {
                    let most = usize::try_from(*left).unwrap_or(usize::MAX);
                    let here = most.min(rest.len()).min(space);
                    *left -= u64::try_from(here).unwrap_or(*left);
                    let ended = *left == 0;
                    self.put(rest, here, out)?;
                    read += here;
                    if ended {
                        self.finish(out);
                    }
                    continue;
                }
                Decoder::UntilClose => Piece::Data(rest.len().min(space)),
                Decoder::Chunked(chunked) => {
                    chunked.next(rest.get(..space.min(rest.len())).unwrap_or(rest))?
                }
            };
            match piece {
                Piece::Data(here) => {
                    self.put(rest, here, out)?;
                    read += here;
                }
                Piece::Framing(here) => {
                    read += here;
                    self.end_of_chunks(out)?;
                }
            }
        }
        Ok(read)
    }

    /// Counts `count` bytes of input that the caller moves on as they are. False, and nothing is
    /// counted, when they are to be read by [`Body::feed`]: not all payload, or written otherwise.
    #[must_use]
    pub fn pass(&mut self, count: usize) -> bool {
        let bytes = u64::try_from(count).unwrap_or(u64::MAX);
        let payload = self.payload.saturating_add(bytes);
        if self.output != Output::Raw || payload > self.limit {
            return false;
        }
        match &mut self.decoder {
            Decoder::Length(left) if bytes < *left => *left -= bytes,
            Decoder::Length(left) if bytes == *left => self.decoder = Decoder::Done,
            Decoder::UntilClose => (),
            Decoder::Length(_) | Decoder::Chunked(_) | Decoder::Done => return false,
        }
        self.payload = payload;
        true
    }

    /// The sender closed. Whether that completes the body.
    pub fn close(&mut self, out: &mut Vec<u8>) -> bool {
        match self.decoder {
            Decoder::Done => true,
            Decoder::UntilClose => {
                self.finish(out);
                true
            }
            Decoder::Length(_) | Decoder::Chunked(_) => false,
        }
    }

    fn put(&mut self, input: &[u8], count: usize, out: &mut Vec<u8>) -> Result<(), Reject> {
        let data = input.get(..count).unwrap_or(input);
        self.payload = self.payload.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
        if self.payload > self.limit {
            return Err(TOO_LONG);
        }
        match self.output {
            Output::Raw => out.extend_from_slice(data),
            Output::Chunked => {
                let written = write!(out, "{count:x}\r\n");
                debug_assert!(written.is_ok(), "writing to a vector cannot fail");
                out.extend_from_slice(data);
                out.extend_from_slice(b"\r\n");
            }
        }
        Ok(())
    }

    fn end_of_chunks(&mut self, out: &mut Vec<u8>) -> Result<(), Reject> {
        let Decoder::Chunked(chunked) = &self.decoder else { return Ok(()) };
        if !chunked.is_done() {
            return Ok(());
        }
        let before = out.len();
        if self.output == Output::Chunked {
            out.extend_from_slice(b"0\r\n");
        }
        chunked.write_trailer(out)?;
        match self.output {
            Output::Chunked => out.extend_from_slice(b"\r\n"),
            // Checked, but nowhere to put them.
            Output::Raw => out.truncate(before),
        }
        self.decoder = Decoder::Done;
        Ok(())
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if self.output == Output::Chunked {
            out.extend_from_slice(b"0\r\n\r\n");
        }
        self.decoder = Decoder::Done;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunked(input: &[u8]) -> Result<(usize, String, bool), Reject> {
        let mut body = Body::new(Framing::Chunked, Output::Chunked, u64::MAX);
        let mut out = Vec::new();
        let read = body.feed(input, &mut out, usize::MAX)?;
        Ok((read, String::from_utf8(out).unwrap(), body.is_done()))
    }

    #[test]
    fn bytes_are_passed_only_when_all_are_payload_that_is_written_raw() {
        let mut body = Body::new(Framing::Length(5), Output::Raw, u64::MAX);
        assert!(!body.pass(6), "one byte is not of this body");
        assert!(body.pass(3));
        assert!(!body.is_done());
        assert!(body.pass(2));
        assert_eq!((body.is_done(), body.payload()), (true, 5));
        assert!(!body.pass(1), "it has ended");
        assert!(!Body::new(Framing::Length(5), Output::Raw, 4).pass(5), "beyond the limit");
        assert!(!Body::new(Framing::UntilClose, Output::Chunked, u64::MAX).pass(1));
        assert!(!Body::new(Framing::Chunked, Output::Raw, u64::MAX).pass(1));
        assert!(Body::new(Framing::UntilClose, Output::Raw, u64::MAX).pass(1));
    }

    #[test]
    fn chunks_are_framed_anew_without_extensions() {
        let input = b"5;a=b;c=\"d\"\r\nhello\r\n0;x\r\nX-T: 1\r\nHost: b\r\nA_b: 2\r\n\r\nNEXT";
        let (read, out, done) = chunked(input).unwrap();
        assert_eq!(out, "5\r\nhello\r\n0\r\nX-T: 1\r\n\r\n");
        assert_eq!((read, done), (input.len() - 4, true));
    }

    #[test]
    fn what_is_not_exactly_chunked_is_rejected() {
        for input in [
            "2;\nxx\r\n0\r\n\r\n",
            "-1\r\nhello\r\n0\r\n\r\n",
            "\r\nhello\r\n0\r\n\r\n",
            "5 \r\nhello\r\n",
            "5\nhello\r\n",
            "5\r\nhelloXX0\r\n\r\n",
            "00000000000000005\r\nhello\r\n",
            "0\r\nbad trailer line\r\n\r\n",
            "0\r\nA: b\n\r\n\r\n",
        ] {
            assert!(chunked(input.as_bytes()).is_err(), "{input:?}");
        }
        let long = format!("5;{}\r\nhello", "a".repeat(5000));
        assert_eq!(chunked(long.as_bytes()).unwrap_err().status, 413);
        let trailer = format!("0\r\nA: {}", "a".repeat(9000));
        assert_eq!(chunked(trailer.as_bytes()).unwrap_err().status, 431);
    }

    #[test]
    fn a_body_ends_exactly_where_it_says() {
        let mut body = Body::new(Framing::Length(5), Output::Raw, 100);
        let mut out = Vec::new();
        assert_eq!(body.feed(b"helloGET", &mut out, usize::MAX), Ok(5));
        assert!(body.is_done());
        assert_eq!(out, b"hello");
    }

    #[test]
    fn a_truncated_body_is_not_completed() {
        let mut out = Vec::new();
        let mut body = Body::new(Framing::Length(5), Output::Chunked, 100);
        body.feed(b"hel", &mut out, usize::MAX).unwrap();
        assert!(!body.close(&mut out));
        let mut body = Body::new(Framing::UntilClose, Output::Chunked, 100);
        out.clear();
        body.feed(b"hel", &mut out, usize::MAX).unwrap();
        assert!(body.close(&mut out));
        assert_eq!(out, b"3\r\nhel\r\n0\r\n\r\n");
    }

    #[test]
    fn a_limit_counts_payload() {
        let mut body = Body::new(Framing::Chunked, Output::Raw, 4);
        let over = body.feed(b"5\r\nhello\r\n", &mut Vec::new(), usize::MAX);
        assert_eq!(over.unwrap_err().status, 413);
    }

    #[test]
    fn no_more_is_read_than_there_is_room_for() {
        let mut body = Body::new(Framing::Length(100), Output::Raw, 100);
        let mut out = Vec::new();
        assert_eq!(body.feed(&[7; 100], &mut out, 30), Ok(30));
        assert_eq!(out.len(), 30);
    }
}
