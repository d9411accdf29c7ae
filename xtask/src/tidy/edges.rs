//! Which crate may depend on which.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::Finding;
use crate::shell::{cargo, output};

/// Binaries: nothing depends on them.
const BINARIES: [&str; 4] = ["dormouse", "dormouse-proxy", "guestbook", "xtask"];

/// The two cores: what they may depend on, and nothing else.
const PURE: [(&str, &[&str]); 2] = [
    ("dormouse-core", &["serde", "serde_json"]),
    ("dormouse-proxy-core", &["httparse", "memchr", "thiserror"]),
];

/// Sides that never meet; both may use `dormouse-link`.
const PROXY_SIDE: [&str; 3] = ["dormouse-proxy", "dormouse-proxy-core", "dormouse-ring"];
const ACTIVATOR_SIDE: [&str; 6] = [
    "dormouse",
    "dormouse-core",
    "dormouse-store",
    "dormouse-replica",
    "dormouse-instances",
    "dormouse-registry",
];

pub(crate) fn check() -> Result<Vec<Finding>> {
    let text = output(&mut cargo(&["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: Value = serde_json::from_str(&text)?;
    let packages = metadata["packages"].as_array().context("packages of cargo metadata")?;
    let mut edges: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        // What tests alone use is not built into anything.
        let normal = |d: &&Value| d["kind"].is_null();
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        let names = dependencies.filter(normal).filter_map(|d| d["name"].as_str());
        edges.insert(name, names.collect());
    }
    Ok(judge(&edges))
}

fn judge(edges: &BTreeMap<&str, Vec<&str>>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, dependencies) in edges {
        for dependency in dependencies {
            let mut find = |why: &str| {
                let says = format!("may not depend on {dependency}: {why}");
                findings.push(Finding::new("edge", name, &says));
            };
            if BINARIES.contains(dependency) {
                find("nothing depends on a binary");
            }
            if PROXY_SIDE.contains(name) && ACTIVATOR_SIDE.contains(dependency) {
                find("proxy and activator never depend on each other");
            }
            if ACTIVATOR_SIDE.contains(name) && PROXY_SIDE.contains(dependency) {
                find("proxy and activator never depend on each other");
            }
            let pure = PURE.iter().find(|(pure, _)| pure == name);
            if pure.is_some_and(|(_, allowed)| !allowed.contains(dependency)) {
                find("a core is pure");
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_forbidden_edge_is_seen() {
        for (name, dependency) in [
            ("dormouse-sim", "dormouse"),
            ("dormouse-ring", "dormouse-store"),
            ("dormouse-store", "dormouse-ring"),
            ("dormouse-core", "tokio"),
            ("dormouse-proxy-core", "nix"),
        ] {
            let findings = judge(&BTreeMap::from([(name, vec![dependency])]));
            assert_eq!(findings.len(), 1, "{name} -> {dependency}");
        }
        let fine = BTreeMap::from([("dormouse", vec!["dormouse-link", "dormouse-core", "tokio"])]);
        assert!(judge(&fine).is_empty());
    }
}
