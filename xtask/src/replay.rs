//! An event log, replayed through the core: what it did then, it does again.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use dormouse_core::Core;
use dormouse_core::effect::Effect;
use dormouse_core::event::Line;

fn show(effect: &Effect) {
    if let Effect::Put(ticket, key, body, expect) = effect {
        // A record is JSON.
        let body = String::from_utf8_lossy(body);
        println!("    Put({ticket:?}, {key:?}, {body}, {expect:?})");
    } else {
        println!("    {effect:?}");
    }
}

/// Prints every input and what it led to.
pub(crate) fn run(file: &Path) -> Result<()> {
    let lines = BufReader::new(fs::File::open(file).with_context(|| file.display().to_string())?);
    let mut core: Option<Core> = None;
    let mut steps = 0_u64;
    for (index, line) in lines.lines().enumerate() {
        let line = line?;
        let at = || format!("{}: line {}", file.display(), index + 1);
        match serde_json::from_str::<Line>(&line).with_context(at)? {
            Line::Settings(settings) => core = Some(Core::new(settings)),
            Line::Step(now, event) => {
                let Some(core) = core.as_mut() else {
                    bail!("{}: no settings before the first step", at());
                };
                println!("{} {event:?}", now.mono.0);
                let mut effects = Vec::new();
                core.step(now, event, &mut effects);
                effects.iter().for_each(show);
                steps += 1;
            }
        }
    }
    let Some(core) = core else { bail!("{}: empty", file.display()) };
    for host in core.hosts() {
        println!("{} is {}", host.host, host.state);
    }
    println!("replay: {steps} steps");
    Ok(())
}
