//! Restores by hand, checks and drills, through the real programs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use dormouse_e2e::programs;
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World, names_in};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;

const HOST: &str = "a.test";

fn world(config: &str) -> Result<World> {
    let bin = programs()?;
    let config = format!("{}{config}", World::guestbook(&bin, "path"));
    let world = World::started(&bin, &Plan { config, ..Plan::default() })?;
    world.add(HOST, "guestbook")?;
    Ok(world)
}

fn sleep(world: &World) -> Result<()> {
    world.dormouse(&["sleep", HOST])?;
    world.wait_state(HOST, "asleep")
}

/// `dormouse --json ARGS`.
fn told(world: &World, args: &[&str]) -> Result<Value> {
    let all: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
    Ok(serde_json::from_str(&world.dormouse(&all)?)?)
}

fn text(world: &World, name: &str) -> String {
    world.path(name).display().to_string()
}

fn ltx(world: &World) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for level in fs::read_dir(world.path("store/dormouse").join(HOST).join("ltx"))? {
        for file in fs::read_dir(level?.path())? {
            found.push(file?.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Turns one bit in the middle of the largest file over.
fn damage(world: &World) -> Result<()> {
    let size = |path: &PathBuf| fs::metadata(path).map_or(0, |meta| meta.len());
    let file = ltx(world)?.into_iter().max_by_key(size).context("a file")?;
    let mut bytes = fs::read(&file)?;
    let middle = bytes.len() / 2;
    *bytes.get_mut(middle).context("a byte")? ^= 0x10;
    Ok(fs::write(file, bytes)?)
}

#[test]
fn a_state_at_a_time_or_a_txid_is_planned_and_restored() -> Result<()> {
    let world = world("")?;
    world.sign(HOST, "one")?;
    until(PATIENCE, "the first entry is durable", || {
        Ok(world.names_stored(HOST).is_ok_and(|names| names == ["one"]))
    })?;
    let first = told(&world, &["restore", HOST, "--dry-run"])?;
    let time = first["time"].as_str().context("a time")?.to_owned();
    // The next entry is of a later millisecond.
    until(PATIENCE, "a later time", || Ok(world.dormouse(&["list"]).is_ok()))?;
    world.sign(HOST, "two")?;
    sleep(&world)?;
    let newest = told(&world, &["restore", HOST, "--dry-run"])?;
    ensure!(newest["txid"].as_u64() > first["txid"].as_u64(), "{first} {newest}");
    ensure!(newest["files"].as_array().is_some_and(|files| !files.is_empty()), "{newest}");
    ensure!(newest["requests"].as_u64().is_some_and(|n| n <= 4), "{newest}");
    ensure!(newest["bytes"].as_u64().is_some_and(|n| n > 0), "{newest}");
    let txid = first["txid"].to_string();
    for (name, by) in [("at.db", ["--at", &time]), ("txid.db", ["--txid", &txid])] {
        let to = text(&world, name);
        let done = told(&world, &["restore", HOST, "--to", &to, by[0], by[1]])?;
        ensure!(done["txid"] == first["txid"], "{by:?}: {done}");
        let names = names_in(&world.path(name))?;
        ensure!(names == ["one"], "{by:?}: {names:?}");
    }
    let early = world.dormouse(&["restore", HOST, "--dry-run", "--at", "1000"]);
    ensure!(format!("{early:?}").contains("the oldest state there is, is of 20"), "{early:?}");
    let late = world.dormouse(&["restore", HOST, "--dry-run", "--at", "9999-01-01T00:00:00Z"]);
    ensure!(format!("{late:?}").contains("is in the future"), "{late:?}");
    let odd = world.dormouse(&["restore", HOST, "--dry-run", "--at", "tomorrow"]);
    ensure!(format!("{odd:?}").contains("RFC 3339"), "{odd:?}");
    world.stop()
}

#[test]
fn verify_tells_a_good_replica_from_a_damaged_one_and_leaves_nothing() -> Result<()> {
    let world = world("")?;
    world.sign(HOST, "one")?;
    sleep(&world)?;
    let good = told(&world, &["verify", HOST])?;
    ensure!(good["good"] == true && good["integrity_check"] == "ok", "{good}");
    // Neither our own disk nor a store that is away says anything of the replica.
    let drill = world.path("data/.drill");
    mount(Some("dm"), &drill, Some("tmpfs"), MsFlags::empty(), Some("size=4k"))
        .context("this test mounts a small file system: run it as root")?;
    let disk = Mounted(drill);
    let full = world.dormouse_fails(&["verify", HOST], 1)?;
    ensure!(full.contains("could not be verified") && full.contains("no room"), "{full}");
    drop(disk);
    let (store, aside) = (world.path("store"), world.path("aside"));
    fs::rename(&store, &aside)?;
    let away = world.dormouse_fails(&["verify", HOST], 1)?;
    ensure!(away.contains("could not be verified") && !away.contains("NOT good"), "{away}");
    fs::rename(&aside, &store)?;
    // What this box knows to be acknowledged must be there.
    let newest = ltx(&world)?.pop().context("an upload")?;
    fs::rename(&newest, &aside)?;
    let older = world.dormouse_fails(&["verify", HOST], 3)?;
    ensure!(older.contains("is NOT good") && older.contains("was acknowledged"), "{older}");
    fs::rename(&aside, &newest)?;
    damage(&world)?;
    let bad = world.dormouse_fails(&["verify", HOST], 3)?;
    ensure!(bad.contains("is NOT good"), "{bad}");
    let left: Vec<_> = fs::read_dir(world.path("data/.drill"))?.collect();
    ensure!(left.is_empty(), "{left:?}");
    // The next visit mends it: the copy on this box is the newest.
    ensure!(bad.contains("its next visit"), "{bad}");
    ensure!(world.names(HOST)? == ["one"]);
    until(PATIENCE, "it is good again", || Ok(world.dormouse(&["verify", HOST]).is_ok()))?;
    world.stop()
}

#[test]
fn a_full_disk_during_a_restore_by_hand_is_clear_and_leaves_nothing() -> Result<()> {
    let world = world("")?;
    for n in 0..40 {
        world.sign(HOST, &format!("{n}-{}", "x".repeat(2000)))?;
    }
    sleep(&world)?;
    let small = world.path("small");
    fs::create_dir(&small)?;
    mount(Some("dm"), &small, Some("tmpfs"), MsFlags::empty(), Some("size=32k"))
        .context("this test mounts a small file system: run it as root")?;
    let disk = Mounted(small);
    let to = text(&world, "small/copy.db");
    let refused = format!("{:?}", world.dormouse(&["restore", HOST, "--to", &to]));
    let left: Vec<_> = fs::read_dir(&disk.0)?.collect();
    ensure!(refused.contains("no room on the disk"), "{refused}");
    ensure!(left.is_empty(), "{left:?}");
    world.stop()
}

#[test]
fn drills_restore_every_host_in_turn_and_say_which_is_damaged() -> Result<()> {
    let world = world("[drill]\nevery = \"100ms\"\n")?;
    world.sign(HOST, "one")?;
    world.add("b.test", "guestbook")?;
    world.sign("b.test", "two")?;
    let drilled = |host: &str, outcome: &str| -> Result<bool> {
        Ok(world.host(host)?["drill"]["outcome"] == outcome)
    };
    for host in [HOST, "b.test"] {
        until(PATIENCE, "a good drill", || drilled(host, "good"))?;
    }
    sleep(&world)?;
    damage(&world)?;
    until(PATIENCE, "the damage is found", || drilled(HOST, "bad"))?;
    let metrics = world.metrics()?;
    let count = |outcome: &str| {
        metrics.get(&format!("dormouse_drills_total{{outcome=\"{outcome}\"}}")).copied()
    };
    ensure!(count("good") >= Some(2.0) && count("bad") >= Some(1.0), "{metrics:?}");
    ensure!(drilled("b.test", "good")?);
    let log = world.log("activator.log")?;
    ensure!(log.contains("drill: BAD") && log.contains("drill: good"), "{log}");
    // The next visit mends it: the copy on this box is the newest.
    ensure!(world.names(HOST)? == ["one"]);
    until(PATIENCE, "the damage is mended", || drilled(HOST, "good"))?;
    sleep(&world)?;
    world.lose_copy(HOST)?;
    ensure!(world.names(HOST)? == ["one"]);
    world.stop()
}

#[test]
fn lag_and_a_stall_are_told_within_seconds_and_with_the_reason() -> Result<()> {
    let world = world("")?;
    world.sign(HOST, "one")?;
    let lag = format!("dormouse_replica_lag_seconds{{host=\"{HOST}\"}}");
    let durable = || Ok(world.metrics()?.get(&lag) == Some(&0.0));
    until(PATIENCE, "no lag", durable)?;
    // A store that is full.
    let folder = world.path("store/dormouse").join(HOST).join("ltx/0");
    mount(Some("dm"), &folder, Some("tmpfs"), MsFlags::empty(), Some("nr_inodes=1"))
        .context("this test mounts a small file system: run it as root")?;
    let full = Mounted(folder);
    world.sign(HOST, "two")?;
    let stalled = |world: &World| -> Result<String> {
        Ok(world.host(HOST)?["replica"].as_str().unwrap_or_default().to_owned())
    };
    let limit = std::time::Duration::from_secs(5);
    until(limit, "the stall is told", || Ok(stalled(&world)?.starts_with("stalled: ")))?;
    let metrics = world.metrics()?;
    ensure!(metrics.get(&lag).is_some_and(|seconds| *seconds > 0.0), "{metrics:?}");
    let figure = |name: &str| metrics.get(&format!("{name}{{host=\"{HOST}\"}}")).copied();
    ensure!(figure("dormouse_replica_stalled") == Some(1.0), "{metrics:?}");
    ensure!(figure("dormouse_replica_behind_bytes") > Some(0.0), "{metrics:?}");
    drop(full);
    until(PATIENCE, "everything is uploaded", || {
        Ok(world.metrics()?.get(&lag) == Some(&0.0) && stalled(&world)? == "following")
    })?;
    // A database that can no longer be followed.
    let pid = world.host(HOST)?["pid"].as_i64().context("a pid")?;
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid)?);
    kill(pid, Signal::SIGSTOP)?;
    let database = world.database(HOST);
    fs::rename(&database, world.path("gone.db"))?;
    touch_wal(&database)?;
    until(limit, "the follower is told", || Ok(stalled(&world)?.starts_with("detached: ")))?;
    fs::rename(world.path("gone.db"), &database)?;
    kill(pid, Signal::SIGCONT)?;
    world.stop()
}

struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).ok();
    }
}

/// A change of the WAL, which is what the follower hears of.
fn touch_wal(database: &Path) -> Result<()> {
    let mut wal = database.as_os_str().to_owned();
    wal.push("-wal");
    let mut file = fs::File::options().append(true).open(PathBuf::from(wal))?;
    Ok(std::io::Write::write_all(&mut file, b"\0")?)
}

/// `cp -a`: what an operator's backup, or a machine's snapshot, keeps.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status()?;
    ensure!(status.success(), "cp -a {}", from.display());
    Ok(())
}

#[test]
fn an_earlier_state_of_the_disk_is_set_aside() -> Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let mut world = world("")?;
        world.sign(HOST, "one")?;
        sleep(&world)?;
        if signal == Signal::SIGTERM {
            world.end_activator(signal)?;
        }
        copy_tree(&world.path("data"), &world.path("backup"))?;
        if signal == Signal::SIGTERM {
            world.start_activator()?;
        }
        for name in ["two", "three"] {
            world.sign(HOST, name)?;
            sleep(&world)?;
        }
        world.end_activator(signal)?;
        fs::remove_dir_all(world.path("data"))?;
        fs::rename(world.path("backup"), world.path("data"))?;
        world.start_activator()?;
        ensure!(world.names(HOST)? == ["one", "two", "three"], "{:?}", world.names(HOST)?);
        let forks = world.host(HOST)?["forks"].clone();
        ensure!(forks.as_array().is_some_and(|forks| forks.len() == 1), "{forks}");
        let log = world.log("activator.log")?;
        ensure!(log.contains("set aside"), "{log}");
        // It goes on from there.
        world.sign(HOST, "four")?;
        sleep(&world)?;
        world.lose_copy(HOST)?;
        ensure!(world.names(HOST)? == ["one", "two", "three", "four"], "after a restore");
        world.stop()?;
    }
    Ok(())
}

#[test]
fn uploads_that_vanish_from_the_store_are_told_and_replaced() -> Result<()> {
    let world = world("[replica]\naudit = \"1ms\"\nlevel_1 = \"1h\"\nlevel_2 = \"1h\"\n")?;
    for name in ["one", "two", "three"] {
        world.sign(HOST, name)?;
        until(PATIENCE, "it is durable", || {
            Ok(world.names_stored(HOST).is_ok_and(|names| names.last().is_some_and(|n| n == name)))
        })?;
    }
    let newest =
        ltx(&world)?.into_iter().rfind(|path| path.display().to_string().contains("/ltx/0/"));
    fs::remove_file(newest.context("an upload")?)?;
    world.sign(HOST, "four")?;
    let mended =
        || Ok(ltx(&world)?.iter().any(|path| path.display().to_string().contains("/ltx/9/")));
    until(PATIENCE, "a snapshot replaces it", mended)?;
    let whole = || Ok(world.host(HOST)?["replica"] == "following");
    until(PATIENCE, "nothing is wrong any more", whole)?;
    world.dormouse(&["verify", HOST])?;
    // A file of somebody else, which no restore gets past, is named; it is not ours to delete.
    let foreign =
        world.path("store/dormouse").join(HOST).join("ltx/0/ffffffffffffffff-ffffffffffffffff.ltx");
    fs::write(&foreign, b"foreign")?;
    world.sign(HOST, "five")?;
    let named = || {
        let told = world.host(HOST)?["replica"].to_string();
        Ok(told.contains("ffffffffffffffff") && told.contains("move it away"))
    };
    until(PATIENCE, "the foreign file is named", named)?;
    sleep(&world)?;
    ensure!(named()?, "also asleep: {}", world.host(HOST)?["replica"]);
    fs::remove_file(&foreign)?;
    world.sign(HOST, "six")?;
    sleep(&world)?;
    ensure!(world.host(HOST)?["replica"].is_null(), "{}", world.host(HOST)?["replica"]);
    world.lose_copy(HOST)?;
    ensure!(world.names(HOST)? == ["one", "two", "three", "four", "five", "six"]);
    world.stop()
}

#[test]
fn a_database_whose_pages_have_another_size_now_is_restored_after_the_next_visit() -> Result<()> {
    let world = world("")?;
    world.sign(HOST, "one")?;
    sleep(&world)?;
    let database = rusqlite::Connection::open(world.database(HOST))?;
    database.execute_batch(
        "PRAGMA journal_mode = delete; PRAGMA page_size = 8192; VACUUM; PRAGMA journal_mode = wal;
         INSERT INTO entries (name, text) VALUES ('two', 'a text');",
    )?;
    database.close().map_err(|(_, error)| error)?;
    ensure!(world.names(HOST)? == ["one", "two"]);
    ensure!(world.log("activator.log")?.contains("changed while its host slept"));
    until(PATIENCE, "a restore gets past the change", || {
        Ok(world.dormouse(&["verify", HOST]).is_ok())
    })?;
    world.sign(HOST, "three")?;
    sleep(&world)?;
    world.lose_copy(HOST)?;
    ensure!(world.names(HOST)? == ["one", "two", "three"]);
    // The same without a visit.
    sleep(&world)?;
    world.dormouse(&["hibernate", HOST, "--off"])?;
    let database = rusqlite::Connection::open(world.database(HOST))?;
    database.execute_batch(
        "PRAGMA journal_mode = delete; PRAGMA page_size = 1024; VACUUM; PRAGMA journal_mode = wal;",
    )?;
    database.close().map_err(|(_, error)| error)?;
    world.dormouse(&["hibernate", HOST, "--on"])?;
    world.dormouse(&["verify", HOST])?;
    world.lose_copy(HOST)?;
    ensure!(world.names(HOST)? == ["one", "two", "three"]);
    world.stop()
}

#[test]
fn a_database_that_was_cut_or_overwritten_is_set_aside_and_restored() -> Result<()> {
    let world = world("")?;
    let mut signed = Vec::new();
    for (kind, forks) in [("cut", 1), ("garbage", 2), ("empty", 2)] {
        signed.push(kind.to_owned());
        world.sign(HOST, kind)?;
        sleep(&world)?;
        let database = world.database(HOST);
        let bytes = fs::read(&database)?;
        let half = bytes.len() / 2;
        fs::write(
            &database,
            match kind {
                "cut" => bytes.get(..half).context("half of it")?,
                "garbage" => b"garbage",
                _ => b"",
            },
        )?;
        ensure!(world.names(HOST)? == signed, "{kind}");
        let found = world.host(HOST)?["forks"].as_array().map_or(0, Vec::len);
        ensure!(found == forks, "{kind}: {found} forks");
    }
    world.stop()
}

#[test]
fn an_older_file_that_is_put_in_place_is_taken_and_said() -> Result<()> {
    let world = world("")?;
    world.sign(HOST, "one")?;
    sleep(&world)?;
    fs::copy(world.database(HOST), world.path("older.db"))?;
    world.sign(HOST, "two")?;
    sleep(&world)?;
    let before = told(&world, &["restore", HOST, "--dry-run"])?["txid"].clone();
    fs::copy(world.path("older.db"), world.database(HOST))?;
    ensure!(world.names(HOST)? == ["one"], "it is what the operator put there");
    let host = world.host(HOST)?;
    ensure!(host["changed_after"] == before, "{before}: {host}");
    ensure!(world.log("activator.log")?.contains("changed while its host slept"));
    let to = text(&world, "before.db");
    world.dormouse(&["restore", HOST, "--to", &to, "--txid", &before.to_string()])?;
    ensure!(names_in(&world.path("before.db"))? == ["one", "two"], "nothing is lost");
    sleep(&world)?;
    world.lose_copy(HOST)?;
    ensure!(world.names(HOST)? == ["one"], "and in the store");
    world.stop()
}
