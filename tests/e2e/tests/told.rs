//! What people are told: of a replica that is not what it seems, of a full disk, and by the command
//! line's errors.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dormouse_e2e::programs;
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;

const HOST: &str = "a.test";

fn world(config: &str) -> Result<World> {
    let bin = programs()?;
    let config = format!("{config}{}", World::guestbook(&bin, "path"));
    let world = World::started(&bin, &Plan { config, ..Plan::default() })?;
    world.add(HOST, "guestbook")?;
    Ok(world)
}

fn replica(world: &World) -> Result<String> {
    Ok(world.host(HOST)?["replica"].as_str().unwrap_or_default().to_owned())
}

fn problem(world: &World) -> Result<String> {
    Ok(world.host(HOST)?["problem"].as_str().unwrap_or_default().to_owned())
}

fn side(database: &Path, ending: &str) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// As a person does who puts a backup in place: the file, and nothing beside it.
fn swap(world: &World) -> Result<()> {
    let (database, backup) = (world.database(HOST), world.path("backup.db"));
    let name = backup.display().to_string();
    rusqlite::Connection::open(&database)?.execute("VACUUM INTO ?1", [name])?;
    rusqlite::Connection::open(&backup)?.pragma_update(None, "journal_mode", "wal")?;
    fs::remove_file(side(&database, "-wal"))?;
    fs::remove_file(side(&database, "-shm"))?;
    Ok(fs::rename(backup, database)?)
}

#[test]
fn an_app_whose_database_was_swapped_is_detached_until_it_has_let_go_of_the_former() -> Result<()> {
    let mut world = world("")?;
    world.sign(HOST, "one")?;
    until(PATIENCE, "it is durable", || Ok(world.host(HOST)?["lag_ms"] == 0))?;
    swap(&world)?;
    world.sign(HOST, "lost")?;
    let detached = |world: &World| {
        let replica = replica(world)?;
        Ok(replica.starts_with("detached: ") && replica.contains("former file"))
    };
    until(PATIENCE, "it is told", || detached(&world))?;
    ensure!(world.host(HOST)?["lag_ms"].as_u64() > Some(0), "{}", world.host(HOST)?);
    // Another activator finds the same.
    world.end_activator(Signal::SIGKILL)?;
    world.start_activator()?;
    until(PATIENCE, "it is told again", || detached(&world))
        .with_context(|| world.log("activator.log").unwrap_or_default())?;
    let names = world.names(HOST).with_context(|| problem(&world).unwrap_or_default())?;
    ensure!(names == ["one", "lost"], "and the app was left alone");
    let asleep = world.dormouse(&["sleep", HOST])?;
    ensure!(asleep.contains("asleep"), "{asleep}");
    ensure!(world.names_stored(HOST)? == ["one"], "the file in its place was uploaded");
    let names = world.names(HOST).with_context(|| problem(&world).unwrap_or_default())?;
    ensure!(names == ["one"]);
    world.sign(HOST, "two")?;
    until(PATIENCE, "it is followed", || Ok(replica(&world)? == "following"))?;
    world.dormouse(&["sleep", HOST])?;
    ensure!(world.names_stored(HOST)? == ["one", "two"]);
    world.stop()
}

#[test]
fn a_host_whose_uploads_wait_for_the_session_says_what_the_store_says() -> Result<()> {
    let world = world("[session]\nttl = \"1s\"\nmargin = \"300ms\"\n")?;
    world.sign(HOST, "one")?;
    let (store, aside) = (world.path("store"), world.path("aside"));
    fs::rename(&store, &aside)?;
    world.sign(HOST, "two")?;
    until(PATIENCE, "the cause is told", || {
        let replica = replica(&world)?;
        Ok(replica.contains("session is not renewed") && replica.contains("the store: away: "))
    })?;
    fs::rename(&aside, &store)?;
    until(PATIENCE, "all is uploaded", || Ok(replica(&world)? == "following"))?;
    world.stop()
}

/// A small file system of our own, gone when dropped.
struct SmallDisk(PathBuf);

impl Drop for SmallDisk {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).ok();
    }
}

#[test]
fn a_sleep_on_a_full_disk_tells_it_at_once_and_is_not_waited_for() -> Result<()> {
    let bin = programs()?;
    let app = World::guestbook(&bin, "path").replace("\"stream\"", "\"batched\"");
    let config = format!("{app}[replica]\ndisk_free_min_mib = 0\n");
    let world = World::new(&bin, &Plan { config, ..Plan::default() })?;
    let state = world.path("data/.state").join(HOST);
    fs::create_dir_all(&state)?;
    mount(Some("dm"), &state, Some("tmpfs"), MsFlags::empty(), Some("size=2m"))
        .context("this test mounts a small file system: run it as root")?;
    let _disk = SmallDisk(state.clone());
    let mut world = world;
    world.start_activator()?;
    world.start_proxy()?;
    world.add(HOST, "guestbook")?;
    world.sign(HOST, "one")?;
    let filler = state.join("filler");
    // As much as fits: the write that fails is the point.
    fs::write(&filler, vec![0; 4 << 20]).unwrap_err();
    world.dormouse(&["sleep", HOST, "--no-wait"])?;
    until(PATIENCE, "the full disk is told", || {
        let host = world.host(HOST)?;
        let is_told = problem(&world)?.to_lowercase().contains("no ");
        Ok(host["state"] == "saving" && host["unsynced"] == true && is_told)
    })?;
    until(Duration::from_secs(10), "it is asleep", || Ok(world.host(HOST)?["state"] == "asleep"))?;
    let host = world.host(HOST)?;
    ensure!(host["unsynced"] == true && problem(&world)?.contains("space"), "{host}");
    // A visit meanwhile hears of the disk, not of a database that were unfit.
    let answer = world.get(HOST, "/")?;
    ensure!(answer.field("x-dormouse-reason") == Some("wake-failed"), "{}", answer.head);
    fs::remove_file(&filler)?;
    until(PATIENCE, "it is served again", || Ok(world.get(HOST, "/")?.status == 200))?;
    let names = world.names(HOST).with_context(|| problem(&world).unwrap_or_default())?;
    ensure!(names == ["one"], "nothing is lost");
    world.dormouse(&["sleep", HOST])?;
    ensure!(world.host(HOST)?["unsynced"] == false, "{}", world.host(HOST)?);
    ensure!(world.names_stored(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn an_app_that_locks_its_database_exclusively_is_refused_by_name() -> Result<()> {
    let bin = programs()?;
    let config = World::guestbook(&bin, "path").replace("\"{db}\"]", "\"{db}\", \"--exclusive\"]");
    let world = World::started(&bin, &Plan { config, ..Plan::default() })?;
    world.add(HOST, "guestbook")?;
    let said = world.dormouse_fails(&["wake", HOST], 1)?;
    ensure!(said.contains("locking_mode=EXCLUSIVE"), "{said}");
    let answer = world.get(HOST, "/")?;
    ensure!(answer.field("x-dormouse-reason") == Some("database-unfit"), "{}", answer.head);
    world.stop()
}

#[test]
fn the_command_line_names_what_is_missing() -> Result<()> {
    let world = world("")?;
    world.sign(HOST, "one")?;
    let asleep = world.dormouse(&["sleep", HOST])?;
    ensure!(asleep.contains("asleep"), "{asleep}");
    let store = world.path("store").display().to_string();
    let to = world.path("x.db").display().to_string();
    for args in [vec!["restore", "b.test", "--to", &to], vec!["verify", "b.test"]] {
        let said = world.dormouse_fails(&args, 1)?;
        ensure!(said.contains(&store) && said.contains("prefix dormouse"), "{said}");
    }
    let said = world.dormouse_fails(&["restore", HOST, "--to", "/nonexist/dir/x.db"], 1)?;
    ensure!(said.contains("/nonexist/dir: no such directory"), "{said}");
    let usage = world.dormouse_fails(&["restore", HOST], 2)?;
    ensure!(usage.contains("(--to <FILE> | --dry-run)"), "{usage}");
    let usage = world.dormouse_fails(&["hibernate", HOST], 2)?;
    ensure!(usage.contains("--off") && usage.contains("--on"), "{usage}");
    let said = world.dormouse_fails(&["wait", HOST, "--state", "bogus"], 1)?;
    ensure!(said.contains("allowed: outside, asleep, leasing"), "{said}");
    world.dormouse(&["restore", HOST, "--to", &to])?;
    let mode = fs::metadata(&to)?.permissions().mode();
    ensure!(mode & 0o777 == 0o600, "{mode:o}");
    world.stop()
}
