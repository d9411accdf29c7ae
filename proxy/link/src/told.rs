//! How both programs tell an error: each cause once.

use std::error::Error;

/// An error with its causes, joined by `: `. Most of our errors name their cause in their own words, so
/// that a log line by itself says it; such a cause is not said again.
#[must_use]
pub fn told<'a>(chain: impl IntoIterator<Item = &'a (dyn Error + 'static)>) -> String {
    let mut text = String::new();
    for error in chain {
        let words = error.to_string();
        let words = words.trim();
        if text.is_empty() {
            text.push_str(words);
        } else if !text.contains(words) {
            text.push_str(": ");
            text.push_str(words);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failed {
        #[error("file: {source}")]
        Named { source: std::io::Error },
        #[error("it failed")]
        Short { source: Box<Failed> },
    }

    fn chain<'a>(
        error: &'a (dyn Error + 'static),
    ) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
        std::iter::successors(Some(error), |&error| error.source())
    }

    #[test]
    fn a_cause_that_its_error_names_is_not_said_twice_and_no_other_is_lost() {
        let named = || Failed::Named { source: std::io::Error::from_raw_os_error(2) };
        let once = "file: No such file or directory (os error 2)";
        assert_eq!(told(chain(&named())), once);
        let short = Failed::Short { source: Box::new(named()) };
        assert_eq!(told(chain(&short)), format!("it failed: {once}"));
    }
}
