//! A public app that nobody here wrote: `datasette`, woken, slept and restored as a host.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use dormouse_e2e::world::{Plan, World};
use dormouse_e2e::{binary, client};

const HOST: &str = "data.test";
const PAGES: [&str; 4] = [
    "/-/static/app.css",
    "/-/static/table.js",
    "/app/planets.json?_shape=array",
    "/-/plugins.json",
];

fn world(extra: &str) -> Result<World> {
    let datasette = std::env::var_os("DORMOUSE_DATASETTE").context(
        "DORMOUSE_DATASETTE is not set: name the program, for example by `python3 -m venv V && \
         V/bin/pip install datasette==0.65.1`, V/bin/datasette",
    )?;
    let datasette = PathBuf::from(datasette);
    // Its libraries, and the interpreter's, wherever that is; perhaps where only root can pass.
    let environment = datasette.ancestors().nth(2).context("a virtual environment")?;
    let python = environment.join("bin/python").canonicalize()?;
    let python = python.ancestors().nth(2).context("an interpreter's prefix")?;
    let bin = binary("dormouse")?.parent().map(ToOwned::to_owned).unwrap_or_default();
    binary("dormouse-proxy")?;
    let config = format!(
        "[wake]\nhealth = \"60s\"\n[instances]\nown_users = false\n[app.datasette]\ncommand = [\"{}\", \"-m\", \"datasette\", \
         \"serve\", \"{{db}}\", \"--uds\", \"{{socket}}\"]\nhealth = \"/-/versions.json\"\nreplication = \"stream\"\n\
         read = [\"{}\", \"{}\"]\n{extra}",
        environment.join("bin/python").display(),
        environment.display(),
        python.display()
    );
    let world = World::started(&bin, &Plan { config, ..Plan::default() })?;
    world.add(HOST, "datasette")?;
    Ok(world)
}

fn make_database(world: &World, mode: &str) -> Result<()> {
    let database = rusqlite::Connection::open(world.database(HOST))?;
    database.pragma_update(None, "journal_mode", mode)?;
    database.execute_batch(
        "CREATE TABLE planets (name TEXT, moons INTEGER);
         INSERT INTO planets VALUES ('Mars', 2), ('Venus', 0), ('Saturn', 146);",
    )?;
    Ok(())
}

fn pages_are_those_of_its_socket(world: &World) -> Result<()> {
    let run = world.host(HOST)?["run"].as_u64().context("it runs")?;
    let socket = world.path("run").join(HOST).join(format!("{run}.sock"));
    for page in PAGES {
        let through = world.get(HOST, page)?;
        let direct = client::over_unix(&socket, page)?;
        ensure!(through.status == 200, "{page}: {}", through.status);
        ensure!(through.body == direct.body, "{page} differs");
        ensure!(!through.body.is_empty(), "{page} is empty");
    }
    Ok(())
}

#[test]
fn datasette_wakes_sleeps_and_is_restored_byte_by_byte() -> Result<()> {
    let world = world("")?;
    make_database(&world, "wal")?;
    let first = world.get(HOST, PAGES[2])?;
    ensure!(first.status == 200, "{} {}", first.head, world.log("activator.log")?);
    pages_are_those_of_its_socket(&world)?;
    world.dormouse(&["sleep", HOST])?;
    world.wait_state(HOST, "asleep")?;
    world.lose_copy(HOST)?;
    let restored = world.get(HOST, PAGES[2])?;
    ensure!(restored.body == first.body, "{}", restored.text());
    pages_are_those_of_its_socket(&world)?;
    world.stop()
}

#[test]
fn a_database_outside_wal_mode_is_refused_by_name_or_switched_where_the_config_says_so()
-> Result<()> {
    let refusing = world("")?;
    make_database(&refusing, "delete")?;
    let answer = refusing.get(HOST, PAGES[2])?;
    ensure!(answer.status == 503, "{}", answer.head);
    let problem = refusing.host(HOST)?["problem"].to_string();
    ensure!(problem.contains("WAL"), "{problem}");
    refusing.stop()?;
    let switching = world("set_wal = true\n")?;
    make_database(&switching, "delete")?;
    let answer = switching.get(HOST, PAGES[2])?;
    ensure!(answer.status == 200, "{} {}", answer.head, switching.log("activator.log")?);
    switching.stop()
}
