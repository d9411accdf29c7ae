//! The rules that no compiler checks. Each finding says where, what, and the rule.
//!
//! Exceptions are lines of `xtask/tidy-exceptions.txt`; one that is not needed any more is a finding
//! too, so that the list only shrinks.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::shell::{output, root};
use crate::tools;

mod edges;
mod invariants;
mod text;

/// A source file, by its path from the root.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Something that is against a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// `RULE PATH`: what an exception names.
    pub(crate) key: String,
    /// Where and what, for people.
    pub(crate) says: String,
}

impl Finding {
    pub(crate) fn new(rule: &str, path: &str, says: &str) -> Self {
        Self { key: format!("{rule} {path}"), says: format!("{path}: {says} [{rule}]") }
    }
}

/// `cargo xtask tidy`.
pub(crate) fn run() -> Result<()> {
    let sources = sources()?;
    let mut findings = text::check(&sources);
    findings.extend(edges::check()?);
    findings.extend(invariants::check(&sources)?);
    findings.sort();
    let list = fs::read_to_string(root().join("xtask/tidy-exceptions.txt"))?;
    let exceptions: BTreeSet<&str> =
        list.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let met: BTreeSet<&str> = findings.iter().map(|finding| finding.key.as_str()).collect();
    let mut bad: Vec<String> = findings
        .iter()
        .filter(|finding| !exceptions.contains(finding.key.as_str()))
        .map(|finding| finding.says.clone())
        .collect();
    bad.extend(
        exceptions.difference(&met).map(|key| format!("exception {key:?} is not needed any more")),
    );
    if bad.is_empty() {
        return Ok(());
    }
    bail!("{} findings\n{}", bad.len(), bad.join("\n"))
}

/// Licences, duplicates and sources by cargo-deny; its advisories need a network.
///
/// It reads the manifests of every platform's dependencies; a build on a new machine has fetched
/// those of its own platform alone.
pub(crate) fn deny() -> Result<()> {
    crate::shell::run(&mut crate::shell::cargo(&["fetch", "--quiet", "--locked"]))?;
    let deny = tools::cargo_deny()?;
    let mut command = Command::new(deny);
    command.current_dir(root()).args(["--offline", "check", "licenses", "bans", "sources"]);
    crate::shell::run(&mut command)
}

/// Every Rust file that git knows or would add.
fn sources() -> Result<Vec<Source>> {
    let mut command = Command::new("git");
    command.current_dir(root());
    command.args(["ls-files", "--cached", "--others", "--exclude-standard", "*.rs"]);
    let listed = output(&mut command)?;
    let read = |path: &str| {
        let text = fs::read_to_string(root().join(Path::new(path))).ok()?;
        Some(Source { path: path.to_owned(), text })
    };
    Ok(listed.lines().filter_map(read).collect())
}
