//! What an S3 store is made of.

use std::path::PathBuf;
use std::time::Duration;

use super::judge::Whereabouts;

/// Where the keys come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// The environment, a profile, a web identity, the container's or the machine's role.
    Chain,
    /// A TOML file with `access_key_id`, `secret_access_key` and perhaps `session_token`.
    File(PathBuf),
}

/// When checksums are sent and verified beyond what the protocol needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksums {
    /// Wherever the SDK can.
    WhenSupported,
    /// Only where S3 demands it: some stores fail on trailing checksums.
    WhenRequired,
}

/// What an S3 store is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Settings {
    /// The bucket.
    pub bucket: String,
    /// `http://` or `https://` and a host; absent: AWS, by the region.
    pub endpoint: Option<String>,
    /// The region that requests are signed for.
    pub region: String,
    /// The bucket in the path, not in the host's name.
    pub path_style: bool,
    /// Where the keys come from.
    pub keys: KeySource,
    /// To a connection.
    pub connect_timeout: Duration,
    /// To the head of an answer, beside the time that a body takes at `SLOWEST_BYTES_PER_S`; and
    /// between two pieces of an answer's body.
    pub request_timeout: Duration,
    /// When checksums are used.
    pub checksums: Checksums,
    /// Requests at a time, those for records apart.
    pub requests_at_a_time: usize,
}

impl S3Settings {
    /// A bucket with everything else as it is by default: AWS or an endpoint by path.
    #[must_use]
    pub fn new(bucket: &str, region: &str, endpoint: Option<&str>) -> Self {
        Self {
            bucket: bucket.to_owned(),
            endpoint: endpoint.map(str::to_owned),
            region: region.to_owned(),
            path_style: endpoint.is_some(),
            keys: KeySource::Chain,
            connect_timeout: Duration::from_secs(3),
            request_timeout: Duration::from_secs(10),
            checksums: Checksums::WhenSupported,
            requests_at_a_time: 32,
        }
    }

    /// What tells this store from another: the endpoint or region, and the bucket.
    #[must_use]
    pub fn identity(&self) -> String {
        let Self { bucket, region, endpoint, .. } = self;
        match endpoint {
            Some(endpoint) => format!("s3 {} {bucket}", endpoint.trim_end_matches('/')),
            None => format!("s3 aws {region} {bucket}"),
        }
    }

    pub(super) fn whereabouts(&self) -> Whereabouts {
        let endpoint = self.endpoint.clone().unwrap_or_else(|| format!("AWS {}", self.region));
        let keys = match &self.keys {
            KeySource::Chain => "the environment, a profile or the machine's role".to_owned(),
            KeySource::File(path) => path.display().to_string(),
        };
        Whereabouts { bucket: self.bucket.clone(), endpoint, keys }
    }
}
