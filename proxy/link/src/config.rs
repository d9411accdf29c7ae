//! The one TOML file that both processes read.
//!
//! Every key has a default but the few that nobody can guess. An unknown key or a bad value is an
//! error that names file, line, key, and what is allowed. Durations are text with a unit: `"15m"`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

mod changes;
mod check;
mod replica;
mod span;

pub use changes::changes;
pub use check::{BOX_NAME, ConfigError, is_box_name, warnings};
pub use replica::{Drill, Replica};
pub use span::Span;

/// The whole file.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// This box: its name and its directories.
    #[serde(rename = "box")]
    pub this_box: ThisBox,
    /// What the proxy listens on, and its limits.
    pub edge: Edge,
    /// Hosts that are served straight from an upstream, with nothing managed.
    #[serde(rename = "route")]
    pub routes: Vec<PlainRoute>,
    /// Where records and replicas live. Without it nothing is managed.
    pub store: Option<Store>,
    /// The box's session in the store.
    pub session: Session,
    /// Bounds of one wake.
    pub wake: Wake,
    /// Bounds of one sleep.
    pub sleep: Sleep,
    /// How instances are kept apart.
    pub instances: Instances,
    /// When hosts are put to sleep for their memory.
    pub pressure: Pressure,
    /// How databases are kept in the store.
    pub replica: Replica,
    /// Restores for practice.
    pub drill: Drill,
    /// Apps by name.
    #[serde(rename = "app")]
    pub apps: BTreeMap<String, App>,
}

/// This box: its name and its directories.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ThisBox {
    /// Name in the store's session records: letters, digits, `-`, `.`; a letter or digit first and last;
    /// at most 64 bytes.
    pub name: String,
    /// Databases, registry and journal.
    pub data: PathBuf,
    /// Sockets, and what does not outlive a boot.
    pub run: PathBuf,
    /// Environment files of hosts, readable by root only.
    pub etc: PathBuf,
    /// User ids that may connect to the link as a proxy, besides our own.
    pub proxy_uids: Vec<u32>,
    /// The same by name, looked up when the activator starts.
    pub proxy_users: Vec<String>,
}

impl Default for ThisBox {
    fn default() -> Self {
        Self {
            name: "box-1".to_owned(),
            data: PathBuf::from("/var/lib/dormouse"),
            run: PathBuf::from("/run/dormouse"),
            etc: PathBuf::from("/etc/dormouse"),
            proxy_uids: Vec::new(),
            proxy_users: Vec::new(),
        }
    }
}

impl ThisBox {
    /// The link's socket, for proxies.
    #[must_use]
    pub fn link_socket(&self) -> PathBuf {
        self.run.join("link.sock")
    }

    /// The admin socket, for people and tools.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.run.join("admin.sock")
    }
}

/// What the proxy listens on, and its limits.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Edge {
    /// Listeners; those handed over by systemd are matched by name and need no address.
    pub listen: Vec<Listen>,
    /// Threads with a ring of their own; 0 takes one a core.
    pub loops: u32,
    /// Which engine drives the sockets.
    pub engine: Engine,
    /// How long in-flight requests may go on after SIGTERM.
    pub drain: Span,
    /// Peers whose forwarded headers are kept: addresses or prefixes (`10.0.0.0/8`).
    pub trusted_proxies: Vec<String>,
    /// Limits by name.
    pub limits: Limits,
}

impl Default for Edge {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            loops: 0,
            engine: Engine::Auto,
            drain: Span::from_secs(30),
            trusted_proxies: Vec::new(),
            limits: Limits::default(),
        }
    }
}

/// One listener.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Listen {
    /// Name, as in a socket unit's `FileDescriptorName=`.
    pub name: String,
    /// `ADDRESS:PORT`, or `unix:PATH`; absent for a socket that systemd hands over.
    pub address: Option<String>,
}

/// Which engine drives the sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// `io_uring` where the kernel allows it, else epoll with one log line.
    #[default]
    Auto,
    /// `io_uring` or nothing.
    Uring,
    /// epoll.
    Epoll,
}

/// Limits of the edge.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Bytes of a request head, its request line included.
    pub head_bytes: u32,
    /// Fields of a request head.
    pub head_fields: u32,
    /// Bytes of a request body; 0 means no limit.
    pub body_bytes: u64,
    /// Open client connections.
    pub connections: u32,
    /// Requests that wait for one host.
    pub waiters_per_host: u32,
    /// Requests that wait on this box.
    pub waiters: u32,
    /// How long a request waits for its host.
    pub wake_wait: Span,
    /// How long a client may take to send a head.
    pub head_timeout: Span,
    /// How long a kept-alive connection may be silent.
    pub idle_timeout: Span,
    /// How long an app may take to begin its answer.
    pub upstream_timeout: Span,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            head_bytes: 16 * 1024,
            head_fields: 100,
            body_bytes: 0,
            connections: 20_000,
            waiters_per_host: 256, // × 16 KiB of head = 4 MiB a host
            waiters: 4096,         // × 16 KiB of head = 64 MiB a box
            wake_wait: Span::from_secs(30),
            head_timeout: Span::from_secs(15),
            idle_timeout: Span::from_secs(75),
            upstream_timeout: Span::from_secs(300),
        }
    }
}

/// A host that is served straight from an upstream.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PlainRoute {
    /// Served name.
    pub host: String,
    /// `unix:PATH` or `tcp:ADDRESS:PORT`.
    pub upstream: String,
}

/// Where records and replicas live.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Store {
    /// Which kind of store.
    pub kind: StoreKind,
    /// Directory of a directory store.
    pub path: Option<PathBuf>,
    /// Key prefix; never empty.
    #[serde(default = "default_prefix")]
    pub prefix: String,
    /// Bucket of an S3 store.
    pub bucket: Option<String>,
    /// Region of an S3 store; needed on AWS.
    pub region: Option<String>,
    /// `http://` or `https://` and a host; absent: AWS, by the region.
    pub endpoint: Option<String>,
    /// The bucket in the path, not in the host's name; absent: where there is an endpoint.
    pub path_style: Option<bool>,
    /// TOML file with the keys, for its owner alone; absent: the SDK's default chain.
    pub credentials: Option<PathBuf>,
    /// How long a connection to an S3 store may take.
    #[serde(default = "default_connect_timeout")]
    pub connect_timeout: Span,
    /// How long an S3 store may take to answer, beside the time that a body takes.
    #[serde(default = "default_request_timeout")]
    pub request_timeout: Span,
    /// When checksums are sent and verified.
    #[serde(default)]
    pub checksums: Checksums,
    /// Requests at a time, those for records apart.
    #[serde(default = "default_requests_at_a_time")]
    pub requests_at_a_time: u32,
}

impl Store {
    /// A store of a kind with everything else as it is by default.
    #[must_use]
    pub fn new(kind: StoreKind) -> Self {
        Self {
            kind,
            path: None,
            prefix: default_prefix(),
            bucket: None,
            region: None,
            endpoint: None,
            path_style: None,
            credentials: None,
            connect_timeout: default_connect_timeout(),
            request_timeout: default_request_timeout(),
            checksums: Checksums::default(),
            requests_at_a_time: default_requests_at_a_time(),
        }
    }

    /// The region that requests are signed for; behind an endpoint most stores take any.
    #[must_use]
    pub fn region_or_default(&self) -> &str {
        self.region.as_deref().unwrap_or("us-east-1")
    }
}

fn default_prefix() -> String {
    "dormouse".to_owned()
}

const fn default_connect_timeout() -> Span {
    Span::from_secs(3)
}

const fn default_request_timeout() -> Span {
    Span::from_secs(10)
}

const fn default_requests_at_a_time() -> u32 {
    32
}

/// When checksums are sent and verified beyond what the protocol needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Checksums {
    /// Wherever the SDK can.
    #[default]
    WhenSupported,
    /// Only where S3 demands it: some stores fail on trailing checksums.
    WhenRequired,
}

/// Which kind of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StoreKind {
    /// A local directory.
    Directory,
    /// An S3 bucket.
    S3,
}

/// The box's session in the store.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Session {
    /// How long a renewal lasts: 1 s to a day.
    pub ttl: Span,
    /// How long before its end the box stops acting.
    pub margin: Span,
    /// Who decides that a box is gone.
    pub takeover: Takeover,
}

impl Default for Session {
    fn default() -> Self {
        Self { ttl: Span::from_secs(30), margin: Span::from_secs(5), takeover: Takeover::Manual }
    }
}

/// Who decides that a box is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Takeover {
    /// The operator, by `dormouse takeover BOX`.
    Manual,
    /// Time alone: a box that cannot renew its session stops all its hosts, and others take them.
    Automatic,
}

/// Bounds of one wake.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Wake {
    /// The whole wake.
    pub budget: Span,
    /// From exec to the first healthy answer.
    pub health: Span,
    /// First wait after a failed wake; doubles up to `backoff_max`.
    pub backoff: Span,
    /// Longest wait after failed wakes.
    pub backoff_max: Span,
    /// Wakes that are under way at a time, the others wait in order; 0 means no limit.
    pub at_a_time: u32,
}

impl Default for Wake {
    fn default() -> Self {
        Self {
            budget: Span::from_secs(300),
            health: Span::from_secs(30),
            backoff: Span::from_secs(1),
            backoff_max: Span::from_secs(60),
            at_a_time: 32,
        }
    }
}

/// Bounds of one sleep.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sleep {
    /// Idle time after which a host is put to sleep.
    pub idle: Span,
    /// The next-due question.
    pub next_due: Span,
    /// From SIGTERM to SIGKILL.
    pub grace: Span,
    /// From SIGKILL to "cannot be proven".
    pub proof: Span,
    /// The final sync.
    pub sync: Span,
}

impl Default for Sleep {
    fn default() -> Self {
        Self {
            idle: Span::from_secs(15 * 60),
            next_due: Span::from_secs(5),
            grace: Span::from_secs(20),
            proof: Span::from_secs(5),
            sync: Span::from_secs(30),
        }
    }
}

/// How instances are kept apart, from each other and from the rest of the box.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Instances {
    /// Each host has a user of its own. Where the activator is not root, all run as its user.
    pub own_users: bool,
    /// Number of the first such user and group; a million from here on must be nobody else's.
    pub first_user: u32,
    /// What they can reach of the file system is restricted, where the kernel has Landlock.
    pub landlock: bool,
}

impl Default for Instances {
    fn default() -> Self {
        // Up to 2^31: reserved by nobody (systemd's "Users, Groups, UIDs and GIDs").
        Self { own_users: true, first_user: 2_000_000_000, landlock: true }
    }
}

/// When hosts are put to sleep for their memory, the longest idle first: by the kernel's pressure stall
/// information (Linux 4.20+), the share of time in which something waits for memory.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Pressure {
    /// What is watched: the machine's, or a cgroup's `memory.pressure`.
    pub file: PathBuf,
    /// From this share on, percent; 0 means never.
    pub high_percent: u32,
    /// Until it is below this one.
    pub low_percent: u32,
}

impl Default for Pressure {
    fn default() -> Self {
        let file = PathBuf::from("/proc/pressure/memory");
        Self { file, high_percent: 10, low_percent: 5 }
    }
}

/// An app: how its instances are started and judged.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct App {
    /// Executable and arguments; `{socket}`, `{db}`, `{host}` and `{dir}` are replaced.
    pub command: Vec<String>,
    /// How the instance gets its listening socket.
    #[serde(default)]
    pub listen: AppListen,
    /// Path that answers 2xx when the instance is ready; absent: a connection is enough.
    pub health: Option<String>,
    /// Path of the next-due question; absent: the app has no due times.
    pub next_due: Option<String>,
    /// Name of the environment variable that holds the token of the next-due question.
    pub next_due_token: Option<String>,
    /// File name of the database inside the host's directory.
    #[serde(default = "default_db")]
    pub db: String,
    /// Longest time between a commit and its upload.
    #[serde(default)]
    pub replication: Replication,
    /// Idle time of this app's hosts; absent: `[sleep] idle`.
    pub idle: Option<Span>,
    /// An idle instance is frozen, and stopped after so long; absent: it is stopped at once.
    pub freeze: Option<Span>,
    /// What one instance may use.
    #[serde(default)]
    pub limits: AppLimits,
    /// Files and folders that it may read and execute, besides its program's folder and the system's.
    #[serde(default)]
    pub read: Vec<PathBuf>,
    /// Files and folders that it may write, besides its own.
    #[serde(default)]
    pub write: Vec<PathBuf>,
    /// Environment beside the fixed allow-list.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// What to do with a database that is not in WAL mode.
    #[serde(default)]
    pub set_wal: bool,
}

/// What one instance may use; what is absent has no limit. Enforced by the controllers of cgroup v2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AppLimits {
    /// Memory over which it is slowed down, MiB.
    pub memory_high_mib: Option<u32>,
    /// Memory over which it is killed, MiB.
    pub memory_max_mib: Option<u32>,
    /// Processes and threads.
    pub pids_max: Option<u32>,
    /// Share of processor time where it is short: 1 to 10000, 100 is usual.
    pub cpu_weight: Option<u32>,
}

fn default_db() -> String {
    "app.db".to_owned()
}

/// How the instance gets its listening socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AppListen {
    /// It binds `{socket}` itself.
    #[default]
    Path,
    /// It takes a bound, listening descriptor as `LISTEN_FDS`.
    Fd,
}

/// Replication class: the longest time between a commit and its upload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Replication {
    /// At most a second, paced by a token bucket.
    Stream,
    /// At most 30 s.
    #[default]
    Batched,
    /// At most a day.
    Daily,
}

impl Config {
    /// Reads, overrides from the environment, and checks a file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::load_with(path, |name| std::env::var(name).ok())
    }

    /// As [`Config::load`], with the environment as an argument.
    pub fn load_with(
        path: &Path,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let mut config: Self = toml::from_str(&text)
            .map_err(|source| ConfigError::Parse { path: path.to_owned(), source })?;
        check::override_from(&mut config, environment)?;
        check::check(&config, path)?;
        Ok(config)
    }

    /// Idle time of an app's hosts.
    #[must_use]
    pub fn idle_of(&self, app: &App) -> Span {
        app.idle.unwrap_or(self.sleep.idle)
    }
}
