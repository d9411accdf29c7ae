//! Sizes, words, and where `unsafe` may be.

use super::{Finding, Source};

/// Hard limit of a file.
const FILE_LINES_MAX: usize = 600;
/// Limit of a file's `//!` promise.
const PROMISE_LINES_MAX: usize = 30;

/// Folders that hold custody of something dangerous.
const UNSAFE_FOLDERS: [&str; 4] = ["proxy/ring/", "proxy/link/", "ebpf/", "activator/instances/"];

/// Endings of names that say nothing.
const EMPTY_NAMES: [&str; 3] = ["Manager", "Handler", "Helper"];
/// File names that say nothing.
const EMPTY_FILES: [&str; 3] = ["utils.rs", "common.rs", "misc.rs"];

pub(crate) fn check(sources: &[Source]) -> Vec<Finding> {
    sources.iter().flat_map(check_one).collect()
}

fn check_one(source: &Source) -> Vec<Finding> {
    let path = source.path.as_str();
    let mut findings = Vec::new();
    let mut find = |rule: &str, says: String| findings.push(Finding::new(rule, path, &says));
    let lines: Vec<&str> = source.text.lines().collect();
    if lines.len() > FILE_LINES_MAX {
        find("file-size", format!("{} lines, at most {FILE_LINES_MAX}", lines.len()));
    }
    let promise = lines.iter().take_while(|line| line.starts_with("//!")).count();
    let is_test_part = path.ends_with("tests.rs");
    if promise == 0 && !is_test_part {
        find("promise", "no //! promise at its head".to_owned());
    }
    if promise > PROMISE_LINES_MAX {
        find("promise", format!("a promise of {promise} lines, at most {PROMISE_LINES_MAX}"));
    }
    if EMPTY_FILES.iter().any(|name| path.ends_with(&format!("/{name}"))) {
        find("empty-name", "a file name that says nothing".to_owned());
    }
    let own_rules = path.starts_with("xtask/src/tidy");
    for (index, line) in lines.iter().enumerate() {
        let at = index + 1;
        if own_rules {
            continue;
        }
        if names_nothing(line) {
            find("empty-name", format!("line {at}: a type name that says nothing"));
        }
        if line.contains("todo!(") || line.contains("unimplemented!(") || line.contains("#[ignore")
        {
            find("unfinished", format!("line {at}: unfinished or switched off"));
        }
        let is_test = path.contains("/tests/") || is_test_part;
        if is_test && (line.contains("thread::sleep") || line.contains("time::sleep(")) {
            find("sleep", format!("line {at}: a test that sleeps to wait"));
        }
        let custody = UNSAFE_FOLDERS.iter().any(|folder| path.starts_with(folder));
        if !custody && line.contains("unsafe {") {
            find("unsafe", format!("line {at}: unsafe outside the crates that hold custody of it"));
        }
    }
    findings
}

fn names_nothing(line: &str) -> bool {
    let declares = ["struct ", "enum ", "trait ", "type "]
        .iter()
        .find_map(|keyword| line.split_once(keyword).map(|(_, rest)| rest));
    let Some(rest) = declares else { return false };
    if line.trim_start().starts_with("//") {
        return false;
    }
    let name: String = rest.chars().take_while(char::is_ascii_alphanumeric).collect();
    EMPTY_NAMES.iter().any(|ending| name.ends_with(ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, text: &str) -> Vec<String> {
        let source = Source { path: path.to_owned(), text: text.to_owned() };
        check_one(&source).into_iter().map(|finding| finding.key).collect()
    }

    #[test]
    fn each_rule_is_seen_to_fail() {
        let long = format!("//! x\n{}", "\n".repeat(600));
        assert_eq!(rules("a/b.rs", &long), ["file-size a/b.rs"]);
        assert_eq!(rules("a/b.rs", "fn f() {}"), ["promise a/b.rs"]);
        assert_eq!(rules("a/utils.rs", "//! x"), ["empty-name a/utils.rs"]);
        assert_eq!(rules("a/b.rs", "//! x\nstruct ThingManager;"), ["empty-name a/b.rs"]);
        assert_eq!(rules("a/b.rs", "//! x\ntodo!()"), ["unfinished a/b.rs"]);
        assert_eq!(rules("a/b.rs", "//! x\nunsafe { f() }"), ["unsafe a/b.rs"]);
        assert_eq!(rules("a/tests/b.rs", "//! x\nthread::sleep(d)"), ["sleep a/tests/b.rs"]);
        assert!(rules("proxy/ring/b.rs", "//! x\nunsafe { f() }").is_empty());
    }
}
