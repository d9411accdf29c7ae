//! Chunked coding (RFC 9112 section 7.1), strict, byte for byte resumable.

use crate::answer::Reject;
use crate::fields;

/// Bytes of extensions in one body: nobody uses them; a flood of them is an attack.
const EXTENSION_BYTES_MAX: usize = 4096;
/// Digits of a chunk's size: 16 hold any u64.
const SIZE_DIGITS_MAX: u8 = 16;
/// Bytes of a trailer section.
const TRAILER_BYTES_MAX: usize = 8192;
const TRAILER_FIELDS_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Size { digits: u8 },
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    Trailer,
    Done,
}

/// The decoder; `left` is the size of the current chunk, or what is missing of it.
#[derive(Debug)]
pub(crate) struct Chunked {
    state: State,
    left: u64,
    extensions: usize,
    trailer: Vec<u8>,
}

/// What one call of [`Chunked::next`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// This many bytes of payload stand at the front of the input.
    Data(usize),
    /// This many bytes of framing were read.
    Framing(usize),
}

impl Chunked {
    pub(crate) fn new() -> Self {
        Self { state: State::Size { digits: 0 }, left: 0, extensions: 0, trailer: Vec::new() }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Reads one piece from a non-empty input.
    pub(crate) fn next(&mut self, input: &[u8]) -> Result<Piece, Reject> {
        if self.state == State::Data {
            let here = usize::try_from(self.left).unwrap_or(usize::MAX).min(input.len());
            self.left -= u64::try_from(here).unwrap_or(self.left);
            if self.left == 0 {
                self.state = State::DataCr;
            }
            return Ok(Piece::Data(here));
        }
        let mut read = 0;
        for &byte in input {
            if matches!(self.state, State::Data | State::Done) {
                break;
            }
            self.state = self.step(byte)?;
            read += 1;
        }
        Ok(Piece::Framing(read))
    }

    fn step(&mut self, byte: u8) -> Result<State, Reject> {
        const BAD_SIZE: Reject = Reject::bad("a chunk's size is not a hexadecimal number");
        match (self.state, byte) {
            (State::Size { digits: 1.. } | State::Extension, b'\r') => Ok(State::SizeLf),
            (State::Size { digits: 1.. }, b';') => Ok(State::Extension),
            (State::Size { digits }, _) if digits < SIZE_DIGITS_MAX => {
                let digit = char::from(byte).to_digit(16).ok_or(BAD_SIZE)?;
                self.left = (self.left << 4) | u64::from(digit);
                Ok(State::Size { digits: digits + 1 })
            }
            (State::Size { .. }, _) => Err(BAD_SIZE),
            (State::Extension, b'\t' | 0x20..=0x7e | 0x80..) => {
                self.extensions += 1;
                if self.extensions > EXTENSION_BYTES_MAX {
                    return Err(Reject { status: 413, why: "chunk extensions are too long" });
                }
                Ok(State::Extension)
            }
            (State::Extension, _) => Err(Reject::bad("a control byte in a chunk extension")),
            (State::SizeLf, b'\n') if self.left == 0 => Ok(State::Trailer),
            (State::SizeLf, b'\n') => Ok(State::Data),
            (State::DataCr, b'\r') => Ok(State::DataLf),
            (State::DataLf, b'\n') => Ok(State::Size { digits: 0 }),
            (State::SizeLf | State::DataCr | State::DataLf, _) => {
                Err(Reject::bad("a chunk does not end with CR LF"))
            }
            (State::Trailer, _) => self.trailer_byte(byte),
            // `next` never steps in these.
            (State::Data | State::Done, _) => Ok(self.state),
        }
    }

    fn trailer_byte(&mut self, byte: u8) -> Result<State, Reject> {
        if self.trailer.len() >= TRAILER_BYTES_MAX {
            return Err(Reject { status: 431, why: "the trailer section is too long" });
        }
        self.trailer.push(byte);
        let ends = self.trailer == b"\r\n" || self.trailer.ends_with(b"\r\n\r\n");
        Ok(if ends { State::Done } else { State::Trailer })
    }

    /// Writes the fields of the trailer section that may travel; checks the section first.
    pub(crate) fn write_trailer(&self, out: &mut Vec<u8>) -> Result<(), Reject> {
        const BAD: Reject = Reject::bad("the trailer section is not made of fields");
        if self.trailer == b"\r\n" {
            return Ok(());
        }
        if !fields::lines_are_strict(&self.trailer) {
            return Err(BAD);
        }
        let mut space = [httparse::EMPTY_HEADER; TRAILER_FIELDS_MAX];
        match httparse::parse_headers(&self.trailer, &mut space) {
            Ok(httparse::Status::Complete((end, parsed))) if end == self.trailer.len() => {
                for field in parsed.iter().filter(|each| !fields::is_barred_trailer(each.name)) {
                    fields::put(out, field.name, field.value);
                }
                Ok(())
            }
            Ok(httparse::Status::Complete(_) | httparse::Status::Partial) | Err(_) => Err(BAD),
        }
    }
}
