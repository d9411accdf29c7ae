//! A real `dormouse-proxy` process, and a plain HTTP client for it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Far more than anything takes; reached only by a failure.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Both engines by name.
pub const ENGINES: [&str; 2] = ["epoll", "uring"];

/// `strace` over all threads of the program that is added to the command.
#[must_use]
pub fn strace(log: &Path, options: &[&str]) -> Command {
    // -D: the program, not strace, is the child that is killed at the end.
    // Without it the test fails with "No such file": apt-get install strace.
    let mut command = Command::new("strace");
    command.args(["-D", "-f", "-qq", "-o"]).arg(log).args(options).arg("--");
    command
}

/// A running proxy, killed on drop.
#[derive(Debug)]
pub struct Proxy {
    child: Child,
    /// Where it listens.
    pub address: SocketAddr,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy with this config, whose listener is added here, and waits until it serves.
    pub fn start(dir: &Path, engine: &str, config: &str) -> Result<Self> {
        let listen = "[[edge.listen]]\nname = \"http\"\naddress = \"127.0.0.1:0\"\n";
        let path = dir.join(format!("proxy-{engine}.toml"));
        std::fs::write(&path, format!("{config}\n{listen}"))?;
        let mut command = Command::new(crate::binary("dormouse-proxy")?);
        command.arg("--config").arg(&path).arg("--engine").arg(engine);
        Self::spawn(command, None)
    }

    /// Starts a prepared command; its address is known already, or read from its log.
    pub fn spawn(mut command: Command, address: Option<SocketAddr>) -> Result<Self> {
        let mut child = command.stderr(Stdio::piped()).spawn().context("start the proxy")?;
        let mut lines = BufReader::new(child.stderr.take().context("its log")?);
        let log = Arc::new(Mutex::new(String::new()));
        let mut address = address;
        loop {
            let mut line = String::new();
            if lines.read_line(&mut line)? == 0 {
                let text = log.lock().unwrap_or_else(PoisonError::into_inner).clone();
                bail!("the proxy ended before it served: {text}");
            }
            if let Some((_, rest)) = line.split_once("address=") {
                let text = rest.split_whitespace().next().unwrap_or_default();
                address = address.or_else(|| text.parse().ok());
            }
            let serves = line.contains("serving");
            log.lock().unwrap_or_else(PoisonError::into_inner).push_str(&line);
            if serves {
                break;
            }
        }
        let shared = log.clone();
        let reader = std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                let mut log = shared.lock().unwrap_or_else(PoisonError::into_inner);
                log.push_str(&line);
                log.push('\n');
            }
        });
        let address = address.context("the proxy named no address")?;
        Ok(Self { child, address, log, reader: Some(reader) })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) -> Result<()> {
        let pid = i32::try_from(self.child.id())?;
        Ok(kill(Pid::from_raw(pid), Signal::SIGTERM)?)
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        let status = self.child.wait()?;
        if let Some(reader) = self.reader.take() {
            drop(reader.join());
        }
        Ok(status)
    }

    /// Opens a connection.
    pub fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    /// Sends one request on a connection of its own and reads the whole answer.
    pub fn get(&self, host: &str, path: &str) -> Result<Answer> {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
    }

    /// As [`Proxy::get`], with all bytes given; the request must ask for a close.
    pub fn ask(&self, request: &str) -> Result<Answer> {
        let mut stream = self.connect()?;
        stream.write_all(request.as_bytes())?;
        Answer::read(&mut stream)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// An answer that ended with its connection.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Status.
    pub status: u16,
    /// Head, in lower case.
    pub head: String,
    /// Everything after the head.
    pub body: Vec<u8>,
}

impl Answer {
    /// Reads until the end.
    pub fn read(stream: &mut TcpStream) -> Result<Self> {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).context("the answer")?;
        drop(stream.shutdown(Shutdown::Both));
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").context("a head")?;
        let head = String::from_utf8_lossy(bytes.get(..end).unwrap_or_default());
        let status = head.split(' ').nth(1).and_then(|text| text.parse().ok());
        Ok(Self {
            status: status.context("a status")?,
            head: head.to_ascii_lowercase(),
            body: bytes.split_off(end + 4),
        })
    }

    /// A field's value.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (field, value) = line.split_once(':')?;
            (field == name).then(|| value.trim())
        })
    }

    /// The reason that a refusal names.
    #[must_use]
    pub fn reason(&self) -> &str {
        self.field("x-dormouse-reason").unwrap_or("")
    }
}
