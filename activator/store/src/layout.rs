//! The names of objects: records, and LTX files in both layouts of Litestream 0.5.

use dormouse_core::ids::{BoxName, Host, Txid};

/// How a store names a host's LTX files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `<prefix>/<host>/<level as %04x>/<name>`, as Litestream's `s3://` replicas.
    S3,
    /// `<prefix>/<host>/ltx/<level>/<name>`, as Litestream's `file://` replicas.
    Directory,
}

/// What an LTX file's key says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LtxKey {
    /// 0 is raw, 9 is snapshots.
    pub level: u8,
    /// First TXID of the file.
    pub min: Txid,
    /// Last TXID of the file.
    pub max: Txid,
}

/// The highest level that exists.
const LEVEL_MAX: u8 = 9;
const NAME_LEN: usize = 16 + 1 + 16 + 4; // hex, dash, hex, ".ltx"

impl LtxKey {
    /// The file of one upload.
    #[must_use]
    pub const fn l0(txid: Txid) -> Self {
        Self { level: 0, min: txid, max: txid }
    }

    /// The file's name: `{min:016x}-{max:016x}.ltx`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{:016x}-{:016x}.ltx", self.min.0, self.max.0)
    }

    /// Parses a file's name; anything but lower-case hex of the exact shape is foreign.
    #[must_use]
    pub fn parse_name(level: u8, name: &str) -> Option<Self> {
        if name.len() != NAME_LEN || !name.is_ascii() {
            return None;
        }
        let (min, rest) = name.split_at(16);
        let max = rest.strip_prefix('-')?.strip_suffix(".ltx")?;
        Some(Self { level, min: hex(min)?, max: hex(max)? })
    }
}

fn hex(text: &str) -> Option<Txid> {
    let lower = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if !lower {
        return None;
    }
    u64::from_str_radix(text, 16).ok().map(Txid)
}

impl Layout {
    /// The prefix below which all LTX files of a host lie, with its slash.
    #[must_use]
    pub fn ltx_prefix(self, prefix: &str, host: &Host) -> String {
        match self {
            Self::S3 => join(prefix, &format!("{host}/")),
            Self::Directory => join(prefix, &format!("{host}/ltx/")),
        }
    }

    /// The prefix of one level, with its slash.
    #[must_use]
    pub fn level_prefix(self, prefix: &str, host: &Host, level: u8) -> String {
        let root = self.ltx_prefix(prefix, host);
        match self {
            Self::S3 => format!("{root}{level:04x}/"),
            Self::Directory => format!("{root}{level}/"),
        }
    }

    /// The whole key of one LTX file.
    #[must_use]
    pub fn ltx_key(self, prefix: &str, host: &Host, file: &LtxKey) -> String {
        format!("{}{}", self.level_prefix(prefix, host, file.level), file.name())
    }

    /// Reads a key that a list gave; none for anything that is not an LTX file of this host.
    #[must_use]
    pub fn parse_ltx_key(self, prefix: &str, host: &Host, key: &str) -> Option<LtxKey> {
        let rest = key.strip_prefix(&self.ltx_prefix(prefix, host))?;
        let (level, name) = rest.split_once('/')?;
        let level = match self {
            Self::S3 if level.len() == 4 => u8::from_str_radix(level, 16).ok()?,
            Self::S3 => return None,
            Self::Directory => level.parse().ok()?,
        };
        if level > LEVEL_MAX {
            return None;
        }
        LtxKey::parse_name(level, name)
    }
}

/// `<prefix>/<host>/lock.json`.
#[must_use]
pub fn host_record_key(prefix: &str, host: &Host) -> String {
    join(prefix, &format!("{host}/lock.json"))
}

/// `<prefix>/sessions/<box>.json`.
#[must_use]
pub fn session_record_key(prefix: &str, name: &BoxName) -> String {
    join(prefix, &format!("sessions/{name}.json"))
}

/// `<prefix>/sessions/`.
#[must_use]
pub fn sessions_prefix(prefix: &str) -> String {
    join(prefix, "sessions/")
}

/// Whether a key is a record's: small, and waited for by a session or a wake.
pub(crate) fn is_record_key(key: &str) -> bool {
    key.ends_with("/lock.json") || key.contains("sessions/")
}

fn join(prefix: &str, rest: &str) -> String {
    if prefix.is_empty() { rest.to_owned() } else { format!("{prefix}/{rest}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        Host::from("a.example")
    }

    #[test]
    fn both_layouts_name_files_as_litestream_does() {
        let file = LtxKey { level: 9, min: Txid(1), max: Txid(255) };
        let name = "0000000000000001-00000000000000ff.ltx";
        assert_eq!(Layout::S3.ltx_key("p/q", &host(), &file), format!("p/q/a.example/0009/{name}"));
        assert_eq!(
            Layout::Directory.ltx_key("p", &host(), &file),
            format!("p/a.example/ltx/9/{name}")
        );
        assert_eq!(
            Layout::Directory.ltx_key("", &host(), &file),
            format!("a.example/ltx/9/{name}")
        );
    }

    #[test]
    fn a_key_is_read_back_in_both_layouts() {
        let file = LtxKey { level: 0, min: Txid(7), max: Txid(7) };
        for layout in [Layout::S3, Layout::Directory] {
            let key = layout.ltx_key("p", &host(), &file);
            assert_eq!(layout.parse_ltx_key("p", &host(), &key), Some(file));
        }
    }

    #[test]
    fn foreign_names_are_ignored() {
        for name in ["lock.json", "0000000000000001-000000000000000F.ltx", "1-2.ltx", "é"] {
            assert_eq!(LtxKey::parse_name(0, name), None, "{name}");
        }
        for key in ["p/a.example/ltx/10/0000000000000001-0000000000000001.ltx", "p/b/ltx/0/x"] {
            assert_eq!(Layout::Directory.parse_ltx_key("p", &host(), key), None, "{key}");
        }
    }
}
