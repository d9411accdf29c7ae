//! What must hold before a commit: format, lints, tidy, licences, docs, the bounded model check.

use anyhow::{Result, bail};

use crate::shell::cargo;
use crate::tidy;

/// One part, with its name.
pub(crate) type Part = (&'static str, fn() -> Result<()>);

/// All parts, in order.
pub(crate) const PARTS: [Part; 6] = [
    ("format", format),
    ("tidy", tidy::run),
    ("licences and duplicates", tidy::deny),
    ("lints", lints),
    ("documentation", docs),
    ("wake table model", loom),
];

/// Runs all parts, also behind one that failed.
pub(crate) fn run_all() -> Vec<(&'static str, Result<()>)> {
    PARTS.iter().map(|(name, part)| (*name, part())).collect()
}

/// `cargo xtask check`.
pub(crate) fn run() -> Result<()> {
    let mut failed = Vec::new();
    for (name, result) in run_all() {
        match result {
            Ok(()) => println!("check: {name}: good"),
            Err(error) => {
                println!("check: {name}: {error:#}");
                failed.push(name);
            }
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    bail!("failed: {}", failed.join(", "))
}

fn format() -> Result<()> {
    crate::shell::run(&mut cargo(&["fmt", "--all", "--check"]))
}

fn lints() -> Result<()> {
    let args = ["clippy", "--quiet", "--workspace", "--all-targets", "--locked", "--"];
    crate::shell::run(cargo(&args).args(["-D", "warnings"]))
}

/// Links that lead nowhere.
fn docs() -> Result<()> {
    let mut command = cargo(&["doc", "--quiet", "--workspace", "--no-deps", "--locked"]);
    crate::shell::run(command.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Two preemptions find every violation that was ever found; `soak loom` has no bound.
fn loom() -> Result<()> {
    model(Some("2"))
}

/// The wake table under loom.
pub(crate) fn model(preemptions: Option<&str>) -> Result<()> {
    let mut command =
        cargo(&["test", "--quiet", "--release", "-p", "dormouse-link", "--test", "loom"]);
    command.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", crate::shell::binaries("loom"));
    match preemptions {
        Some(bound) => command.env("LOOM_MAX_PREEMPTIONS", bound),
        None => command.env_remove("LOOM_MAX_PREEMPTIONS"),
    };
    crate::shell::run(&mut command)
}
