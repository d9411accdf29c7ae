//! A box of its own in a temporary directory: activator, proxy and apps as real processes.
//!
//! Everything that it starts is ended when it is dropped, by process id; the instances with it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::client::{self, Answer};
use crate::wait::until;

/// How long anything may take before a test calls it failed.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What a box is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    /// TOML that is appended to the config: apps, and sections that are not there yet.
    pub config: String,
    /// `[sleep] idle`.
    pub idle: String,
    /// `--engine` of the proxy.
    pub engine: String,
    /// The box's name.
    pub name: String,
    /// The store's directory; absent: one inside the world.
    pub store: Option<PathBuf>,
    /// The whole `[store]` section, where it is no directory.
    pub store_section: Option<String>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            config: String::new(),
            idle: "1h".to_owned(),
            engine: "auto".to_owned(),
            name: "box-1".to_owned(),
            store: None,
            store_section: None,
        }
    }
}

/// A box.
#[derive(Debug)]
pub struct World {
    dir: tempfile::TempDir,
    bin: PathBuf,
    activator: Option<Child>,
    proxy: Option<Child>,
    guard: Option<Child>,
    address: SocketAddr,
    engine: String,
}

impl World {
    /// A box whose binaries lie in `bin`; nothing runs yet.
    pub fn new(bin: &Path, plan: &Plan) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("dm.").tempdir()?;
        // Instances run as users of their own.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let at = |name: &str| dir.path().join(name).display().to_string();
        let store = plan.store.clone().unwrap_or_else(|| dir.path().join("store"));
        let store = if let Some(section) = &plan.store_section {
            section.clone()
        } else {
            fs::create_dir_all(&store)?;
            format!("[store]\nkind = \"directory\"\npath = \"{}\"\n", store.display())
        };
        let config = format!(
            "[box]\nname = \"{}\"\ndata = \"{}\"\nrun = \"{}\"\netc = \"{}\"\n\
             [edge]\nlisten = [{{ name = \"http\", address = \"{address}\" }}]\ndrain = \"5s\"\n\
             {store}\
             [sleep]\nidle = \"{}\"\n{}",
            plan.name,
            at("data"),
            at("run"),
            at("etc"),
            plan.idle,
            plan.config
        );
        fs::write(dir.path().join("dormouse.toml"), config)?;
        let engine = plan.engine.clone();
        Ok(Self {
            dir,
            bin: bin.to_owned(),
            activator: None,
            proxy: None,
            guard: None,
            address,
            engine,
        })
    }

    /// A box with activator and proxy running.
    pub fn started(bin: &Path, plan: &Plan) -> Result<Self> {
        let mut world = Self::new(bin, plan)?;
        world.start_activator()?;
        world.start_proxy()?;
        Ok(world)
    }

    /// The config section of the guestbook, taking its socket by `listen` (`path` or `fd`).
    #[must_use]
    pub fn guestbook(bin: &Path, listen: &str) -> String {
        format!(
            "[app.guestbook]\ncommand = [\"{}\", \"--socket\", \"{{socket}}\", \"--db\", \
             \"{{db}}\"]\nlisten = \"{listen}\"\nhealth = \"/healthz\"\n\
             next_due = \"/api/next-due\"\nreplication = \"stream\"\n",
            bin.join("guestbook").display()
        )
    }

    /// A path inside the world.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The folder that all of it lies in.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// A host's database.
    #[must_use]
    pub fn database(&self, host: &str) -> PathBuf {
        self.path("data/hosts").join(host).join("app.db")
    }

    /// Where the proxy listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The config file.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.path("dormouse.toml")
    }

    fn spawn(&self, program: &str, args: &[&str], log: &str) -> Result<Child> {
        let log = File::options().create(true).append(true).open(self.path(log))?;
        Command::new(self.bin.join(program))
            .arg("--config")
            .arg(self.config())
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            // Ctrl-C at a terminal reaches the one who plays, who then ends these in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("{program} in {}", self.bin.display()))
    }

    /// Starts the activator and waits until its session is live.
    pub fn start_activator(&mut self) -> Result<()> {
        self.activator = Some(self.spawn("dormouse", &["serve"], "activator.log")?);
        until(PATIENCE, "the session is live", || {
            self.activator_is_up()?;
            Ok(self.status().is_ok_and(|status| status["session"] == "live"))
        })
    }

    /// Starts the activator and waits until it answers, whatever its session is.
    pub fn begin_activator(&mut self) -> Result<()> {
        self.activator = Some(self.spawn("dormouse", &["serve"], "activator.log")?);
        until(PATIENCE, "the activator answers", || {
            self.activator_is_up()?;
            Ok(self.status().is_ok())
        })
    }

    /// Starts it where it is expected to refuse, and returns its log.
    pub fn activator_refuses(&mut self) -> Result<String> {
        let mut child = self.spawn("dormouse", &["serve"], "activator.log")?;
        until(PATIENCE, "the activator ends", || Ok(child.try_wait()?.is_some()))?;
        self.log("activator.log")
    }

    fn activator_is_up(&mut self) -> Result<()> {
        if let Some(child) = &mut self.activator
            && let Some(status) = child.try_wait()?
        {
            bail!("the activator ended: {status}\n{}", self.log("activator.log")?);
        }
        Ok(())
    }

    /// Starts the guard and waits until it holds the cgroup of the instances.
    pub fn start_guard(&mut self) -> Result<()> {
        self.guard = Some(self.spawn("dormouse", &["guard"], "guard.log")?);
        until(PATIENCE, "the guard is up", || {
            if let Some(child) = &mut self.guard
                && let Some(status) = child.try_wait()?
            {
                bail!("the guard ended: {status}\n{}", self.log("guard.log")?);
            }
            Ok(self.log("guard.log")?.contains("instances are held here"))
        })
    }

    /// Ends the guard by a signal and waits for it.
    pub fn end_guard(&mut self, signal: Signal) -> Result<()> {
        end(self.guard.take(), signal)
    }

    /// Starts the proxy and waits until it listens and is linked.
    pub fn start_proxy(&mut self) -> Result<()> {
        let engine = self.engine.clone();
        self.proxy = Some(self.spawn("dormouse-proxy", &["--engine", &engine], "proxy.log")?);
        until(PATIENCE, "the proxy is linked", || {
            let linked = self.status().is_ok_and(|s| s["proxies"] != Value::Array(Vec::new()));
            Ok(linked && std::net::TcpStream::connect(self.address).is_ok())
        })
    }

    /// The activator's process.
    pub fn activator_pid(&self) -> Result<Pid> {
        pid(self.activator.as_ref().context("no activator runs")?)
    }

    /// The guard's process.
    pub fn guard_pid(&self) -> Result<Pid> {
        pid(self.guard.as_ref().context("no guard runs")?)
    }

    /// Whether any instance runs, by the cgroup that holds all of them.
    pub fn has_instances(&self) -> Result<bool> {
        let held = fs::read_to_string(self.path("data/cgroup"))?;
        let events = fs::read_to_string(Path::new(held.trim()).join("cgroup.events"))?;
        Ok(events.lines().any(|line| line == "populated 1"))
    }

    /// The proxy's process.
    pub fn proxy_pid(&self) -> Result<Pid> {
        pid(self.proxy.as_ref().context("no proxy runs")?)
    }

    /// Ends the activator by a signal and waits for it.
    pub fn end_activator(&mut self, signal: Signal) -> Result<()> {
        end(self.activator.take(), signal)
    }

    /// Ends the proxy by a signal and waits for it.
    pub fn end_proxy(&mut self, signal: Signal) -> Result<()> {
        end(self.proxy.take(), signal)
    }

    /// Runs a command of `dormouse`; its standard output, or an error with what it said.
    pub fn dormouse(&self, args: &[&str]) -> Result<String> {
        let output = Command::new(self.bin.join("dormouse"))
            .arg("--config")
            .arg(self.config())
            .args(args)
            .output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(output.status.success(), "dormouse {args:?}: {}", text(&output.stderr));
        Ok(text(&output.stdout))
    }

    /// Runs a command of `dormouse` that is to end with this exit code; what it said of its error.
    pub fn dormouse_fails(&self, args: &[&str], code: i32) -> Result<String> {
        let output = Command::new(self.bin.join("dormouse"))
            .arg("--config")
            .arg(self.config())
            .args(args)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(code), "dormouse {args:?}: {}: {said}", output.status);
        Ok(said)
    }

    /// Adds a host.
    pub fn add(&self, host: &str, app: &str) -> Result<()> {
        self.dormouse(&["add", host, "--app", app]).map(drop)
    }

    /// Waits until a host is in a state.
    pub fn wait_state(&self, host: &str, state: &str) -> Result<()> {
        self.dormouse(&["wait", host, "--state", state, "--timeout-s", "30"])
            .map(drop)
            .with_context(|| {
                let log = self.log("activator.log").unwrap_or_default();
                format!("{host} is to be {state}\n{log}")
            })
    }

    /// `dormouse status --json`.
    pub fn status(&self) -> Result<Value> {
        let answer = client::over_unix(&self.path("run/admin.sock"), "/status")?;
        Ok(serde_json::from_slice(&answer.body)?)
    }

    /// `dormouse status HOST --json`.
    pub fn host(&self, host: &str) -> Result<Value> {
        let path = format!("/hosts/{host}");
        let answer = client::over_unix(&self.path("run/admin.sock"), &path)?;
        Ok(serde_json::from_slice(&answer.body)?)
    }

    /// `dormouse status --cost --json`: requests for hosts, those of sessions left out.
    pub fn store_requests(&self) -> Result<u64> {
        let bill: Value = serde_json::from_str(&self.dormouse(&["--json", "status", "--cost"])?)?;
        bill["hosts"]["requests"].as_u64().context("a bill without a sum")
    }

    /// The counters of `/metrics` without labels.
    pub fn metrics(&self) -> Result<BTreeMap<String, f64>> {
        let answer = client::over_unix(&self.path("run/admin.sock"), "/metrics")?;
        let text = String::from_utf8(answer.body)?;
        let pair = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        Ok(text.lines().filter(|line| !line.starts_with('#')).filter_map(pair).collect())
    }

    /// A GET through the proxy.
    pub fn get(&self, host: &str, path: &str) -> Result<Answer> {
        client::request(self.address, "GET", host, path, None)
    }

    /// A POST of JSON through the proxy.
    pub fn post(&self, host: &str, path: &str, body: &Value) -> Result<Answer> {
        client::request(self.address, "POST", host, path, Some(&body.to_string()))
    }

    /// Signs the guestbook.
    pub fn sign(&self, host: &str, name: &str) -> Result<()> {
        let entry = serde_json::json!({ "name": name, "text": "a text" });
        let answer = self.post(host, "/api/entries", &entry)?;
        ensure!(answer.status == 201, "signing {host} was answered {}", answer.status);
        Ok(())
    }

    /// Names in the guestbook, oldest first.
    pub fn names(&self, host: &str) -> Result<Vec<String>> {
        let answer = self.get(host, "/api/entries")?;
        ensure!(answer.status == 200, "{host} answered {}: {}", answer.status, answer.text());
        let entries: Vec<Value> = serde_json::from_slice(&answer.body)?;
        let name = |entry: &Value| entry["name"].as_str().map(str::to_owned);
        Ok(entries.iter().rev().filter_map(name).collect())
    }

    /// Removes the local copy of a sleeping host, as when a box is lost.
    pub fn lose_copy(&self, host: &str) -> Result<()> {
        for folder in ["data/hosts", "data/.state"] {
            fs::remove_dir_all(self.path(folder).join(host))?;
        }
        Ok(())
    }

    /// All names in the guestbook's database, oldest first, read from the file itself.
    pub fn names_all(&self, host: &str) -> Result<Vec<String>> {
        names_in(&self.database(host))
    }

    /// All names that the guestbook has in the store now, by a restore.
    pub fn names_stored(&self, host: &str) -> Result<Vec<String>> {
        let file = self.path("stored.db");
        fs::remove_file(&file).ok();
        self.dormouse(&["restore", host, "--to", &file.display().to_string()])?;
        names_in(&file)
    }

    /// A log of the world.
    pub fn log(&self, name: &str) -> Result<String> {
        Ok(fs::read_to_string(self.path(name)).unwrap_or_default())
    }

    /// Stops activator and proxy properly, and checks that no instance is left.
    pub fn stop(mut self) -> Result<()> {
        self.end_proxy(Signal::SIGTERM)?;
        let ended = self.end_activator(Signal::SIGTERM);
        ended.with_context(|| self.log("activator.log").unwrap_or_default())?;
        self.end_guard(Signal::SIGTERM)?;
        let left = self.left_running();
        ensure!(left.is_empty(), "left running: {left:?}");
        Ok(())
    }

    /// Processes whose command line names this world.
    #[must_use]
    pub fn left_running(&self) -> Vec<i32> {
        let mark = self.dir.path().display().to_string();
        let own = std::process::id().to_string();
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        entries
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|pid| *pid != own)
            .filter_map(|pid| Some((pid.parse::<i32>().ok()?, pid)))
            .filter(|(_, pid)| {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                String::from_utf8_lossy(&line).contains(&mark)
            })
            .map(|(pid, _)| pid)
            .collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A failed test: nothing that it started may stay.
        let ours = [self.activator.take(), self.proxy.take(), self.guard.take()];
        for child in ours.into_iter().flatten() {
            end(Some(child), Signal::SIGKILL).ok();
        }
        for pid in self.left_running() {
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }
}

/// All names in a guestbook's database, oldest first.
pub fn names_in(database: &Path) -> Result<Vec<String>> {
    let database = rusqlite::Connection::open(database)?;
    let mut statement = database.prepare("SELECT name FROM entries ORDER BY id")?;
    let names = statement.query_map([], |row| row.get(0))?;
    Ok(names.collect::<rusqlite::Result<_>>()?)
}

fn pid(child: &Child) -> Result<Pid> {
    Ok(Pid::from_raw(i32::try_from(child.id())?))
}

fn end(child: Option<Child>, signal: Signal) -> Result<()> {
    let Some(mut child) = child else { return Ok(()) };
    kill(pid(&child)?, signal)?;
    until(PATIENCE, "a process ends", || Ok(child.try_wait()?.is_some()))
}
