//! Where the frames of a WebSocket end, in one direction (RFC 6455 section 5.2). Looks at no payload.

/// A Close frame of a server: 1012, "service restart" (RFC 6455 section 7.4, IANA's registry).
pub(crate) const CLOSE_RESTART: &[u8] = b"\x88\x11\x03\xf4service restart";

/// The longest head: two bytes, a length of eight, a mask of four.
const HEAD_MAX: usize = 14;

/// How far the bytes so far have come.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    head: [u8; HEAD_MAX],
    /// Bytes of the head that are there; 0 between two frames.
    got: usize,
    /// Bytes of the payload that are to come.
    left: u64,
}

impl Frames {
    /// Nothing is begun: a frame of another's may come in between, also between the parts of a message.
    pub(crate) const fn at_boundary(&self) -> bool {
        self.got == 0 && self.left == 0
    }

    /// All of `data` has passed.
    pub(crate) fn pass(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let (_, rest) = data.split_at(self.step(data));
            data = rest;
        }
    }

    /// What of `data` belongs to the frame that is begun, and has passed; 0 at a boundary.
    pub(crate) fn pass_to_boundary(&mut self, data: &[u8]) -> usize {
        let mut passed = 0;
        while !self.at_boundary() && passed < data.len() {
            passed += self.step(data.get(passed..).unwrap_or_default());
        }
        passed
    }

    /// One byte of a head, or as much payload as is there.
    fn step(&mut self, data: &[u8]) -> usize {
        if self.left > 0 {
            let there = u64::try_from(data.len()).unwrap_or(u64::MAX).min(self.left);
            self.left -= there;
            return usize::try_from(there).unwrap_or(data.len());
        }
        if let (Some(place), Some(byte)) = (self.head.get_mut(self.got), data.first()) {
            *place = *byte;
        }
        self.got += 1;
        if let Some(length) = self.length() {
            self.got = 0;
            self.left = length;
        }
        1
    }

    /// The payload's length, once the head is complete.
    fn length(&self) -> Option<u64> {
        let [_, second, rest @ ..] = &self.head;
        let (extended, short) = match second & 0x7f {
            126 => (2, None),
            127 => (8, None),
            short => (0, Some(u64::from(short))),
        };
        let mask = if second & 0x80 == 0 { 0 } else { 4 };
        if self.got < 2 || self.got < 2 + extended + mask {
            return None;
        }
        let number = rest.iter().take(extended).fold(0, |sum, byte| (sum << 8) | u64::from(*byte));
        Some(short.unwrap_or(number))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(length: usize, masked: bool) -> Vec<u8> {
        let mask: u8 = if masked { 0x80 } else { 0 };
        let mut bytes = vec![0x82];
        match u16::try_from(length) {
            Ok(short) if short < 126 => bytes.push(mask + u8::try_from(short).unwrap()),
            Ok(long) => {
                bytes.push(mask + 126);
                bytes.extend(long.to_be_bytes());
            }
            Err(_) => {
                bytes.push(mask + 127);
                bytes.extend(u64::try_from(length).unwrap().to_be_bytes());
            }
        }
        bytes.extend(if masked { vec![7; 4] } else { Vec::new() });
        bytes.extend(vec![0x82; length]);
        bytes
    }

    proptest! {
        #[test]
        fn boundaries_are_found_however_the_bytes_are_cut(
            lengths in prop::collection::vec((0_usize..400, any::<bool>()), 1..6),
            long in any::<bool>(),
            cuts in prop::collection::vec(1_usize..50, 1..40),
        ) {
            let mut bytes: Vec<u8> =
                lengths.iter().flat_map(|(length, masked)| frame(*length, *masked)).collect();
            if long {
                bytes.extend(frame(70_000, true));
            }
            let mut ends = std::collections::BTreeSet::from([0]);
            let mut end = 0;
            for (length, masked) in &lengths {
                end += frame(*length, *masked).len();
                ends.insert(end);
            }
            ends.insert(bytes.len());
            let mut frames = Frames::default();
            let mut at = 0;
            for cut in cuts.iter().cycle() {
                prop_assert_eq!(frames.at_boundary(), ends.contains(&at), "at {}", at);
                if at == bytes.len() {
                    break;
                }
                let next = bytes.len().min(at + cut);
                frames.pass(&bytes[at..next]);
                at = next;
            }
        }
    }

    #[test]
    fn a_frame_that_is_begun_is_passed_to_its_end_and_no_further() {
        let bytes = [frame(5, false), frame(3, false)].concat();
        let mut frames = Frames::default();
        assert_eq!(frames.pass_to_boundary(&bytes), 0, "nothing is begun");
        frames.pass(&bytes[..4]);
        assert_eq!(frames.pass_to_boundary(&bytes[4..]), 3);
        assert!(frames.at_boundary());
        frames.pass(&bytes[7..8]);
        assert_eq!(frames.pass_to_boundary(&bytes[8..9]), 1);
        assert!(!frames.at_boundary(), "its end has not come");
    }
}
