//! Apps, and how their instances are kept: what must fit.

use std::path::{Path, PathBuf};

use super::{Misfit, misfit};
use crate::config::{App, AppLimits, AppListen, Config, Pressure};

pub(super) fn app(name: &str, app: &App) -> Result<(), Misfit> {
    let key = |field: &str| format!("app.{name}.{field}");
    if !app.command.first().is_some_and(|program| Path::new(program).is_absolute()) {
        let problem = format!("{:?} does not start with a path", app.command);
        let allowed = "a list that starts with an absolute path";
        return misfit(&key("command"), problem, allowed);
    }
    let is_log = app.db.starts_with("app.log");
    if app.db.is_empty() || app.db.contains('/') || app.db.starts_with('.') || is_log {
        let problem = format!("{:?} cannot be the database's name", app.db);
        let allowed = "a file name with no / and no leading dot, not app.log";
        return misfit(&key("db"), problem, allowed);
    }
    for question in [&app.health, &app.next_due].into_iter().flatten() {
        if !question.starts_with('/') || !question.chars().all(|c| c.is_ascii_graphic()) {
            let problem = format!("{question:?} is no path");
            return misfit(&key("health or next_due"), problem, "a path like /healthz");
        }
    }
    if let Some(word) = app.command.iter().find_map(|text| unknown_word(text)) {
        let problem = format!("{word:?} is filled in by nothing");
        return misfit(&key("command"), problem, "{socket}, {db}, {host} and {dir}");
    }
    limits(name, app)?;
    let binds = app.listen == AppListen::Path;
    if binds && !app.command.iter().any(|text| text.contains("{socket}")) {
        let problem = "nothing tells the app which socket to bind".to_owned();
        return misfit(
            &key("command"),
            problem,
            "{socket} among its arguments, or listen = \"fd\"",
        );
    }
    Ok(())
}

/// Users of a box: more than it has slots for hosts by default.
const USERS: u32 = 1_000_000;

pub(super) fn users(config: &Config) -> Result<(), Misfit> {
    let first = config.instances.first_user;
    // Beyond it some programs take a number for a negative one.
    let last = i32::MAX.unsigned_abs() - USERS;
    if first < 1000 || first > last {
        let problem = format!("{first} is no place for a million users");
        return misfit("instances.first_user", problem, "1000 to 2146483647");
    }
    Ok(())
}

pub(super) fn pressure(config: &Config) -> Result<(), Misfit> {
    let Pressure { file, high_percent, low_percent } = &config.pressure;
    if *high_percent > 100 || low_percent > high_percent {
        let problem = format!("high {high_percent}, low {low_percent}");
        let allowed = "0 to 100, the low one not above the high one; high 0: never";
        return misfit("pressure.high_percent and low_percent", problem, allowed);
    }
    if !file.is_absolute() {
        let problem = format!("{:?} is relative", file.display());
        return misfit("pressure.file", problem, "an absolute path");
    }
    Ok(())
}

fn limits(name: &str, app: &App) -> Result<(), Misfit> {
    let AppLimits { memory_high_mib, memory_max_mib, pids_max, cpu_weight } = app.limits;
    let key = |field: &str| format!("app.{name}.limits.{field}");
    for (field, value) in [
        ("memory_high_mib", memory_high_mib),
        ("memory_max_mib", memory_max_mib),
        ("pids_max", pids_max),
    ] {
        if value == Some(0) {
            let problem = "0 lets nothing run".to_owned();
            return misfit(&key(field), problem, "1 and more; absent for no limit");
        }
    }
    if let (Some(high), Some(max)) = (memory_high_mib, memory_max_mib)
        && high > max
    {
        let problem = format!("{high} is above memory_max_mib, {max}");
        return misfit(&key("memory_high_mib"), problem, "at most memory_max_mib");
    }
    if let Some(weight) = cpu_weight.filter(|weight| !(1..=10_000).contains(weight)) {
        return misfit(&key("cpu_weight"), format!("{weight} is no weight"), "1 to 10000");
    }
    let relative = |path: &&PathBuf| !path.is_absolute();
    if let Some(path) = app.read.iter().chain(&app.write).find(relative) {
        let problem = format!("{:?} is relative", path.display());
        return misfit(&format!("app.{name}.read or write"), problem, "absolute paths");
    }
    Ok(())
}

/// What is probably a mistake, though it may be meant: for people.
#[must_use]
pub fn warnings(config: &Config) -> Vec<String> {
    let knows = |app: &App| {
        // By its whole path, by its directory, or by its name: an app starts in that directory.
        let tells =
            |text: &String| ["{db}", "{dir}", &app.db].iter().any(|part| text.contains(*part));
        app.command.iter().chain(app.env.values()).any(tells)
    };
    let unaware = config.apps.iter().filter(|(_, app)| !knows(app));
    unaware
        .map(|(name, app)| {
            let db = &app.db;
            format!(
                "app.{name}.command: nothing tells the app which database is replicated: unless it \
                 opens {db:?} in its working directory by itself, give it {{db}}"
            )
        })
        .collect()
}

/// A word in braces that looks like one of ours and is none; `${…}` is a shell's.
fn unknown_word(text: &str) -> Option<&str> {
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        let (word, _) = after.split_once('}')?;
        let is_word = !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        let is_known = ["socket", "db", "host", "dir"].contains(&word);
        if is_word && !is_known && !before.ends_with('$') {
            return Some(word);
        }
        rest = after;
    }
    None
}
