//! The commands: each one request to the admin socket, or one piece of work of its own.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use dormouse_core::ids::Txid;
use dormouse_link::config::{BOX_NAME, Config, is_box_name, warnings};
use dormouse_registry::canonical_host;
use dormouse_replica::restore::Target;
use dormouse_store::Reading;
use serde_json::Value;

use crate::http::{self, Answer};
use crate::restore::{self, Wanted};
use crate::serve::{HostStatus, Status};
use crate::{Command, ConfigCommand, From, Moment, cost};

/// Speaks to standard output. Who reads may have enough (`| head`): that is no error.
macro_rules! tell {
    ($($words:tt)*) => {
        drop(writeln!(std::io::stdout(), $($words)*))
    };
}
pub(crate) use tell;

pub(crate) async fn run(config: Config, command: Command, json: bool) -> anyhow::Result<ExitCode> {
    let socket = config.this_box.admin_socket();
    let ask = |method: &'static str, path: String, body: Value| {
        let socket = socket.clone();
        async move { asked(&socket, method, &path, &body).await }
    };
    match command {
        Command::Serve | Command::Guard { .. } => unreachable_serve(),
        Command::Add { host, app } => {
            let body = serde_json::json!({ "app": app });
            say(&ask("POST", format!("/hosts/{}", name(&host)?), body).await?, json)
        }
        Command::Rm { host } => {
            say(&ask("DELETE", format!("/hosts/{}", name(&host)?), Value::Null).await?, json)
        }
        Command::List => {
            let status: Status = of(&ask("GET", "/status".into(), Value::Null).await?)?;
            list(&status, json)
        }
        Command::Status { host, cost: true } => show_cost(&socket, host.as_deref(), json).await,
        Command::Status { host: None, cost: false } => {
            let status: Status = of(&ask("GET", "/status".into(), Value::Null).await?)?;
            show(&status, json)
        }
        Command::Status { host: Some(host), cost: false } => {
            let answer = ask("GET", format!("/hosts/{}", name(&host)?), Value::Null).await?;
            show_host(&of(&answer)?, json)
        }
        Command::Wake { host } => {
            let path = format!("/hosts/{}/wake", name(&host)?);
            show_host(&of(&ask("POST", path, Value::Null).await?)?, json)
        }
        Command::Sleep { host, no_wait } => {
            let path = format!("/hosts/{}/sleep?wait={}", name(&host)?, !no_wait);
            show_host(&of(&ask("POST", path, Value::Null).await?)?, json)
        }
        Command::Wait { host, state, timeout_s } => {
            let path = format!("/hosts/{}/wait?state={state}", name(&host)?);
            let waited = ask("GET", path, Value::Null);
            match tokio::time::timeout(Duration::from_secs(timeout_s), waited).await {
                Ok(answer) => show_host(&of(&answer?)?, json),
                Err(_) => bail!("{host} was not {state} within {timeout_s} s"),
            }
        }
        Command::Restore { host, to, dry_run, from } => {
            let wanted = Wanted { host: name(&host)?, target: target(&from) };
            restore::restore(&config, &wanted, to.as_deref(), dry_run, json).await
        }
        Command::Verify { host, from } => {
            let wanted = Wanted { host: name(&host)?, target: target(&from) };
            restore::verify(&config, &wanted, json).await
        }
        Command::Hibernate { host, on, .. } => {
            let path = format!("/hosts/{}/hibernate", name(&host)?);
            say(&ask("POST", path, serde_json::json!({ "on": on })).await?, json)
        }
        Command::Takeover { name } => {
            box_name(&name)?;
            say(&ask("POST", format!("/takeover/{name}"), Value::Null).await?, json)
        }
        Command::Reload => say(&ask("POST", "/reload".into(), Value::Null).await?, json),
        Command::Config { command: ConfigCommand::Check } => {
            for warning in warnings(&config) {
                // Nobody may listen.
                drop(writeln!(std::io::stderr(), "dormouse: warning: {warning}"));
            }
            print_value(&serde_json::to_value(&config)?, json)
        }
    }
}

const fn target(from: &From) -> Target {
    match (from.txid, from.at) {
        (Some(txid), _) => Target::Txid(Txid(txid)),
        (None, Some(Moment(ms))) => Target::Timestamp(ms),
        (None, None) => Target::Latest,
    }
}

/// `serve` and `guard` are handled before: they are no commands to a running activator.
fn unreachable_serve() -> anyhow::Result<ExitCode> {
    bail!("serve or guard was asked for twice")
}

fn box_name(name: &str) -> anyhow::Result<()> {
    if !is_box_name(name) {
        bail!("{name:?} cannot be a box's name; allowed: {BOX_NAME}");
    }
    Ok(())
}

fn name(host: &str) -> anyhow::Result<String> {
    Ok(canonical_host(host)?)
}

async fn asked(socket: &Path, method: &str, path: &str, body: &Value) -> anyhow::Result<Answer> {
    let bytes = if body.is_null() { Vec::new() } else { serde_json::to_vec(body)? };
    http::send(socket, method, path, &bytes).await.with_context(|| {
        format!(
            "no activator at {}: is `dormouse serve` running with this config?",
            socket.display()
        )
    })
}

/// A good answer's body; a bad one's message as an error.
fn of<T: serde::de::DeserializeOwned>(answer: &Answer) -> anyhow::Result<T> {
    if answer.status != 200 {
        bail!("{}", message(answer));
    }
    serde_json::from_slice(&answer.body).context("the activator is of another version")
}

fn message(answer: &Answer) -> String {
    let value: Option<Value> = serde_json::from_slice(&answer.body).ok();
    let text = value.as_ref().and_then(|value| value.get("message")?.as_str());
    text.map_or_else(|| format!("the activator answered {}", answer.status), str::to_owned)
}

fn say(answer: &Answer, json: bool) -> anyhow::Result<ExitCode> {
    if answer.status != 200 {
        bail!("{}", message(answer));
    }
    if json {
        tell!("{}", serde_json::json!({ "message": message(answer) }));
    } else {
        tell!("{}", message(answer));
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn print_value(value: &Value, json: bool) -> anyhow::Result<ExitCode> {
    let text =
        if json { serde_json::to_string(value)? } else { serde_json::to_string_pretty(value)? };
    tell!("{text}");
    Ok(ExitCode::SUCCESS)
}

fn list(status: &Status, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        return print_value(&serde_json::to_value(&status.hosts)?, true);
    }
    for host in &status.hosts {
        tell!("{:<40} {:<16} {}", host.host, host.app, host.state);
    }
    Ok(ExitCode::SUCCESS)
}

fn show(status: &Status, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        return print_value(&serde_json::to_value(status)?, true);
    }
    tell!("box          {}", status.name);
    tell!("session      {} {}", status.session, status.session_detail);
    tell!("store        {}", status.store);
    tell!("instances    {}", status.containment);
    tell!("apart        {}", status.isolation);
    tell!("guard        {}", status.guard);
    tell!("accounting   {}", status.accounting);
    tell!("proxies      {:?}", status.proxies);
    for host in &status.hosts {
        let behind = if host.unsynced { "  not all in the store yet" } else { "" };
        let problem = host.problem.as_deref().map(|p| format!("{behind}  ({p})"));
        let problem = problem.unwrap_or_else(|| behind.to_owned());
        tell!(
            "{:<40} {:<10} in flight {:<4} lag {} ms{problem}",
            host.host,
            host.state,
            host.in_flight,
            host.lag_ms.unwrap_or(0)
        );
    }
    Ok(ExitCode::SUCCESS)
}

async fn show_cost(socket: &Path, host: Option<&str>, json: bool) -> anyhow::Result<ExitCode> {
    let reading: Reading = of(&asked(socket, "GET", "/cost", &Value::Null).await?)?;
    let host = host.map(name).transpose()?;
    if let Some(host) = host.as_ref().filter(|host| !reading.contains_key(*host)) {
        // For a host that is served nothing was asked yet; for another one there is no bill.
        let answer = asked(socket, "GET", &format!("/hosts/{host}"), &Value::Null).await?;
        of::<HostStatus>(&answer)?;
    }
    let bill = cost::bill(reading, host.as_deref());
    if json {
        return print_value(&serde_json::to_value(&bill)?, true);
    }
    tell!("{bill}");
    Ok(ExitCode::SUCCESS)
}

fn show_host(host: &HostStatus, json: bool) -> anyhow::Result<ExitCode> {
    let value = serde_json::to_value(host)?;
    if json {
        return print_value(&value, true);
    }
    for (key, value) in value.as_object().into_iter().flatten() {
        match value {
            Value::Null => {}
            Value::String(text) => tell!("{key:<14} {text}"),
            Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                tell!("{key:<14} {value}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
