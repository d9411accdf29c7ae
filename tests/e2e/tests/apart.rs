//! Instances are kept apart: users of their own, the files that they can reach, what an app plants, and
//! limits.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use dormouse_e2e::programs;
use dormouse_e2e::wait::until;
use dormouse_e2e::world::{PATIENCE, Plan, World};
use serde_json::Value;

const FIRST_USER: u32 = 2_000_000_000;

fn world(more: &str) -> Result<World> {
    let bin = programs()?;
    let config = format!("{}{more}", World::guestbook(&bin, "path"));
    let world = World::started(&bin, &Plan { config, ..Plan::default() })?;
    for host in ["a.test", "b.test"] {
        world.add(host, "guestbook")?;
        world.sign(host, "one")?;
    }
    Ok(world)
}

/// What the app of a host may do with a file.
fn reach(world: &World, host: &str, path: &Path, write: bool) -> Result<String> {
    let question = format!("/api/reach?path={}&write={write}", path.display());
    let answer = world.get(host, &question)?;
    ensure!(answer.status == 200, "{}", answer.text());
    Ok(answer.text())
}

fn uid(world: &World, host: &str) -> Result<u32> {
    let pid = world.host(host)?["pid"].as_i64().context("it runs")?;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(|rest| rest.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    };
    let (uids, gids) = (line("Uid:").context("uids")?, line("Gid:").context("gids")?);
    ensure!(uids == gids && uids.iter().all(|uid| *uid == uids[0]), "{status}");
    ensure!(line("Groups:").is_some_and(|groups| groups.is_empty()), "{status}");
    ensure!(line("CapEff:").is_some_and(|caps| caps == ["0000000000000000"]), "{status}");
    ensure!(line("NoNewPrivs:").is_some_and(|is| is == ["1"]), "{status}");
    Ok(uids[0].parse()?)
}

#[test]
fn each_host_has_a_user_of_its_own_and_reaches_only_its_own_files() -> Result<()> {
    let world = world("")?;
    let (a, b) = (uid(&world, "a.test")?, uid(&world, "b.test")?);
    ensure!(a >= FIRST_USER && b >= FIRST_USER && a != b, "{a} {b}");
    for host in ["a.test", "b.test"] {
        let database = world.database(host);
        let folder = fs::metadata(database.parent().context("a folder")?)?;
        let own = uid(&world, host)?;
        ensure!(folder.uid() == own && folder.mode() & 0o777 == 0o700, "{host}");
        ensure!(fs::metadata(&database)?.uid() == own);
    }
    let denied = "PermissionDenied";
    for path in ["data/hosts/b.test/app.db", "data/registry.db", "data/journal", "dormouse.toml"] {
        ensure!(reach(&world, "a.test", &world.path(path), false)? == denied, "{path}");
    }
    for path in ["data/hosts/a.test/own", "run/a.test/own"] {
        ensure!(reach(&world, "a.test", &world.path(path), true)? == "Reached", "{path}");
    }
    ensure!(reach(&world, "a.test", Path::new("/etc/hostname"), false)? == "Reached");
    ensure!(reach(&world, "a.test", Path::new("/tmp/dormouse-not-here"), true)? == denied);
    let told = world.status()?["isolation"].to_string();
    ensure!(told.contains("a user of its own each, files by Landlock"), "{told}");
    // The same user when it comes back, since its files are still its own.
    world.dormouse(&["rm", "a.test"])?;
    world.add("c.test", "guestbook")?;
    world.add("a.test", "guestbook")?;
    ensure!(world.names("a.test")? == ["one"] && uid(&world, "a.test")? == a);
    world.sign("c.test", "one")?;
    ensure!(uid(&world, "c.test")? != b);
    world.stop()
}

#[test]
fn without_landlock_the_users_still_keep_them_apart() -> Result<()> {
    let world = world("[instances]\nlandlock = false\n")?;
    let other = world.database("b.test");
    ensure!(reach(&world, "a.test", &other, false)? == "PermissionDenied");
    ensure!(reach(&world, "a.test", &world.path("dormouse.toml"), false)? == "Reached");
    let told = world.status()?["isolation"].to_string();
    ensure!(told.contains("files not restricted (instances.landlock)"), "{told}");
    world.stop()
}

#[test]
fn what_the_config_names_can_be_reached_besides() -> Result<()> {
    let shared = tempfile::tempdir()?;
    fs::set_permissions(shared.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777))?;
    let (read, write) = (shared.path().join("read"), shared.path().join("write"));
    for folder in [&read, &write] {
        fs::create_dir(folder)?;
        fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o777))?;
    }
    let more = format!("read = [\"{}\"]\nwrite = [\"{}\"]\n", read.display(), write.display());
    fs::write(read.join("file"), "x")?;
    let world = world(&more)?;
    ensure!(reach(&world, "a.test", &read.join("file"), false)? == "Reached");
    ensure!(reach(&world, "a.test", &read.join("new"), true)? == "PermissionDenied");
    ensure!(reach(&world, "a.test", &write.join("new"), true)? == "Reached");
    world.stop()
}

#[test]
fn a_link_in_the_databases_place_is_refused_and_what_it_names_is_left_alone() -> Result<()> {
    let world = world("")?;
    for host in ["a.test", "b.test"] {
        world.dormouse(&["sleep", host])?;
        world.wait_state(host, "asleep")?;
    }
    let (own, other) = (world.database("a.test"), world.database("b.test"));
    let before = fs::metadata(&other)?;
    fs::remove_file(&own)?;
    symlink(&other, &own)?;
    let answer = world.get("a.test", "/api/entries")?;
    ensure!(answer.status == 503, "{}", answer.text());
    let problem = world.host("a.test")?["problem"].to_string();
    ensure!(problem.contains("a symbolic link"), "{problem}");
    let after = fs::metadata(&other)?;
    ensure!(
        (before.uid(), before.ctime(), before.size()) == (after.uid(), after.ctime(), after.size())
    );
    fs::remove_file(&own)?;
    ensure!(world.names("b.test")? == ["one"]);
    until(PATIENCE, "it is restored", || Ok(world.names("a.test").is_ok_and(|it| it == ["one"])))?;
    world.stop()
}

#[test]
fn a_link_or_a_pipe_in_the_logs_place_is_not_written_to() -> Result<()> {
    let world = world("")?;
    let victim = world.path("victim");
    fs::write(&victim, "")?;
    let log = world.path("data/hosts/a.test/app.log");
    for plant in [
        |_: &Path, log: &Path| Ok(nix::unistd::mkfifo(log, nix::sys::stat::Mode::S_IRWXU)?),
        |victim: &Path, log: &Path| -> Result<()> { Ok(symlink(victim, log)?) },
    ] {
        world.dormouse(&["sleep", "a.test"])?;
        world.wait_state("a.test", "asleep")?;
        fs::remove_file(&log)?;
        plant(&victim, &log)?;
        ensure!(world.get("a.test", "/api/entries")?.status == 503);
        let problem = world.host("a.test")?["problem"].to_string();
        ensure!(problem.contains("app.log"), "{problem}");
        fs::remove_file(&log)?;
        until(PATIENCE, "it serves", || {
            Ok(world.names("a.test").is_ok_and(|names| names == ["one"]))
        })?;
    }
    ensure!(fs::read_to_string(&victim)?.is_empty());
    world.stop()
}

#[test]
fn limits_are_set_or_told_as_not_enforced() -> Result<()> {
    let world = world("[app.guestbook.limits]\nmemory_max_mib = 200\npids_max = 50\n")?;
    let told = world.host("a.test")?["limits"].as_str().unwrap_or_default().to_owned();
    ensure!(told.starts_with("memory max 200 MiB, pids 50"), "{told}");
    let held = fs::read_to_string(world.path("data/cgroup"))?;
    let run = world.host("a.test")?["run"].as_u64().context("a run")?;
    let instance = Path::new(held.trim()).join(format!("a.test@{run}"));
    for (controller, file, value) in
        [("memory", "memory.max", "209715200"), ("pids", "pids.max", "50")]
    {
        match fs::read_to_string(instance.join(file)) {
            Ok(found) => {
                ensure!(found.trim() == value, "{file}: {found}");
                ensure!(!told.contains(&format!("\"{controller}\"")), "{told}");
            }
            Err(_) => ensure!(
                told.contains("NOT ENFORCED") && told.contains(&format!("\"{controller}\"")),
                "{told}"
            ),
        }
    }
    ensure!(world.host("a.test")?["drill"] == Value::Null);
    world.stop()
}
