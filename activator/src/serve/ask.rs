//! The next-due question to an instance: `GET PATH` with its own token, answered `{"due": SECONDS}`.

use std::path::PathBuf;
use std::time::Duration;

use dormouse_core::time::Wall;
use dormouse_instances::parse_env_file;
use serde::Deserialize;

use crate::http;

/// Whom to ask what.
pub(crate) struct Question {
    pub(crate) socket: PathBuf,
    pub(crate) host: String,
    pub(crate) path: String,
    /// Name of the variable in the host's environment file that holds the token.
    pub(crate) token_name: Option<String>,
    pub(crate) env_file: PathBuf,
}

#[derive(Deserialize)]
struct Due {
    /// Unix seconds; 0 when nothing is scheduled.
    due: u64,
}

/// Asks; an error keeps the last known due time.
pub(crate) async fn next_due(question: Question, limit: Duration) -> Result<Option<Wall>, String> {
    let token = match &question.token_name {
        None => None,
        Some(name) => {
            let env = parse_env_file(&question.env_file).map_err(|error| error.to_string())?;
            Some(env.get(name).cloned().ok_or_else(|| format!("{name} is not in the env file"))?)
        }
    };
    let asked = http::get(&question.socket, &question.host, &question.path, token.as_deref());
    let answer = tokio::time::timeout(limit, asked)
        .await
        .map_err(|_| format!("no answer within {limit:?}"))?
        .map_err(|error| error.to_string())?;
    if answer.status != 200 {
        return Err(format!("{} answered {}", question.path, answer.status));
    }
    let due: Due = serde_json::from_slice(&answer.body)
        .map_err(|error| format!("{}: want {{\"due\": SECONDS}}: {error}", question.path))?;
    Ok((due.due > 0).then(|| Wall(due.due.saturating_mul(1000))))
}
