//! The start of an instance: its socket, its environment, its process, and whether it is healthy.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dormouse_core::event::{Answer, Event, Ticket};
use dormouse_core::ids::{Run, Slot};
use dormouse_instances::{
    Confine, Health, Instance, Limits, Nursery, Start, environment_of, parse_env_file, wait_healthy,
};
use dormouse_link::RunNumber;
use dormouse_link::config::{AppLimits, AppListen};

use super::driver::{Driver, Hosted, Input, Parts};

/// One start, prepared.
struct Launch {
    nursery: Nursery,
    start: Start,
    socket: PathBuf,
    health: Health,
    limit: Duration,
}

impl Driver {
    pub(crate) fn spawn(&mut self, ticket: Ticket, slot: Slot) {
        let launch = self.next_run().and_then(|run| {
            let hosted = self.hosted(slot).ok_or_else(|| "the host is gone".to_owned())?;
            let launch = prepare(&self.parts, hosted, run)?;
            Ok((run, launch))
        });
        let (run, launch) = match launch {
            Ok(launch) => launch,
            Err(why) => return self.answer_at_once(ticket, Answer::StartFailed(why)),
        };
        // Started here, not in the task: from now on a kill must find it.
        let Launch { nursery, start, socket, health, limit } = launch;
        let former = self.hosted(slot).and_then(|hosted| hosted.instance.as_ref());
        let left = former.is_some_and(Instance::is_left);
        assert!(!left, "invariant 9: a start while an earlier instance is left");
        let host = start.host.clone();
        let log = start.log.clone();
        match nursery.start(start) {
            Err(error) => self.answer_at_once(ticket, Answer::StartFailed(error.to_string())),
            Ok(instance) => {
                tracing::info!(host, %run, pid = instance.pid(), "instance started");
                if let Some(hosted) = self.hosts.get_mut(&slot) {
                    hosted.instance = Some(instance.clone());
                    hosted.run = Some(run);
                }
                self.watch(slot, run, instance.clone());
                self.answer_later(ticket, async move {
                    let ready = Ready { socket, host, health, limit, log };
                    ready.wait(&instance, run).await
                });
            }
        }
    }

    /// Tells the core when the instance ends by itself.
    pub(crate) fn watch(&self, slot: Slot, run: Run, instance: Instance) {
        let inputs = self.parts.inputs.clone();
        tokio::spawn(async move {
            let how = instance.ended().await;
            tracing::info!(%slot, %run, how, "instance ended");
            inputs.send(Input::Event(Event::Died(slot, run))).ok();
        });
    }
}

/// What makes a started instance healthy.
struct Ready {
    socket: PathBuf,
    host: String,
    health: Health,
    limit: Duration,
    log: PathBuf,
}

impl Ready {
    async fn wait(self, instance: &Instance, run: Run) -> Answer {
        let healthy = wait_healthy(&self.socket, &self.host, &self.health);
        let bounded = tokio::time::timeout(self.limit, healthy);
        let why = tokio::select! {
            done = bounded => match done {
                Ok(Ok(())) => match open_to_proxy(&self.socket) {
                    Ok(()) => return Answer::Healthy(run),
                    Err(error) => format!("{}: {error}", self.socket.display()),
                },
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("not healthy within {:?}", self.limit),
            },
            how = instance.ended() => format!("the instance {how} before it was healthy"),
        };
        Answer::StartFailed(format!("{why}; its output is in {}", self.log.display()))
    }
}

fn prepare(parts: &Parts, hosted: &Hosted, run: Run) -> Result<Launch, String> {
    let paths = &parts.paths;
    let Hosted { host, app, user, .. } = hosted;
    paths.make_host(host, *user).map_err(|error| error.to_string())?;
    paths.clear_sockets(host).map_err(|error| format!("old sockets: {error}"))?;
    let socket = paths.socket(host, RunNumber(run.0));
    let dir = paths.host_dir(host);
    let database = paths.database(host, app);
    let fill = |text: &String| {
        text.replace("{socket}", &socket.display().to_string())
            .replace("{db}", &database.display().to_string())
            .replace("{dir}", &dir.display().to_string())
            .replace("{host}", host)
    };
    let (program, args) = app.command.split_first().ok_or("the app has no command")?;
    let mut env = environment_of(&dir, host);
    env.extend(app.env.clone());
    env.extend(parse_env_file(&paths.env_file(host)).map_err(|error| error.to_string())?);
    let listener = match app.listen {
        AppListen::Path => None,
        AppListen::Fd => Some(bind(&socket).map_err(|e| format!("{}: {e}", socket.display()))?),
    };
    let health = match (&app.health, app.listen) {
        (Some(path), _) => Health::Answers(path.clone()),
        (None, AppListen::Path) => Health::Connects,
        (None, AppListen::Fd) => Health::Handed,
    };
    let program = PathBuf::from(fill(program));
    let confine = parts.config.instances.landlock.then(|| Confine {
        read: program.parent().map(Path::to_owned).into_iter().chain(app.read.clone()).collect(),
        write: [vec![dir.clone(), paths.run().join(host)], app.write.clone()].concat(),
    });
    let start = Start {
        host: host.to_owned(),
        run: run.0,
        program,
        args: args.iter().map(fill).collect(),
        env,
        dir: dir.clone(),
        log: paths.log(host),
        listener,
        user: *user,
        confine,
        limits: limits_of(&app.limits),
    };
    let (nursery, limit) = (parts.nursery.clone(), parts.config.wake.health.duration());
    Ok(Launch { nursery, start, socket, health, limit })
}

/// As the kernel counts them.
pub(crate) fn limits_of(limits: &AppLimits) -> Limits {
    let bytes = |mib: Option<u32>| mib.map(|mib| u64::from(mib) << 20);
    Limits {
        memory_high: bytes(limits.memory_high_mib),
        memory_max: bytes(limits.memory_max_mib),
        pids_max: limits.pids_max,
        cpu_weight: limits.cpu_weight,
    }
}

fn bind(socket: &Path) -> io::Result<OwnedFd> {
    let listener = std::os::unix::net::UnixListener::bind(socket)?;
    open_to_proxy(socket)?;
    Ok(listener.into())
}

/// The proxy connects as another user, whatever the app's umask was. The app can put a link there: what
/// is changed is the socket itself, by a descriptor, or nothing.
fn open_to_proxy(socket: &Path) -> io::Result<()> {
    let flags = nix::libc::O_PATH | nix::libc::O_NOFOLLOW;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(socket)?;
    if !file.metadata()?.file_type().is_socket() {
        return Err(io::Error::other("it is no socket"));
    }
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::set_permissions(itself, std::fs::Permissions::from_mode(0o666))
}
