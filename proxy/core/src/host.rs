//! Canonical host names (RFC 3986 section 3.2.2, RFC 9110 section 4.2.3).

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// Longest name in bytes (RFC 1035), without its root dot.
pub const HOST_BYTES_MAX: usize = 253;
const LABEL_BYTES_MAX: usize = 63;

/// A host name in canonical form: lower case, no root dot, no port; an IPv6 literal in brackets in
/// its shortest form.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Host(String);

/// Why bytes are no host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a host name (letters, digits, - _ and . or an IPv6 literal, then an optional port)")]
pub struct BadHost;

/// A host with the port that came with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    /// The name.
    pub host: Host,
    /// The port, when one was written.
    pub port: Option<u16>,
}

impl Host {
    /// Reads a name without a port.
    pub fn parse(bytes: &[u8]) -> Result<Self, BadHost> {
        if bytes.first() == Some(&b'[') {
            let inside = bytes.strip_prefix(b"[").and_then(|rest| rest.strip_suffix(b"]"));
            let text = std::str::from_utf8(inside.ok_or(BadHost)?).map_err(|_| BadHost)?;
            let address = Ipv6Addr::from_str(text).map_err(|_| BadHost)?;
            return Ok(Self(format!("[{address}]")));
        }
        let name = bytes.strip_suffix(b".").unwrap_or(bytes);
        if name.is_empty() || name.len() > HOST_BYTES_MAX {
            return Err(BadHost);
        }
        for label in name.split(|&byte| byte == b'.') {
            let plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-' || *byte == b'_';
            if label.is_empty() || label.len() > LABEL_BYTES_MAX || !label.iter().all(plain) {
                return Err(BadHost);
            }
        }
        let mut text = String::with_capacity(name.len());
        text.extend(name.iter().map(|byte| char::from(byte.to_ascii_lowercase())));
        Ok(Self(text))
    }

    /// The canonical text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::borrow::Borrow<str> for Host {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl Authority {
    /// Reads `HOST` or `HOST:PORT`; an empty port counts as none.
    pub fn parse(bytes: &[u8]) -> Result<Self, BadHost> {
        let name_end = match bytes.first() {
            Some(b'[') => memchr::memchr(b']', bytes).ok_or(BadHost)? + 1,
            Some(_) | None => memchr::memchr(b':', bytes).unwrap_or(bytes.len()),
        };
        let (name, rest) = bytes.split_at_checked(name_end).ok_or(BadHost)?;
        let port = match rest.strip_prefix(b":") {
            None if rest.is_empty() => None,
            None => return Err(BadHost),
            Some([]) => None,
            Some(digits) => Some(parse_port(digits)?),
        };
        Ok(Self { host: Host::parse(name)?, port })
    }
}

fn parse_port(digits: &[u8]) -> Result<u16, BadHost> {
    // Longer only with leading zeros, which nobody writes; no sign, which `parse` would take.
    if digits.len() > 5 || !digits.iter().all(u8::is_ascii_digit) {
        return Err(BadHost);
    }
    let text = std::str::from_utf8(digits).map_err(|_| BadHost)?;
    text.parse().map_err(|_| BadHost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_has_one_spelling() {
        for text in ["a.test", "A.TEST", "A.Test.", "a.test:18080", "A.Test.:443", "a.test:"] {
            let host = Authority::parse(text.as_bytes()).unwrap().host;
            assert_eq!(host.as_str(), "a.test", "{text}");
        }
        let literal = Authority::parse(b"[0:0::1]:8080").unwrap();
        assert_eq!((literal.host.as_str(), literal.port), ("[::1]", Some(8080)));
    }

    #[test]
    fn what_is_no_host_is_refused() {
        let long = format!("{}.test", "a".repeat(64));
        for text in [
            "",
            ".",
            "a..b",
            ".a",
            "a b",
            "a/b",
            "a,b",
            "a:80:80",
            "a:99999",
            "a:8x",
            "a:+1",
            "[::1",
            "[::1]x",
            "[]",
            "[1.2.3.4]",
            "a@b",
            "caf\u{e9}.test",
            "a%41",
            &long,
        ] {
            assert_eq!(Authority::parse(text.as_bytes()), Err(BadHost), "{text}");
        }
    }
}
