//! The three databases: a host's, one of `litestream replicate`, one of nobody.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use dormouse_test_store::FaultProxy;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rusqlite::Connection;

use crate::bench::process::clock;
use crate::bench::stores::{BUCKET, Remote, litestream_command, litestream_config};

const HOST: &str = "bench.test";
/// Uploads that do not come for so long do not come any more: Litestream looks once a second.
const QUIET: Duration = Duration::from_millis(1500);

/// Where finished uploads are seen.
enum Seen {
    Nowhere,
    /// A directory store's files of level 0.
    Folder(PathBuf),
    /// What a store behind this proxy has answered to uploads of level 0.
    Wire(Rc<FaultProxy>),
}

impl Seen {
    /// The names of all, oldest first.
    fn uploads(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        match self {
            Self::Nowhere => (),
            Self::Folder(l0) => {
                for entry in fs::read_dir(l0)? {
                    names.push(entry?.file_name().to_string_lossy().into_owned());
                }
            }
            Self::Wire(proxy) => {
                names.extend(proxy.answered().iter().filter_map(|line| uploaded(line)));
            }
        }
        let is_ltx = |name: &String| Path::new(name).extension().is_some_and(|end| end == "ltx");
        names.retain(is_ltx);
        names.sort();
        Ok(names)
    }

    fn has(&self, name: &str) -> Result<bool> {
        Ok(match self {
            Self::Folder(l0) => l0.join(name).exists(),
            Self::Nowhere | Self::Wire(_) => self.uploads()?.iter().any(|seen| seen == name),
        })
    }
}

/// The file's name, where a request's first line is the upload of an L0.
fn uploaded(line: &str) -> Option<String> {
    let path = line.strip_prefix("PUT ")?.split([' ', '?']).next()?;
    let (folder, name) = path.rsplit_once('/')?;
    folder.ends_with("/0000").then(|| name.to_owned())
}

/// A database that is written to, and where its replica lies.
pub(super) struct Target {
    pub(super) name: &'static str,
    /// Who replicates it.
    pub(super) pid: Option<Pid>,
    seen: Seen,
    app: Connection,
}

impl Target {
    fn new(name: &'static str, db: &Path, seen: Seen, pid: Option<Pid>) -> Result<Self> {
        let app = Connection::open(db)?;
        app.execute_batch(
            "PRAGMA busy_timeout = 20000; PRAGMA journal_mode = wal; PRAGMA synchronous = normal;
             CREATE TABLE IF NOT EXISTS bench (id INTEGER PRIMARY KEY, a)",
        )?;
        Ok(Self { name, pid, seen, app })
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

    /// The name of the next upload.
    pub(super) fn next_l0(&self) -> Result<String> {
        let newest = self.seen.uploads()?.pop().context("no upload yet")?;
        let digits = newest.get(..16).context("an odd name")?;
        let next = u64::from_str_radix(digits, 16)?.saturating_add(1);
        Ok(format!("{next:016x}-{next:016x}.ltx"))
    }

    /// This upload is done.
    pub(super) fn is_durable(&self, name: &str) -> Result<bool> {
        self.seen.has(name)
    }

    /// Waits until no more uploads come.
    pub(super) fn settle(&self) -> Result<()> {
        if self.pid.is_none() {
            return Ok(());
        }
        let (mut seen, mut since) = (self.seen.uploads()?.pop(), clock());
        until(PATIENCE, "uploads come to an end", || {
            let now = self.seen.uploads()?.pop();
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
    /// Starts the replicators on the core that the caller is on, into directories.
    pub(super) fn start(bin: &Path, litestream: &Path) -> Result<Self> {
        let plan = Plan { config: World::guestbook(bin, "fd"), ..Plan::default() };
        let world = World::started(bin, &plan)?;
        let ours = Seen::Folder(world.path("store/dormouse").join(HOST).join("ltx/0"));
        let replica = world.path("stock/replica");
        let mut command = Command::new(litestream);
        command.arg("replicate").arg(world.path("stock/stock.db"));
        command.arg(format!("file://{}", replica.display()));
        Self::with(world, ours, Seen::Folder(replica.join("ltx/0")), command)
    }

    /// The same into a real store, each through a proxy of its own with this round trip.
    pub(super) fn start_remote(
        bin: &Path,
        litestream: &Path,
        remote: &Remote,
        round_trip: Duration,
    ) -> Result<Self> {
        let [mine, other] = [remote.behind(round_trip)?, remote.behind(round_trip)?];
        let section = remote.server.section(&mine.endpoint(), BUCKET, "ours")?;
        let plan = Plan {
            config: World::guestbook(bin, "fd"),
            store_section: Some(section),
            ..Plan::default()
        };
        let world = World::started(bin, &plan)?;
        let (folder, database) = (world.path("stock"), world.path("stock/stock.db"));
        fs::create_dir(&folder)?;
        let config = litestream_config(&folder, &database, &other.endpoint(), "stock")?;
        let mut command = litestream_command(litestream);
        command.args(["replicate", "-config"]).arg(config);
        Self::with(world, Seen::Wire(Rc::new(mine)), Seen::Wire(Rc::new(other)), command)
    }

    fn with(world: World, ours: Seen, theirs: Seen, mut command: Command) -> Result<Self> {
        world.add(HOST, "guestbook")?;
        world.sign(HOST, "one")?;
        let ours = Target::new("ours", &world.database(HOST), ours, Some(world.activator_pid()?))?;
        let folder = world.path("stock");
        fs::create_dir_all(&folder)?;
        let off = Target::new("off", &folder.join("off.db"), Seen::Nowhere, None)?;
        let mut theirs = Target::new("litestream", &folder.join("stock.db"), theirs, None)?;
        theirs.insert(1)?;
        let stock = Owned(
            command
                .env_remove("AWS_CA_BUNDLE")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()?,
        );
        theirs.pid = Some(stock.pid()?);
        for target in [&ours, &theirs] {
            let what = format!("the first upload of {}", target.name);
            until(PATIENCE, &what, || Ok(target.seen.uploads().is_ok_and(|all| !all.is_empty())))?;
        }
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
        let Target { app, seen, .. } = ours;
        drop((app, litestream, off, stock));
        let stopped = world.stop();
        // A proxy before the store: needed until the last upload.
        drop(seen);
        stopped
    }
}
