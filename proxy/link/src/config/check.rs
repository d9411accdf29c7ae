//! What the types alone cannot say: overrides from the environment, and values that must fit.

use std::path::{Path, PathBuf};

use super::{Config, Span, Store, StoreKind, Takeover};

/// Why a config was not taken.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML, or has an unknown key or a value of a wrong shape.
    #[error("{}: {source}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: toml::de::Error,
    },
    /// A value does not fit.
    #[error("{place}: {key}: {problem}; allowed: {allowed}")]
    Value {
        /// The file, or the environment.
        place: String,
        /// The key.
        key: String,
        /// What is wrong with it.
        problem: String,
        /// What is allowed.
        allowed: &'static str,
    },
}

const ENVIRONMENT: &str = "environment";

/// Applies `DORMOUSE_BUCKET`, `DORMOUSE_REGION`, `DORMOUSE_PREFIX` and `DORMOUSE_IDLE`.
pub(super) fn override_from(
    config: &mut Config,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<(), ConfigError> {
    let set = |name: &str| environment(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
    if let Some(bucket) = set("DORMOUSE_BUCKET") {
        let store = config.store.get_or_insert_with(|| Store {
            kind: StoreKind::S3,
            path: None,
            bucket: None,
            region: None,
            prefix: super::default_prefix(),
        });
        store.kind = StoreKind::S3;
        store.bucket = Some(bucket);
    }
    if let Some(store) = config.store.as_mut() {
        if let Some(region) = set("DORMOUSE_REGION") {
            store.region = Some(region);
        }
        if let Some(prefix) = set("DORMOUSE_PREFIX") {
            prefix.trim_matches('/').clone_into(&mut store.prefix);
        }
    }
    if let Some(idle) = set("DORMOUSE_IDLE") {
        config.sleep.idle = idle.parse::<Span>().map_err(|problem| ConfigError::Value {
            place: ENVIRONMENT.to_owned(),
            key: "DORMOUSE_IDLE".to_owned(),
            problem,
            allowed: "a duration like 15m or 90s",
        })?;
    }
    Ok(())
}

/// Checks what must fit together.
pub(super) fn check(config: &Config, path: &Path) -> Result<(), ConfigError> {
    let refuse = |key: &str, problem: String, allowed: &'static str| {
        Err(ConfigError::Value {
            place: path.display().to_string(),
            key: key.to_owned(),
            problem,
            allowed,
        })
    };
    let name = &config.this_box.name;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        let allowed = "1 to 64 of letters, digits, - and .";
        return refuse("box.name", format!("{name:?} cannot be a box's name"), allowed);
    }
    if config.session.takeover == Takeover::Automatic {
        let problem = "automatic takeover is not built yet".to_owned();
        return refuse("session.takeover", problem, "\"manual\"");
    }
    if config.session.margin.as_nanos().saturating_mul(2) > config.session.ttl.as_nanos() {
        let problem = format!("{} is over half of ttl", config.session.margin);
        return refuse("session.margin", problem, "at most half of session.ttl");
    }
    if let Some(store) = &config.store {
        match (store.kind, &store.path) {
            (StoreKind::Directory, None) => {
                let problem = "missing for kind \"directory\"".to_owned();
                return refuse("store.path", problem, "an absolute path");
            }
            (StoreKind::S3, _) => {
                let problem = "the S3 store is not built yet".to_owned();
                return refuse("store.kind", problem, "\"directory\"");
            }
            (StoreKind::Directory, Some(_)) => {}
        }
        if store.prefix.is_empty() {
            let problem = "empty".to_owned();
            return refuse("store.prefix", problem, "a name, for example \"dormouse\"");
        }
    }
    for (app_name, app) in &config.apps {
        let key = |field: &str| format!("app.{app_name}.{field}");
        match app.command.first() {
            Some(program) if Path::new(program).is_absolute() => {}
            _ => {
                let problem = format!("{:?} does not start with a path", app.command);
                let allowed = "a list that starts with an absolute path";
                return refuse(&key("command"), problem, allowed);
            }
        }
        if app.db.is_empty() || app.db.contains('/') || app.db.starts_with('.') {
            let problem = format!("{:?} is not a plain file name", app.db);
            return refuse(&key("db"), problem, "a file name with no / and no leading dot");
        }
        for question in [&app.health, &app.next_due].into_iter().flatten() {
            if !question.starts_with('/') {
                let problem = format!("{question:?} does not start with /");
                return refuse(&key("health or next_due"), problem, "a path like /healthz");
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str, variables: &[(&str, &str)]) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dormouse.toml");
        std::fs::write(&path, text).unwrap();
        let get = |name: &str| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        Config::load_with(&path, get).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_file_is_a_config_that_manages_nothing() {
        let config = load("", &[]).unwrap();
        assert!(config.store.is_none());
        assert_eq!(config.edge.limits.waiters_per_host, 256);
    }

    #[test]
    fn the_example_config_is_a_good_one() {
        let config = load(include_str!("../../../../deploy/dormouse.toml"), &[]).unwrap();
        assert!(config.store.is_some() && config.apps.contains_key("guestbook"));
    }

    #[test]
    fn an_unknown_key_is_refused_by_name_with_what_is_allowed() {
        let error = load("[edge]\nlisten_on = 80\n", &[]).unwrap_err();
        assert!(error.contains("dormouse.toml"), "{error}");
        assert!(error.contains("listen_on"), "{error}");
        assert!(error.contains("expected one of"), "{error}");
    }

    #[test]
    fn values_that_do_not_fit_name_key_and_what_is_allowed() {
        for (text, key) in [
            ("[box]\nname = \"a b\"", "box.name"),
            ("[session]\ntakeover = \"automatic\"", "session.takeover"),
            ("[session]\nttl = \"1s\"\nmargin = \"900ms\"", "session.margin"),
            ("[store]\nkind = \"directory\"", "store.path"),
            ("[store]\nkind = \"s3\"\nbucket = \"b\"", "store.kind"),
            ("[app.x]\ncommand = [\"relative\"]", "app.x.command"),
            ("[app.x]\ncommand = [\"/x\"]\ndb = \"../y\"", "app.x.db"),
            ("[app.x]\ncommand = [\"/x\"]\nhealth = \"z\"", "app.x.health"),
        ] {
            let error = load(text, &[]).unwrap_err();
            assert!(error.contains(key) && error.contains("allowed:"), "{text}: {error}");
        }
    }

    #[test]
    fn the_environment_overrides_prefix_and_idle() {
        let text = "[store]\nkind = \"directory\"\npath = \"/s\"\n";
        let config = load(text, &[("DORMOUSE_PREFIX", "/p/"), ("DORMOUSE_IDLE", "90s")]).unwrap();
        assert_eq!(config.store.unwrap().prefix, "p");
        assert_eq!(config.sleep.idle, Span::from_secs(90));
        let error = load(text, &[("DORMOUSE_IDLE", "soon")]).unwrap_err();
        assert!(error.contains("DORMOUSE_IDLE"), "{error}");
    }
}
