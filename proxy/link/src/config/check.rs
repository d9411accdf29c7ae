//! What the types alone cannot say: overrides from the environment, and values that must fit.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};

use super::{Config, Span, Store, StoreKind};
use apps::{app, pressure, users};

mod apps;

pub use apps::warnings;

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
        let store = config.store.get_or_insert_with(|| Store::new(StoreKind::S3));
        store.kind = StoreKind::S3;
        store.path = None;
        store.bucket = Some(bucket);
    }
    if let Some(store) = config.store.as_mut() {
        if let Some(region) = set("DORMOUSE_REGION").filter(|_| store.kind == StoreKind::S3) {
            store.region = Some(region);
        }
        if let Some(prefix) = set("DORMOUSE_PREFIX") {
            prefix.trim_matches('/').clone_into(&mut store.prefix);
        }
    }
    if let Some(idle) = set("DORMOUSE_IDLE") {
        config.sleep.idle = idle.parse::<Span>().map_err(|_| ConfigError::Value {
            place: ENVIRONMENT.to_owned(),
            key: "DORMOUSE_IDLE".to_owned(),
            problem: format!("{idle:?} is not a duration"),
            allowed: super::span::ALLOWED,
        })?;
    }
    Ok(())
}

/// A value that does not fit: its key, what is wrong, what is allowed.
type Misfit = (String, String, &'static str);

fn misfit<T>(key: &str, problem: String, allowed: &'static str) -> Result<T, Misfit> {
    Err((key.to_owned(), problem, allowed))
}

/// Checks what must fit together.
pub(super) fn check(config: &Config, path: &Path) -> Result<(), ConfigError> {
    let checked = this_box(config)
        .and_then(|()| edge(config))
        .and_then(|()| session(config))
        .and_then(|()| replica(config))
        .and_then(|()| users(config))
        .and_then(|()| pressure(config))
        .and_then(|()| config.store.as_ref().map_or(Ok(()), store))
        .and_then(|()| apart(config))
        .and_then(|()| config.apps.iter().try_for_each(|(name, an_app)| app(name, an_app)));
    checked.map_err(|(key, problem, allowed)| ConfigError::Value {
        place: path.display().to_string(),
        key,
        problem,
        allowed,
    })
}

fn this_box(config: &Config) -> Result<(), Misfit> {
    let this_box = &config.this_box;
    for (key, path) in
        [("box.data", &this_box.data), ("box.run", &this_box.run), ("box.etc", &this_box.etc)]
    {
        if !path.is_absolute() {
            return misfit(key, format!("{:?} is relative", path.display()), "an absolute path");
        }
    }
    let name = &this_box.name;
    if !is_box_name(name) {
        return misfit("box.name", format!("{name:?} cannot be a box's name"), BOX_NAME);
    }
    Ok(())
}

/// What [`is_box_name`] allows.
pub const BOX_NAME: &str = "1 to 64 of letters, digits, - and ., a letter or digit first and last";

/// Whether a box may be called so: its name is a file's name in the store, and a word of the command
/// line.
#[must_use]
pub fn is_box_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let ends = |c: char| c.is_ascii_alphanumeric();
    name.len() <= 64 && name.chars().all(plain) && name.starts_with(ends) && name.ends_with(ends)
}

/// Neither the store inside the data nor the data inside the store: the one is there for when the other
/// is lost, and each has names of its own.
fn apart(config: &Config) -> Result<(), Misfit> {
    let Some(path) = config.store.as_ref().and_then(|store| store.path.as_ref()) else {
        return Ok(());
    };
    let (store, data) = (lexical(path), lexical(&config.this_box.data));
    if store.starts_with(&data) || data.starts_with(&store) {
        let problem = format!(
            "{:?} and box.data {:?} are one in the other",
            path.display(),
            config.this_box.data.display()
        );
        return misfit("store.path", problem, "a directory outside box.data, on another disk");
    }
    Ok(())
}

/// Without `.` and `..`, by the words alone.
fn lexical(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            Component::Prefix(_) | Component::RootDir | Component::Normal(_) => plain.push(part),
        }
    }
    plain
}

fn is_address(text: &str) -> bool {
    text.parse::<SocketAddr>().is_ok()
}

fn edge(config: &Config) -> Result<(), Misfit> {
    for listen in &config.edge.listen {
        let fits = |address: &String| address.starts_with("unix:/") || is_address(address);
        if !listen.address.as_ref().is_none_or(fits) {
            let address = listen.address.as_deref().unwrap_or_default();
            let problem = format!("{address:?} of {:?} is no address", listen.name);
            return misfit("edge.listen", problem, "ADDRESS:PORT, [V6]:PORT or unix:/PATH");
        }
    }
    let mut hosts = BTreeSet::new();
    for route in &config.routes {
        let upstream = &route.upstream;
        if !(upstream.starts_with("unix:/")
            || upstream.strip_prefix("tcp:").is_some_and(is_address))
        {
            let problem = format!("upstream {upstream:?} of {:?}", route.host);
            return misfit("route.upstream", problem, "unix:PATH (absolute) or tcp:ADDRESS:PORT");
        }
        if !hosts.insert(route.host.to_ascii_lowercase()) {
            let problem = format!("{:?} is there twice", route.host);
            return misfit("route.host", problem, "one [[route]] a host");
        }
    }
    Ok(())
}

/// Renewals are sent three times in it: fewer than three a second.
const TTL_MIN: Span = Span::from_secs(1);
/// A box that is gone keeps its hosts for so long.
const TTL_MAX: Span = Span::from_secs(86_400);

fn session(config: &Config) -> Result<(), Misfit> {
    let session = &config.session;
    if !(TTL_MIN..=TTL_MAX).contains(&session.ttl) {
        let problem = format!("{} is too short or too long", session.ttl);
        return misfit("session.ttl", problem, "1s to 1d");
    }
    if session.margin.as_nanos().saturating_mul(2) > session.ttl.as_nanos() {
        let problem = format!("{} is over half of ttl", session.margin);
        return misfit("session.margin", problem, "at most half of session.ttl");
    }
    Ok(())
}

/// For tests; people count in hours.
const DRILL_MIN: Span = Span::from_millis(100);

fn replica(config: &Config) -> Result<(), Misfit> {
    let replica = &config.replica;
    let windows = [replica.level_1, replica.level_2, replica.level_3, replica.snapshot];
    if !windows.is_sorted() {
        let problem = "a level's window is shorter than that of the level below".to_owned();
        let allowed = "level_1 <= level_2 <= level_3 <= snapshot";
        return misfit("replica.level_1", problem, allowed);
    }
    if replica.wal_max_mib == 0 {
        let problem = "is 0: every commit would be followed by a whole image".to_owned();
        return misfit("replica.wal_max_mib", problem, "1 or more");
    }
    if config.drill.every.is_some_and(|every| every < DRILL_MIN) {
        let problem = "restores would follow one another without a pause".to_owned();
        return misfit("drill.every", problem, "100ms or more; a day is plenty");
    }
    if config.drill.max_mib == 0 {
        let problem = "is 0: no drill would be done".to_owned();
        return misfit("drill.max_mib", problem, "1 or more; leave drill.every away for no drills");
    }
    if replica.retention < replica.l0_retention {
        let problem = format!("{} is under l0_retention", replica.retention);
        return misfit("replica.retention", problem, "at least replica.l0_retention");
    }
    Ok(())
}

fn store(store: &Store) -> Result<(), Misfit> {
    match (store.kind, &store.path) {
        (StoreKind::Directory, None) => {
            let problem = "missing for kind \"directory\"".to_owned();
            return misfit("store.path", problem, "an absolute path");
        }
        (StoreKind::Directory, Some(path)) if !path.is_absolute() => {
            let problem = format!("{:?} is relative", path.display());
            return misfit("store.path", problem, "an absolute path");
        }
        (StoreKind::Directory, Some(_)) => directory(store)?,
        (StoreKind::S3, None) => s3(store)?,
        (StoreKind::S3, Some(_)) => {
            let problem = "is of kind \"directory\" alone".to_owned();
            return misfit("store.path", problem, "store.bucket for kind \"s3\"");
        }
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let parts = store.prefix.split('/').all(|part| !matches!(part, "" | "." | ".."));
    if !parts || !store.prefix.chars().all(plain) {
        let problem = format!("{:?} cannot be a prefix of keys", store.prefix);
        return misfit("store.prefix", problem, "names of letters, digits, - _ . joined by /");
    }
    Ok(())
}

/// What means nothing for a directory is a mistake.
fn directory(store: &Store) -> Result<(), Misfit> {
    let of_s3 = [
        ("store.bucket", store.bucket.is_some()),
        ("store.region", store.region.is_some()),
        ("store.endpoint", store.endpoint.is_some()),
        ("store.path_style", store.path_style.is_some()),
        ("store.credentials", store.credentials.is_some()),
    ];
    match of_s3.into_iter().find(|(_, is_set)| *is_set) {
        Some((key, _)) => misfit(key, "is of kind \"s3\" alone".to_owned(), "kind = \"s3\""),
        None => Ok(()),
    }
}

fn s3(store: &Store) -> Result<(), Misfit> {
    let Some(bucket) = &store.bucket else {
        let problem = "missing for kind \"s3\"".to_owned();
        return misfit("store.bucket", problem, "the name of a bucket that is there");
    };
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-._".contains(c);
    if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(plain) {
        let problem = format!("{bucket:?} cannot be a bucket's name");
        return misfit("store.bucket", problem, "3 to 63 of small letters, digits, - _ and .");
    }
    match (&store.endpoint, &store.region) {
        (None, None) => {
            let problem = "missing, and there is no store.endpoint".to_owned();
            return misfit("store.region", problem, "a region of AWS, like eu-central-1");
        }
        (None, Some(region)) if !is_aws_region(region) => {
            let problem = format!("{region:?} is no region of AWS");
            return misfit("store.region", problem, "one like eu-central-1, or set store.endpoint");
        }
        (Some(endpoint), _) if !is_endpoint(endpoint) => {
            // Not quoted: keys were seen in such places.
            let problem = "is no endpoint".to_owned();
            return misfit(
                "store.endpoint",
                problem,
                "http:// or https://, a host, perhaps a port",
            );
        }
        (None, Some(_)) | (Some(_), None | Some(_)) => {}
    }
    if store.credentials.as_ref().is_some_and(|path| !path.is_absolute()) {
        return misfit("store.credentials", "is relative".to_owned(), "an absolute path");
    }
    for (key, span) in [
        ("store.connect_timeout", store.connect_timeout),
        ("store.request_timeout", store.request_timeout),
    ] {
        if span.as_nanos() == 0 {
            return misfit(key, "is nothing".to_owned(), "more than 0s");
        }
    }
    if store.requests_at_a_time == 0 {
        return misfit("store.requests_at_a_time", "is 0".to_owned(), "1 or more");
    }
    Ok(())
}

/// `us-east-1`, `us-gov-west-1`: small words, and a number at the end.
fn is_aws_region(region: &str) -> bool {
    let parts: Vec<&str> = region.split('-').collect();
    let Some((number, words)) = parts.split_last() else { return false };
    let is_word = |word: &&str| !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase());
    let areas = ["af", "ap", "ca", "cn", "eu", "eusc", "il", "me", "mx", "sa", "us"];
    (2..=3).contains(&words.len())
        && words.iter().all(is_word)
        && words.first().is_some_and(|area| areas.contains(area))
        && (1..=2).contains(&number.len())
        && number.chars().all(|c| c.is_ascii_digit())
}

/// A scheme and a host; no path, no user.
fn is_endpoint(endpoint: &str) -> bool {
    let host = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
    let plain = |c: char| c.is_ascii_alphanumeric() || "-.:[]".contains(c);
    host.map(|host| host.strip_suffix('/').unwrap_or(host))
        .is_some_and(|host| !host.is_empty() && host.chars().all(plain))
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
            ("[box]\nname = \"\"", "box.name"),
            ("[box]\nname = \".\"", "box.name"),
            ("[box]\nname = \"..\"", "box.name"),
            ("[box]\nname = \"a/b\"", "box.name"),
            ("[box]\nname = \"-a\"", "box.name"),
            ("[box]\nname = \"a.\"", "box.name"),
            ("[box]\nname = \"a\\u0007\"", "box.name"),
            ("[session]\nttl = \"2d\"", "session.ttl"),
            ("[session]\nttl = \"10ms\"\nmargin = \"1ms\"", "session.ttl"),
            ("[session]\nttl = \"9999999d\"", "ttl"),
            ("[replica]\nwal_max_mib = 0", "replica.wal_max_mib"),
            ("[drill]\nmax_mib = 0", "drill.max_mib"),
            ("[box]\ndata = \"/d\"\n[store]\nkind = \"directory\"\npath = \"/d\"", "store.path"),
            (
                "[box]\ndata = \"/d\"\n[store]\nkind = \"directory\"\npath = \"/d/./s\"",
                "store.path",
            ),
            (
                "[box]\ndata = \"/s/d\"\n[store]\nkind = \"directory\"\npath = \"/x/../s/\"",
                "store.path",
            ),
            ("[session]\nttl = \"1s\"\nmargin = \"900ms\"", "session.margin"),
            ("[store]\nkind = \"directory\"", "store.path"),
            ("[store]\nkind = \"s3\"\nregion = \"us-east-1\"", "store.bucket"),
            ("[store]\nkind = \"s3\"\nbucket = \"A b\"", "store.bucket"),
            ("[store]\nkind = \"s3\"\nbucket = \"bbb\"", "store.region"),
            ("[store]\nkind = \"s3\"\nbucket = \"bbb\"\nregion = \"mars-1\"", "store.region"),
            ("[store]\nkind = \"s3\"\nbucket = \"bbb\"\nendpoint = \"e.test\"", "store.endpoint"),
            (
                "[store]\nkind = \"s3\"\nbucket = \"bbb\"\nendpoint = \"http://a:b@e\"",
                "store.endpoint",
            ),
            (
                "[store]\nkind = \"s3\"\nbucket = \"bbb\"\nregion = \"us-east-1\"\n\
                 credentials = \"keys\"",
                "store.credentials",
            ),
            (
                "[store]\nkind = \"s3\"\nbucket = \"bbb\"\nregion = \"us-east-1\"\n\
                 requests_at_a_time = 0",
                "store.requests_at_a_time",
            ),
            ("[store]\nkind = \"s3\"\nbucket = \"bbb\"\npath = \"/s\"", "store.path"),
            ("[store]\nkind = \"directory\"\npath = \"/s\"\nbucket = \"bbb\"", "store.bucket"),
            ("[replica]\nlevel_2 = \"1s\"", "replica.level_1"),
            ("[replica]\nretention = \"1s\"", "replica.retention"),
            ("[app.x]\ncommand = [\"relative\"]", "app.x.command"),
            ("[app.x]\ncommand = [\"/x\", \"{dbx}\"]", "app.x.command"),
            ("[app.x]\ncommand = [\"/x\", \"{db}\"]", "app.x.command"),
            ("[drill]\nevery = \"1ms\"", "drill.every"),
            ("[app.x]\ncommand = [\"/x\"]\ndb = \"../y\"", "app.x.db"),
            ("[app.x]\ncommand = [\"/x\"]\nhealth = \"z\"", "app.x.health"),
            ("[app.x]\ncommand = [\"/x\"]\nhealth = \"/a b\"", "app.x.health"),
            ("[app.x]\ncommand = [\"/x\"]\ndb = \"app.log\"", "app.x.db"),
            ("[box]\ndata = \"here\"", "box.data"),
            ("[edge]\nlisten = [{ name = \"h\", address = \"nonsense\" }]", "edge.listen"),
            ("[[route]]\nhost = \"a\"\nupstream = \"b\"", "route.upstream"),
            ("[store]\nkind = \"directory\"\npath = \"rel\"", "store.path"),
            ("[store]\nkind = \"directory\"\npath = \"/s\"\nprefix = \"../x\"", "store.prefix"),
        ] {
            let error = load(text, &[]).unwrap_err();
            assert!(error.contains(key) && error.contains("allowed:"), "{text}: {error}");
        }
    }

    #[test]
    fn a_store_beside_the_data_and_no_kept_uploads_are_good() {
        let text = "[box]\ndata = \"/srv/data\"\nname = \"box-1.eu\"\n[replica]\nlocal_mib = 0\n\
                    [store]\nkind = \"directory\"\npath = \"/srv/data-store\"";
        load(text, &[]).unwrap();
    }

    #[test]
    fn an_app_that_is_not_told_its_database_is_warned_of() {
        let warned = |more: &str| {
            let text = format!("[app.x]\ncommand = [\"/x\", \"{{socket}}\"{more}");
            warnings(&load(&text, &[]).unwrap()).join("\n")
        };
        assert!(warned("]").contains("app.x.command"), "{}", warned("]"));
        for told in [
            ", \"{db}\"]",
            ", \"--data={dir}\"]",
            ", \"app.db\"]",
            "]\n[app.x.env]\nDATABASE = \"app.db\"",
        ] {
            assert_eq!(warned(told), "", "{told}");
        }
    }

    #[test]
    fn an_s3_store_needs_a_bucket_and_a_region_or_an_endpoint() {
        for text in [
            "[store]\nkind = \"s3\"\nbucket = \"bbb\"\nregion = \"us-gov-west-1\"",
            "[store]\nkind = \"s3\"\nbucket = \"bbb\"\nendpoint = \"http://[::1]:9000/\"",
            "[store]\nkind = \"s3\"\nbucket = \"bbb\"\nregion = \"auto\"\n\
             endpoint = \"https://e.test\"\nchecksums = \"when_required\"",
        ] {
            load(text, &[]).unwrap();
        }
        let made = [("DORMOUSE_BUCKET", "bbb"), ("DORMOUSE_REGION", "eu-central-1")];
        let store = load("", &made).unwrap().store.unwrap();
        assert_eq!((store.kind, store.region_or_default()), (StoreKind::S3, "eu-central-1"));
        let directory = "[store]\nkind = \"directory\"\npath = \"/s\"\n";
        assert_eq!(load(directory, &made).unwrap().store.unwrap().kind, StoreKind::S3);
        let region = [("DORMOUSE_REGION", "eu-central-1")];
        assert_eq!(load(directory, &region).unwrap().store.unwrap().region, None);
        let error = load("", &[("DORMOUSE_BUCKET", "bbb")]).unwrap_err();
        assert!(error.contains("store.region"), "{error}");
    }

    #[test]
    fn the_environment_overrides_prefix_and_idle() {
        let text = "[store]\nkind = \"directory\"\npath = \"/s\"\n";
        let config = load(text, &[("DORMOUSE_PREFIX", "/p/"), ("DORMOUSE_IDLE", "90s")]).unwrap();
        assert_eq!(config.store.unwrap().prefix, "p");
        assert_eq!(config.sleep.idle, Span::from_secs(90));
        let error = load(text, &[("DORMOUSE_IDLE", "soon")]).unwrap_err();
        assert!(error.contains("DORMOUSE_IDLE") && error.contains("\"soon\""), "{error}");
        assert_eq!(error.matches("allowed").count(), 1, "{error}");
    }
}
