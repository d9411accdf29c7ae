//! Every invariant of `ARCHITECTURE.md` has an assert, a simulation checker and a sabotage.
//!
//! Its table has a row an invariant: `| N | what holds | assert | checker | sabotage |`. The last
//! three are `pending`, or a text that must stand in the sources, in backticks.

use std::fs;

use anyhow::{Context as _, Result};

use super::{Finding, Source};
use crate::shell::root;

const PAGE: &str = "ARCHITECTURE.md";
/// DESIGN numbers ten of them.
const COUNT: u32 = 10;

pub(crate) fn check(sources: &[Source]) -> Result<Vec<Finding>> {
    let page = fs::read_to_string(root().join(PAGE)).context(PAGE)?;
    Ok(judge(&page, sources))
}

fn judge(page: &str, sources: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |says: String| findings.push(Finding::new("invariant", PAGE, &says));
    for number in 1..=COUNT {
        let start = format!("| {number} |");
        let Some(row) = page.lines().find(|line| line.starts_with(&start)) else {
            find(format!("no row for invariant {number}"));
            continue;
        };
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        for (name, index) in [("assert", 3), ("checker", 4), ("sabotage", 5)] {
            let cell = cells.get(index).copied().unwrap_or_default();
            if cell == "pending" {
                continue;
            }
            let cited: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
            if cited.is_empty() {
                find(format!("invariant {number} has no {name}"));
            }
            for text in cited {
                let own = |s: &&Source| !s.path.starts_with("xtask/") && s.text.contains(text);
                if !sources.iter().any(|source| own(&source)) {
                    find(format!("invariant {number}: its {name} `{text}` is nowhere"));
                }
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_row_and_a_citation_of_nothing_are_seen() {
        let row = |n| format!("| {n} | x | `invariant {n}` | pending | pending |");
        let rows = (1..=COUNT).map(row).collect::<Vec<_>>().join("\n");
        let text = (1..=COUNT).map(|n| format!("invariant {n}")).collect::<Vec<_>>().join(" ");
        let source = Source { path: "a.rs".to_owned(), text };
        assert!(judge(&rows, std::slice::from_ref(&source)).is_empty());
        assert_eq!(judge(&rows, &[]).len(), 10);
        assert_eq!(judge("", &[source]).len(), 10);
    }
}
