//! Which names can be hosts (RFC 1123 section 2.1, in lower case).

/// Why a name cannot be a host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name:?} cannot be a host: {problem}; allowed: labels of letters, digits and inner hyphens, \
     joined by dots, 253 bytes at most, an internationalised name in its xn-- form"
)]
pub struct NameError {
    /// The name as it was given.
    pub name: String,
    /// What is wrong with it.
    pub problem: &'static str,
}

/// A host's canonical form: lower case, no trailing dot. Names that could be read as a path are
/// refused, since a host's directory bears its name.
pub fn canonical_host(name: &str) -> Result<String, NameError> {
    let refuse = |problem| Err(NameError { name: name.to_owned(), problem });
    let canonical = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    if canonical.is_empty() {
        return refuse("it is empty");
    }
    if canonical.len() > 253 {
        return refuse("it is longer than 253 bytes");
    }
    for label in canonical.split('.') {
        if label.is_empty() || label.len() > 63 {
            return refuse("a label is empty or longer than 63 bytes");
        }
        if label.starts_with('-') || label.ends_with('-') {
            return refuse("a label starts or ends with a hyphen");
        }
        if !label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
            return refuse("it has a character that no host name has");
        }
    }
    Ok(canonical)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_lower_case_without_its_root_dot() {
        assert_eq!(canonical_host("A.Example.").unwrap(), "a.example");
        assert_eq!(canonical_host("xn--bcher-kva.example").unwrap(), "xn--bcher-kva.example");
    }

    #[test]
    fn what_could_be_a_path_a_port_or_a_pattern_is_refused() {
        let long = "a".repeat(64);
        for name in
            ["", ".", "..", "a..b", "a/b", "a:80", "*.b", "-a", "a-", "a_b", "bücher", &long]
        {
            let error = canonical_host(name).unwrap_err().to_string();
            assert!(error.contains("allowed:"), "{name}: {error}");
        }
    }
}
