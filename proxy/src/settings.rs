//! What the config says, read once: addresses, routes, trust, limits.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dormouse_link::config::Config;
use dormouse_proxy_core::conn;
use dormouse_proxy_core::host::Host;
use dormouse_proxy_core::request::FIELDS_MAX;

/// Where a plain route goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// Time-outs of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    pub(crate) head: Duration,
    pub(crate) idle: Duration,
    pub(crate) upstream: Duration,
    /// For a client to close after its last answer: long enough to read it, short enough not to
    /// collect half-closed connections.
    pub(crate) linger: Duration,
    /// During a drain, for a request that is on its way on an idle connection: a round trip.
    pub(crate) drain_idle: Duration,
}

/// An address prefix.
#[derive(Clone, Copy, Debug)]
struct Prefix {
    address: u128,
    bits: u32,
}

/// What every loop needs to know.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) conn: conn::Settings,
    pub(crate) timeouts: Timeouts,
    pub(crate) plain: Vec<(Host, Target)>,
    pub(crate) managed: bool,
    pub(crate) waiters: u32,
    trusted: Vec<Prefix>,
}

impl Settings {
    /// Checks and takes what the proxy uses of the config.
    pub(crate) fn read(config: &Config, place: &Path) -> Result<Self> {
        let edge = &config.edge;
        let limits = &edge.limits;
        let wrong = |key: &str, problem: &str, allowed: &str| {
            format!("{}: {key}: {problem}; allowed: {allowed}", place.display())
        };
        let fields = usize::try_from(limits.head_fields).unwrap_or(usize::MAX);
        if fields == 0 || fields > FIELDS_MAX {
            let problem = format!("{fields} is out of range");
            bail!(wrong("edge.limits.head_fields", &problem, &format!("1 to {FIELDS_MAX}")));
        }
        let mut plain = Vec::new();
        for route in &config.routes {
            let host = Host::parse(route.host.as_bytes()).map_err(|_| {
                let problem = format!("{:?} is not a host name", route.host);
                anyhow::anyhow!(wrong("route.host", &problem, "a name without a port"))
            })?;
            let target = target(&route.upstream).with_context(|| {
                let problem = format!("{:?} is not an upstream", route.upstream);
                wrong("route.upstream", &problem, "\"unix:PATH\" or \"tcp:ADDRESS:PORT\"")
            })?;
            plain.push((host, target));
        }
        let mut trusted = Vec::new();
        for text in &edge.trusted_proxies {
            let problem = format!("{text:?} is not an address or a prefix");
            trusted.push(prefix(text).with_context(|| {
                wrong("edge.trusted_proxies", &problem, "\"192.0.2.1\" or \"10.0.0.0/8\"")
            })?);
        }
        let unlimited = if limits.body_bytes == 0 { u64::MAX } else { limits.body_bytes };
        Ok(Self {
            conn: conn::Settings {
                head_bytes: usize::try_from(limits.head_bytes).unwrap_or(usize::MAX),
                head_fields: fields,
                body_bytes: unlimited,
            },
            timeouts: Timeouts {
                head: limits.head_timeout.duration(),
                idle: limits.idle_timeout.duration(),
                upstream: limits.upstream_timeout.duration(),
                linger: Duration::from_secs(2),
                drain_idle: Duration::from_secs(1),
            },
            plain,
            managed: config.store.is_some(),
            waiters: limits.waiters,
            trusted,
        })
    }

    /// Whether a peer's forwarded fields are kept.
    pub(crate) fn trusts(&self, peer: IpAddr) -> bool {
        let address = widen(peer);
        self.trusted.iter().any(|prefix| {
            let shift = 128 - prefix.bits;
            address.checked_shr(shift) == prefix.address.checked_shr(shift)
        })
    }
}

/// An address as 128 bits; IPv4 in its mapped form.
fn widen(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(four) => four.to_ipv6_mapped().to_bits(),
        IpAddr::V6(six) => six.to_bits(),
    }
}

fn prefix(text: &str) -> Result<Prefix> {
    let (address, bits) = match text.split_once('/') {
        Some((address, bits)) => (address, Some(bits.parse::<u32>()?)),
        None => (text, None),
    };
    let address: IpAddr = address.parse()?;
    let width = if address.is_ipv4() { 32 } else { 128 };
    let bits = bits.unwrap_or(width);
    if bits > width {
        bail!("a prefix of {bits} bits in an address of {width}");
    }
    Ok(Prefix { address: widen(address), bits: bits + (128 - width) })
}

fn target(text: &str) -> Result<Target> {
    if let Some(path) = text.strip_prefix("unix:") {
        if !path.starts_with('/') {
            bail!("the path is not absolute");
        }
        return Ok(Target::Unix(PathBuf::from(path)));
    }
    match text.strip_prefix("tcp:") {
        Some(address) => Ok(Target::Tcp(address.parse()?)),
        None => bail!("neither unix: nor tcp:"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Result<Settings> {
        let dir = std::env::temp_dir().join(format!("dormouse-settings-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join(format!("{:x}.toml", text.len()));
        std::fs::write(&path, text).unwrap();
        Settings::read(&Config::load(&path)?, &path)
    }

    #[test]
    fn a_prefix_trusts_what_lies_in_it() {
        let settings =
            settings("[edge]\ntrusted_proxies = [\"10.0.0.0/8\", \"2001:db8::1\"]").unwrap();
        for (address, trusted) in
            [("10.9.8.7", true), ("11.0.0.1", false), ("2001:db8::1", true), ("::1", false)]
        {
            assert_eq!(settings.trusts(address.parse().unwrap()), trusted, "{address}");
        }
    }

    #[test]
    fn a_bad_value_names_its_key_and_what_is_allowed() {
        for (text, key) in [
            ("[edge.limits]\nhead_fields = 0", "edge.limits.head_fields"),
            ("[[route]]\nhost = \"a:80\"\nupstream = \"unix:/x\"", "route.host"),
            ("[[route]]\nhost = \"a\"\nupstream = \"x\"", "route.upstream"),
            ("[edge]\ntrusted_proxies = [\"10.0.0.0/33\"]", "edge.trusted_proxies"),
        ] {
            let error = format!("{:#}", settings(text).unwrap_err());
            assert!(error.contains(key) && error.contains("allowed:"), "{error}");
        }
    }
}
