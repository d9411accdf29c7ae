//! The three databases: a host's, one of `litestream replicate`, one of nobody.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rusqlite::Connection;

use crate::bench::process::clock;

const HOST: &str = "bench.test";
/// Uploads that do not come for so long do not come any more: Litestream looks once a second.
const QUIET: Duration = Duration::from_millis(1500);

/// A database that is written to, and where its replica lies.
pub(super) struct Target {
    pub(super) name: &'static str,
    /// Who replicates it.
    pub(super) pid: Option<Pid>,
    l0: Option<PathBuf>,
    app: Connection,
}

impl Target {
    fn new(name: &'static str, db: &Path, l0: Option<PathBuf>, pid: Option<Pid>) -> Result<Self> {
        let app = Connection::open(db)?;
        app.execute_batch(
            "PRAGMA busy_timeout = 20000; PRAGMA journal_mode = wal; PRAGMA synchronous = normal;
             CREATE TABLE IF NOT EXISTS bench (id INTEGER PRIMARY KEY, a)",
        )?;
        Ok(Self { name, pid, l0, app })
    }

    /// Rows of 200 bytes, each in a transaction of its own.
    pub(super) fn insert(&self, rows: u32) -> Result<()> {
        let mut statement =
            self.app.prepare_cached("INSERT INTO bench (a) VALUES (randomblob(200))")?;
        for _ in 0..rows {
            statement.execute(())?;
        }
        Ok(())
    }

    fn uploads(&self) -> Result<Vec<String>> {
        let Some(l0) = &self.l0 else { return Ok(Vec::new()) };
        let mut names = Vec::new();
        for entry in fs::read_dir(l0)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if Path::new(&name).extension().is_some_and(|ending| ending == "ltx") {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Where the next upload will lie.
    pub(super) fn next_l0(&self) -> Result<PathBuf> {
        let newest = self.uploads()?.pop().context("no upload yet")?;
        let digits = newest.get(..16).context("an odd name")?;
        let next = u64::from_str_radix(digits, 16)?.saturating_add(1);
        let l0 = self.l0.as_ref().context("nobody replicates it")?;
        Ok(l0.join(format!("{next:016x}-{next:016x}.ltx")))
    }

    /// Waits until no more uploads come.
    pub(super) fn settle(&self) -> Result<()> {
        if self.pid.is_none() {
            return Ok(());
        }
        let (mut seen, mut since) = (self.uploads()?.pop(), clock());
        until(PATIENCE, "uploads come to an end", || {
            let now = self.uploads()?.pop();
            if now != seen {
                (seen, since) = (now, clock());
            }
            Ok(since.elapsed() >= QUIET)
        })
    }
}

/// A child that is ended on drop, also when it is stopped.
pub(super) struct Owned(pub(super) Child);

impl Owned {
    pub(super) fn pid(&self) -> Result<Pid> {
        Ok(Pid::from_raw(i32::try_from(self.0.id())?))
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// All three.
pub(super) struct Targets {
    pub(super) ours: Target,
    pub(super) litestream: Target,
    off: Target,
    world: World,
    stock: Owned,
}

impl Targets {
    /// Starts the replicators on the core that the caller is on.
    pub(super) fn start(bin: &Path, litestream: &Path) -> Result<Self> {
        let plan = Plan { config: World::guestbook(bin, "fd"), ..Plan::default() };
        let world = World::started(bin, &plan)?;
        world.add(HOST, "guestbook")?;
        world.sign(HOST, "one")?;
        let l0 = world.path("store/dormouse").join(HOST).join("ltx/0");
        let ours =
            Target::new("ours", &world.database(HOST), Some(l0), Some(world.activator_pid()?))?;
        let folder = world.path("stock");
        fs::create_dir(&folder)?;
        let off = Target::new("off", &folder.join("off.db"), None, None)?;
        let database = folder.join("stock.db");
        let l0 = folder.join("replica/ltx/0");
        let mut theirs = Target::new("litestream", &database, Some(l0.clone()), None)?;
        theirs.insert(1)?;
        let stock = Owned(
            Command::new(litestream)
                .arg("replicate")
                .arg(database)
                .arg(format!("file://{}", folder.join("replica").display()))
                .env_remove("AWS_CA_BUNDLE")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()?,
        );
        theirs.pid = Some(stock.pid()?);
        until(PATIENCE, "litestream's first upload", || Ok(l0.is_dir()))?;
        off.insert(1)?;
        Ok(Self { ours, litestream: theirs, off, world, stock })
    }

    pub(super) const fn all(&self) -> [&Target; 3] {
        [&self.ours, &self.litestream, &self.off]
    }

    pub(super) fn folder(&self) -> &Path {
        self.world.folder()
    }

    /// Stops whoever replicates another one.
    pub(super) fn only(&self, target: &Target) -> Result<()> {
        for other in self.all() {
            let Some(pid) = other.pid else { continue };
            let signal = if other.name == target.name { Signal::SIGCONT } else { Signal::SIGSTOP };
            kill(pid, signal)?;
        }
        Ok(())
    }

    pub(super) fn stop(self) -> Result<()> {
        self.only(&self.ours)?;
        let Self { ours, litestream, off, world, stock } = self;
        drop((ours, litestream, off, stock));
        world.stop()
    }
}
