//! What differs between two configs, by key.

use toml::Value;

use super::Config;

/// Keys with another value, as the file has them: `sleep.idle`, `app.guestbook.command`.
#[must_use]
pub fn changes(old: &Config, new: &Config) -> Vec<String> {
    let mut keys = Vec::new();
    match (Value::try_from(old), Value::try_from(new)) {
        (Ok(old), Ok(new)) => compare("", Some(&old), Some(&new), &mut keys),
        // A number that TOML cannot hold: it did not come from a file.
        (Err(_), _) | (_, Err(_)) => (),
    }
    keys
}

fn compare(key: &str, old: Option<&Value>, new: Option<&Value>, keys: &mut Vec<String>) {
    let (old_table, new_table) = (old.and_then(Value::as_table), new.and_then(Value::as_table));
    if old == new {
        return;
    }
    // A section that comes or goes is one change.
    let is_whole = !key.is_empty() && (old_table.is_none() || new_table.is_none());
    if is_whole {
        keys.push(key.to_owned());
        return;
    }
    let names = |table: Option<&toml::Table>| -> Vec<String> {
        table.into_iter().flatten().map(|(name, _)| name.clone()).collect()
    };
    let mut all = names(old_table);
    all.extend(names(new_table));
    all.sort();
    all.dedup();
    for name in all {
        let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
        let of = |table: Option<&toml::Table>| table.and_then(|table| table.get(&name)).cloned();
        compare(&key, of(old_table).as_ref(), of(new_table).as_ref(), keys);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_value_is_told_by_its_key() {
        let read = |text: &str| toml::from_str::<Config>(text).unwrap();
        let old = read("[sleep]\nidle = \"15m\"\n[app.a]\ncommand = [\"/a\"]");
        assert_eq!(changes(&old, &old), Vec::<String>::new());
        let new = read(
            "[sleep]\nidle = \"1m\"\n[app.a]\ncommand = [\"/b\"]\n[store]\nkind = \"directory\"\n\
             path = \"/s\"\n[[route]]\nhost = \"p\"\nupstream = \"unix:/x\"",
        );
        let told = changes(&old, &new);
        for key in ["sleep.idle", "app.a.command", "store", "route"] {
            assert!(told.iter().any(|one| one == key), "{key}: {told:?}");
        }
        let back = changes(&new, &old);
        assert_eq!(back, told);
    }
}
