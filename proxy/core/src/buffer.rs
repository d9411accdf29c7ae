//! Bytes that are appended at one end and consumed at the other.

/// A queue of bytes in one piece.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    lent: usize,
}

impl Buffer {
    /// What is not yet consumed.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }

    /// How many bytes are not yet consumed, those that are being written included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() - self.start + self.lent
    }

    /// Says how many bytes were taken out that are still being written.
    pub fn set_lent(&mut self, lent: usize) {
        self.lent = lent;
    }

    /// Whether everything is consumed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether [`Buffer::move_to`] would move to it without a copy.
    #[must_use]
    pub fn is_vacant(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Drops the first `count` bytes.
    pub fn consume(&mut self, count: usize) {
        self.start = self.bytes.len().min(self.start.saturating_add(count));
        if self.start == self.bytes.len() {
            self.clear();
        }
    }

    /// The bytes as a vector to append to (or to swap, while it is empty).
    pub fn tail(&mut self) -> &mut Vec<u8> {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        &mut self.bytes
    }

    /// Moves everything to the end of `other`; without a copy when that is empty.
    pub fn move_to(&mut self, other: &mut Self) {
        if other.bytes.is_empty() {
            std::mem::swap(&mut self.bytes, &mut other.bytes);
            std::mem::swap(&mut self.start, &mut other.start);
        } else {
            other.tail().extend_from_slice(self.data());
        }
        self.clear();
    }

    /// Gives memory beyond `most` bytes back, when nothing is in it.
    pub fn shrink(&mut self, most: usize) {
        if self.is_empty() && self.bytes.capacity() > most {
            self.bytes = Vec::new();
        }
    }

    /// Drops everything, keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.start = 0;
    }
}
