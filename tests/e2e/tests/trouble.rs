//! Bad input and bad machines: a clear error to client and log, and nothing lost.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use dormouse_e2e::programs;
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const HOST: &str = "a.test";

fn world_with(config: &str) -> Result<World> {
    let bin = programs()?;
    let config = format!("{}{config}", World::guestbook(&bin, "path"));
    World::started(&bin, &Plan { config, idle: "300ms".to_owned(), ..Plan::default() })
}

/// A served and sleeping host with these names signed, each in an upload of its own.
fn asleep_with(names: &[&str]) -> Result<World> {
    // No level above the uploads covers what a test takes away of them.
    let world = world_with("[replica]\nlevel_1 = \"1h\"\nlevel_2 = \"1h\"\n")?;
    world.add(HOST, "guestbook")?;
    for name in names {
        world.sign(HOST, name)?;
        world.wait_state(HOST, "asleep")?;
    }
    Ok(world)
}

fn refused(world: &World, reason: &str) -> Result<()> {
    let answer = world.get(HOST, "/")?;
    let said = format!("{} {}", answer.head, answer.text());
    ensure!(answer.status == 503, "{said}");
    ensure!(answer.field("x-dormouse-reason") == Some(reason), "want {reason}: {said}");
    ensure!(answer.field("retry-after").is_some(), "{said}");
    Ok(())
}

fn problem(world: &World) -> Result<String> {
    Ok(world.host(HOST)?["problem"].as_str().unwrap_or_default().to_owned())
}

fn level_0(world: &World) -> Result<Vec<PathBuf>> {
    let folder = world.path("store/dormouse").join(HOST).join("ltx/0");
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    Ok(files)
}

#[test]
fn an_executable_that_is_missing_or_exits_at_once_is_named() -> Result<()> {
    for (command, says) in [
        ("[\"/nowhere/app\", \"{socket}\"]", "/nowhere/app"),
        ("[\"/bin/sh\", \"-c\", \"exit 3\", \"{socket}\"]", "exited with status 3"),
    ] {
        let world = world_with(&format!("[app.bad]\ncommand = {command}\n"))?;
        world.add(HOST, "bad")?;
        refused(&world, "broken")?;
        let problem = problem(&world)?;
        ensure!(problem.contains(says), "{problem}");
        ensure!(world.log("activator.log")?.contains(says), "in the log too");
        for _ in 0..30 {
            refused(&world, "broken")?;
        }
        let log = world.log("activator.log")?;
        let lines = log.lines().filter(|line| line.contains("refused")).count();
        ensure!(lines == 1, "clients do not drive the log: {log}");
        world.stop()?;
    }
    Ok(())
}

#[test]
fn an_app_that_cannot_start_costs_no_upload_and_loses_nothing() -> Result<()> {
    let world =
        world_with("[app.bad]\nlisten = \"fd\"\ncommand = [\"/bin/sh\", \"-c\", \"exit 3\"]\n")?;
    world.add(HOST, "guestbook")?;
    world.sign(HOST, "one")?;
    world.wait_state(HOST, "asleep")?;
    let before = level_0(&world)?;
    world.dormouse(&["rm", HOST])?;
    world.add(HOST, "bad")?;
    for _ in 0..2 {
        let answer = world.get(HOST, "/")?;
        // Its socket is bound for it: it may take the request along before its end is known.
        let said = (answer.status, answer.field("x-dormouse-reason"));
        let known = [(503, Some("broken")), (502, Some("bad-gateway"))];
        ensure!(known.contains(&said), "{said:?}: {}", answer.text());
        world.wait_state(HOST, "asleep")?;
    }
    ensure!(level_0(&world)? == before, "{:?}", level_0(&world)?);
    world.dormouse(&["rm", HOST])?;
    world.add(HOST, "guestbook")?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

/// Out of the way, whatever a sleep has made of the L0s: a snapshot would cover them.
fn without_snapshots<T>(world: &World, then: impl FnOnce() -> Result<T>) -> Result<T> {
    let snapshots = world.path("store/dormouse").join(HOST).join("ltx/9");
    let aside = world.path("snapshots");
    let is_there = snapshots.exists();
    if is_there {
        fs::rename(&snapshots, &aside)?;
    }
    let done = then()?;
    if is_there {
        fs::rename(&aside, &snapshots)?;
    }
    Ok(done)
}

#[test]
fn a_corrupt_or_torn_replica_refuses_to_start_the_host() -> Result<()> {
    type Damage = fn(&mut Vec<u8>);
    let flipped: Damage = |bytes| {
        // In the file's checksum: a flip inside a compressed page may not change the page.
        if let Some(last) = bytes.last_mut() {
            *last ^= 0x40;
        }
    };
    let torn: Damage = |bytes| bytes.truncate(bytes.len() / 2);
    for damage in [flipped, torn] {
        let world = asleep_with(&["one", "two"])?;
        world.lose_copy(HOST)?;
        let files = level_0(&world)?;
        let last = files.last().context("an L0")?;
        let good = fs::read(last)?;
        let mut bytes = good.clone();
        damage(&mut bytes);
        fs::write(last, &bytes)?;
        without_snapshots(&world, || refused(&world, "replica-damaged"))?;
        ensure!(!world.database(HOST).exists(), "nothing older is put in its place");
        fs::write(last, &good)?;
        world.wait_state(HOST, "asleep")?;
        ensure!(world.names(HOST)? == ["one", "two"], "repaired, it is all there");
        world.stop()?;
    }
    Ok(())
}

#[test]
fn a_gap_in_the_replica_refuses_to_start_the_host() -> Result<()> {
    let world = asleep_with(&["one", "two", "three"])?;
    world.lose_copy(HOST)?;
    let files = level_0(&world)?;
    ensure!(files.len() >= 3, "{files:?}");
    let aside = world.path("aside");
    fs::rename(&files[1], &aside)?;
    without_snapshots(&world, || refused(&world, "replica-damaged"))?;
    fs::rename(&aside, &files[1])?;
    world.wait_state(HOST, "asleep")?;
    ensure!(world.names(HOST)? == ["one", "two", "three"]);
    world.stop()
}

#[test]
fn a_replica_that_vanished_is_never_replaced_by_an_empty_database() -> Result<()> {
    let world = asleep_with(&["one"])?;
    world.lose_copy(HOST)?;
    let folder = world.path("store/dormouse").join(HOST).join("ltx");
    fs::remove_dir_all(&folder)?;
    // The next activator asks the store, and finds what the record says is not there.
    let mut world = world;
    world.end_activator(Signal::SIGTERM)?;
    world.start_activator()?;
    refused(&world, "replica-damaged")?;
    ensure!(!world.database(HOST).exists());
    world.stop()
}

#[test]
fn a_store_outage_stops_no_app_and_everything_is_uploaded_afterwards() -> Result<()> {
    let world = world_with("[session]\nttl = \"1s\"\nmargin = \"300ms\"\n")?;
    world.add(HOST, "guestbook")?;
    world.sign(HOST, "before")?;
    let (store, aside) = (world.path("store"), world.path("aside"));
    fs::rename(&store, &aside)?;
    until(PATIENCE, "the session cannot be renewed", || {
        world.sign(HOST, "during")?;
        Ok(world.status()?["session"] == "unrenewed")
    })?;
    until(PATIENCE, "the host is seen to lag", || Ok(world.host(HOST)?["lag_ms"] != 0))?;
    let rows = world.names(HOST)?;
    fs::rename(&aside, &store)?;
    world.wait_state(HOST, "asleep")?;
    world.lose_copy(HOST)?;
    ensure!(world.names(HOST)? == rows, "everything was uploaded");
    world.stop()
}

/// Rows that a restore by hand finds in the store.
fn rows_in_store(world: &World, copy: &str) -> Result<i64> {
    let to = world.path(copy);
    world.dormouse(&["restore", HOST, "--to", &to.display().to_string()])?;
    let database = rusqlite::Connection::open(&to)?;
    let rows = database.query_row("SELECT count(*) FROM entries", [], |row| row.get(0))?;
    drop(database);
    fs::remove_file(to)?;
    Ok(rows)
}

fn batched(extra: &str) -> Result<World> {
    let bin = programs()?;
    let app = World::guestbook(&bin, "path").replace("\"stream\"", "\"batched\"");
    let world = World::started(&bin, &Plan { config: format!("{extra}{app}"), ..Plan::default() })?;
    world.add(HOST, "guestbook")?;
    Ok(world)
}

#[test]
fn what_a_killed_activator_left_behind_is_uploaded_without_a_visit() -> Result<()> {
    let mut world = batched("")?;
    world.sign(HOST, "1")?;
    world.dormouse(&["sleep", HOST])?;
    world.wait_state(HOST, "asleep")?;
    for name in ["2", "3", "4", "5"] {
        world.sign(HOST, name)?;
    }
    let pid = i32::try_from(world.host(HOST)?["pid"].as_i64().context("it runs")?)?;
    world.end_activator(Signal::SIGKILL)?;
    // Not to be taken over: it is gone, too.
    kill(Pid::from_raw(pid), Signal::SIGKILL)?;
    until(PATIENCE, "the instance is gone", || Ok(kill(Pid::from_raw(pid), None).is_err()))?;
    world.start_activator()?;
    until(PATIENCE, "all is in the store", || Ok(world.host(HOST)?["unsynced"] == false))?;
    ensure!(rows_in_store(&world, "copy.db")? == 5);
    ensure!(world.host(HOST)?["state"] == "asleep", "and nothing was started for it");
    world.stop()
}

#[test]
fn what_a_sleep_during_an_outage_left_behind_is_told_and_uploaded_afterwards() -> Result<()> {
    let world = batched("sync = \"500ms\"\n[session]\nttl = \"1s\"\nmargin = \"300ms\"\n")?;
    world.sign(HOST, "1")?;
    let (store, aside) = (world.path("store"), world.path("aside"));
    fs::rename(&store, &aside)?;
    world.sign(HOST, "2")?;
    world.dormouse(&["sleep", HOST])?;
    world.wait_state(HOST, "asleep")?;
    ensure!(world.host(HOST)?["unsynced"] == true, "lag is visible");
    ensure!(world.dormouse(&["status"])?.contains("not all in the store yet"));
    fs::rename(&aside, &store)?;
    until(PATIENCE * 3, "all is in the store", || Ok(world.host(HOST)?["unsynced"] == false))?;
    ensure!(rows_in_store(&world, "copy.db")? == 2);
    world.stop()
}

#[test]
fn an_instance_is_found_again_when_the_run_directory_is_gone() -> Result<()> {
    let mut world = world_with("")?;
    world.add(HOST, "guestbook")?;
    world.sign(HOST, "one")?;
    let first = world.host(HOST)?["pid"].clone();
    world.end_activator(Signal::SIGKILL)?;
    world.end_proxy(Signal::SIGKILL)?;
    fs::remove_dir_all(world.path("run"))?;
    world.start_activator()?;
    world.start_proxy()?;
    ensure!(world.log("activator.log")?.contains("stopping a leftover instance"));
    let pid = first.as_i64().context("it ran")?;
    until(PATIENCE, "the leftover is gone", || {
        Ok(!Path::new(&format!("/proc/{pid}/cmdline")).exists())
    })?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn a_restore_by_hand_touches_nothing_that_lies_beside_its_file() -> Result<()> {
    let world = asleep_with(&["one"])?;
    let to = world.path("notes.db").display().to_string();
    let (precious, wal) = (world.path("notes.db.tmp"), world.path("notes.db-wal"));
    fs::write(&precious, "precious")?;
    fs::write(&wal, "precious")?;
    let error = world.dormouse(&["restore", HOST, "--to", &to]).unwrap_err().to_string();
    ensure!(error.contains("notes.db-wal") && error.contains("exists already"), "{error}");
    fs::remove_file(&wal)?;
    world.dormouse(&["restore", HOST, "--to", &to])?;
    ensure!(fs::read_to_string(&precious)? == "precious");
    world.stop()
}

#[test]
fn a_name_of_our_own_files_can_be_a_host_and_a_name_of_the_store_cannot() -> Result<()> {
    let mut world = world_with("")?;
    world.add("journal.new", "guestbook")?;
    ensure!(world.get("journal.new", "/")?.status == 200);
    let error = world.dormouse(&["add", "sessions", "--app", "guestbook"]).unwrap_err().to_string();
    ensure!(error.contains("the store keeps its own things"), "{error}");
    let error = world.dormouse(&["wait", "journal.new", "--state", "awke"]).unwrap_err();
    ensure!(error.to_string().contains("allowed"), "{error}");
    world.end_activator(Signal::SIGTERM)?;
    world.start_activator()?;
    world.stop()
}

#[test]
fn a_store_that_is_away_does_not_hold_up_a_shutdown() -> Result<()> {
    let mut world = asleep_with(&["one"])?;
    let (store, aside) = (world.path("store"), world.path("aside"));
    fs::rename(&store, &aside)?;
    world.end_activator(Signal::SIGTERM)?;
    fs::rename(&aside, &store)?;
    world.start_activator()?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn another_store_at_the_same_place_is_refused() -> Result<()> {
    let mut world = asleep_with(&["one"])?;
    world.end_activator(Signal::SIGTERM)?;
    let (store, aside) = (world.path("store"), world.path("aside"));
    fs::rename(&store, &aside)?;
    let log = world.activator_refuses()?;
    ensure!(log.contains("is its disk mounted"), "{log}");
    fs::remove_dir_all(&store)?;
    fs::rename(&aside, &store)?;
    world.start_activator()?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn a_registry_of_a_newer_version_is_refused_and_left_alone() -> Result<()> {
    let mut world = asleep_with(&["one"])?;
    world.end_activator(Signal::SIGTERM)?;
    let path = world.path("data/registry.db");
    let registry = rusqlite::Connection::open(&path)?;
    let ours: i64 = registry.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    registry.pragma_update(None, "user_version", 99)?;
    drop(registry);
    let log = world.activator_refuses()?;
    ensure!(log.contains("version 99") && log.contains("newer program"), "{log}");
    let registry = rusqlite::Connection::open(&path)?;
    registry.pragma_update(None, "user_version", ours)?;
    drop(registry);
    world.start_activator()?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn a_second_activator_on_the_same_state_directory_is_refused() -> Result<()> {
    let mut world = world_with("")?;
    let log = world.activator_refuses()?;
    ensure!(log.contains("another activator runs"), "{log}");
    world.stop()
}

#[test]
fn an_unknown_host_an_unknown_app_and_a_bad_name_are_told_apart() -> Result<()> {
    let world = world_with("")?;
    let answer = world.get("nobody.test", "/")?;
    ensure!(answer.status == 404, "{}", answer.head);
    let app = world.dormouse(&["add", HOST, "--app", "nope"]).unwrap_err().to_string();
    ensure!(app.contains("allowed") && app.contains("guestbook"), "{app}");
    let name = world.dormouse(&["add", "a/b", "--app", "guestbook"]).unwrap_err().to_string();
    ensure!(name.contains("cannot be a host") && name.contains("allowed"), "{name}");
    world.add(HOST, "guestbook")?;
    let twice = world.dormouse(&["add", HOST, "--app", "guestbook"]).unwrap_err().to_string();
    ensure!(twice.contains("already"), "{twice}");
    let bill = world.dormouse_fails(&["status", "nobody.test", "--cost"], 1)?;
    ensure!(bill.contains("nobody.test is not served here"), "{bill}");
    world.dormouse(&["status", HOST, "--cost"])?;
    world.stop()
}

#[test]
fn an_app_that_ignores_sigterm_is_killed_after_its_grace() -> Result<()> {
    let bin = programs()?;
    let config = format!(
        "grace = \"300ms\"\n[app.stubborn]\ncommand = [\"{}\", \"--ignore-sigterm\", \"--socket\", \
         \"{{socket}}\", \"--db\", \"{{db}}\"]\nhealth = \"/healthz\"\nreplication = \"stream\"\n",
        bin.join("guestbook").display()
    );
    let plan = Plan { config, idle: "300ms".to_owned(), ..Plan::default() };
    let world = World::started(&bin, &plan)?;
    world.add(HOST, "stubborn")?;
    world.sign(HOST, "one")?;
    world.wait_state(HOST, "asleep")?;
    ensure!(world.metrics()?.get("dormouse_graces_ended_total") == Some(&1.0));
    world.lose_copy(HOST)?;
    ensure!(world.names(HOST)? == ["one"], "killed, and still nothing is lost");
    world.stop()
}

/// A small file system of our own, gone when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn at(path: PathBuf, options: &str) -> Result<Self> {
        fs::create_dir_all(&path)?;
        mount(Some("dm"), &path, Some("tmpfs"), MsFlags::empty(), Some(options))
            .context("this test mounts a small file system: run it as root")?;
        Ok(Self(path))
    }

    fn read_only(&self, on: bool) -> Result<()> {
        let flags = if on { MsFlags::MS_RDONLY } else { MsFlags::empty() };
        let flags = flags | MsFlags::MS_REMOUNT;
        Ok(mount(None::<&str>, &self.0, None::<&str>, flags, None::<&str>)?)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).ok();
    }
}

#[test]
fn a_full_disk_during_a_restore_is_a_clear_error_and_the_host_comes_back() -> Result<()> {
    let world = asleep_with(&["one"])?;
    world.lose_copy(HOST)?;
    let disk = SmallDisk::at(world.path("data/.state").join(HOST), "size=64k")?;
    let filler = world.path("data/.state").join(HOST).join("filler");
    // As much as fits: the write that fails is the point.
    fs::write(&filler, vec![0; 128 * 1024]).unwrap_err();
    refused(&world, "wake-failed")?;
    let said = problem(&world)?;
    ensure!(said.contains("no room on the disk"), "{said}");
    drop(disk);
    world.wait_state(HOST, "asleep")?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn a_read_only_data_directory_is_a_clear_error_and_nothing_is_lost() -> Result<()> {
    let world = asleep_with(&["one"])?;
    world.lose_copy(HOST)?;
    let disk = SmallDisk::at(world.path("data/.state").join(HOST), "size=8m")?;
    disk.read_only(true)?;
    refused(&world, "wake-failed")?;
    let said = problem(&world)?;
    ensure!(said.contains("Read-only"), "{said}");
    drop(disk);
    world.wait_state(HOST, "asleep")?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn a_bad_config_names_file_key_and_what_is_allowed() -> Result<()> {
    let bin = programs()?;
    let plan = Plan { config: "[edge.limits]\nwaiter = 1\n".to_owned(), ..Plan::default() };
    let world = World::new(&bin, &plan)?;
    for (program, args) in [("dormouse", ["config", "check"]), ("dormouse-proxy", ["", ""])] {
        let output = Command::new(bin.join(program))
            .arg("--config")
            .arg(world.config())
            .args(args.iter().filter(|arg| !arg.is_empty()))
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success());
        for part in ["dormouse.toml", "waiter", "expected one of", "waiters_per_host"] {
            ensure!(said.contains(part), "{program} does not say {part:?}: {said}");
        }
        let nowhere = Command::new(bin.join(program))
            .args(["--config", "/nowhere"])
            .args(args.iter().filter(|arg| !arg.is_empty()))
            .output()?;
        let said = String::from_utf8_lossy(&nowhere.stderr).into_owned();
        ensure!(said.matches("os error 2").count() == 1, "{program}: {said}");
    }
    Ok(())
}

#[test]
fn a_command_without_an_activator_says_where_it_looked() -> Result<()> {
    let world = World::new(&programs()?, &Plan::default())?;
    let error = world.dormouse(&["status"]).unwrap_err().to_string();
    ensure!(error.contains("admin.sock") && error.contains("dormouse serve"), "{error}");
    Ok(())
}

#[test]
fn a_restore_by_hand_gives_the_rows_and_never_overwrites() -> Result<()> {
    let world = asleep_with(&["one", "two"])?;
    let to = world.path("copy.db");
    let to_text = to.display().to_string();
    world.dormouse(&["restore", HOST, "--to", &to_text])?;
    let copy = rusqlite::Connection::open(&to)?;
    let count: i64 = copy.query_row("SELECT count(*) FROM entries", [], |row| row.get(0))?;
    ensure!(count == 2);
    drop(copy);
    // As the documentation has it: a bare name.
    let bare = std::process::Command::new(programs()?.join("dormouse"))
        .current_dir(world.folder())
        .arg("--config")
        .arg(world.config())
        .args(["restore", HOST, "--to", "bare.db"])
        .status()?;
    ensure!(bare.success() && fs::read(world.path("bare.db"))? == fs::read(&to)?);
    let error = world.dormouse(&["restore", HOST, "--to", &to_text]).unwrap_err().to_string();
    ensure!(error.contains("exists already"), "{error}");
    let none = world.path("none.db").display().to_string();
    let error = world.dormouse(&["restore", "b.test", "--to", &none]).unwrap_err().to_string();
    ensure!(error.contains("the replica is empty"), "{error}");
    world.stop()
}

#[test]
fn a_reader_that_has_enough_is_no_error_of_a_command() -> Result<()> {
    let world = world_with("")?;
    for number in 0..8 {
        world.add(&format!("h{number}.test"), "guestbook")?;
    }
    let program = programs()?.join("dormouse");
    let script = format!("{} --config {} list | true", program.display(), world.config().display());
    let output =
        Command::new("bash").args(["-c", &format!("set -o pipefail; {script}")]).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!said.contains("panicked"), "{said}");
    let error = world.dormouse(&["takeover", "a b"]).unwrap_err().to_string();
    ensure!(error.contains("cannot be a box's name"), "{error}");
    world.stop()
}

#[test]
fn a_wal_past_its_cap_lets_the_app_reuse_it_and_a_whole_image_follows() -> Result<()> {
    let bin = programs()?;
    let config = format!("{}[replica]\nwal_max_mib = 1\n", World::guestbook(&bin, "path"));
    let world = World::started(&bin, &Plan { config, ..Plan::default() })?;
    world.add(HOST, "guestbook")?;
    world.sign(HOST, "one")?;
    // A reader that never ends: no checkpoint completes.
    let reader = rusqlite::Connection::open(world.database(HOST))?;
    reader.execute_batch("BEGIN")?;
    reader.query_row("SELECT count(*) FROM entries", (), |row| row.get::<_, i64>(0))?;
    let writer = rusqlite::Connection::open(world.database(HOST))?;
    writer.busy_timeout(PATIENCE)?;
    let let_go = || {
        writer.execute_batch(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 400)
             INSERT INTO entries (name, text) SELECT 'bulk', hex(randomblob(2000)) FROM n",
        )?;
        Ok(world.log("activator.log")?.contains("WalTooLong"))
    };
    until(PATIENCE, "the read lock is let go, and said to be", let_go)?;
    drop(writer);
    drop(reader);
    let rows = world.names_all(HOST)?.len();
    until(PATIENCE, "everything is uploaded", || {
        let host = world.host(HOST)?;
        Ok(host["lag_ms"] == 0 && host["replica"] == "following")
    })?;
    world.dormouse(&["sleep", HOST])?;
    world.wait_state(HOST, "asleep")?;
    world.lose_copy(HOST)?;
    ensure!(world.get(HOST, "/healthz")?.status == 200);
    ensure!(world.names_all(HOST)?.len() == rows, "{rows} rows");
    world.stop()
}
