use std::time::Duration;

use super::*;
use crate::LeaderId;
use crate::{Health, wait_healthy};

const PATIENCE: Duration = Duration::from_secs(10);

struct World {
    dir: tempfile::TempDir,
    nursery: Nursery,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let nursery = Nursery::open(dir.path()).unwrap();
        Self { dir, nursery }
    }

    fn scanning() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { dir, nursery: Nursery::without_cgroups("a test").unwrap() }
    }

    fn shell(&self, run: u64, script: &str) -> Start {
        Start {
            host: format!("test-{}", std::process::id()),
            run,
            program: "/bin/sh".into(),
            args: vec!["-c".to_owned(), script.to_owned()],
            env: crate::environment_of(self.dir.path(), "a.test"),
            dir: self.dir.path().to_owned(),
            log: self.log(),
            listener: None,
            user: None,
            confine: None,
            limits: Limits::default(),
        }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("app.log")
    }

    fn output(&self) -> String {
        fs::read_to_string(self.log()).unwrap()
    }
}

async fn gone(instance: &Instance) {
    tokio::time::timeout(PATIENCE, instance.gone()).await.expect("it is gone in time").unwrap();
    assert!(!instance.is_left());
}

#[tokio::test]
async fn an_instance_runs_in_its_directory_with_its_environment_and_a_log() {
    let world = World::new();
    let mut start = world.shell(1, "pwd; echo host=$DORMOUSE_HOST; cat /proc/self/cgroup");
    start.env.insert("EXTRA".to_owned(), "1".to_owned());
    let instance = world.nursery.start(start).unwrap();
    assert_eq!(instance.ended().await, "exited with status 0");
    gone(&instance).await;
    let output = world.output();
    assert!(output.contains(&world.dir.path().display().to_string()), "{output}");
    assert!(output.contains("host=a.test"), "{output}");
    world.nursery.close();
}

#[tokio::test]
async fn a_double_fork_that_ignores_sigterm_is_killed_and_proven_gone() {
    for (world, run) in [(World::new(), 2), (World::scanning(), 3)] {
        let up = world.dir.path().join("up");
        nix::unistd::mkfifo(&up, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let script = "trap '' TERM; (setsid sh -c \"trap '' TERM; echo up > up; \
                      while :; do sleep 1; done\" &) ; while :; do sleep 1; done";
        let instance = world.nursery.start(world.shell(run, script)).unwrap();
        let said = tokio::task::spawn_blocking(move || fs::read_to_string(up));
        let said = tokio::time::timeout(PATIENCE, said).await.expect("it starts in time");
        assert_eq!(said.unwrap().unwrap(), "up\n");
        instance.terminate();
        assert!(instance.is_left());
        instance.kill().unwrap();
        gone(&instance).await;
        world.nursery.close();
    }
}

#[tokio::test]
async fn a_later_activator_finds_what_was_left_running_and_stops_it() {
    let world = World::new();
    let left = world.nursery.start(world.shell(4, "while :; do sleep 1; done")).unwrap();
    let again = Nursery::open(world.dir.path()).unwrap();
    let mut leftovers = again.leftovers();
    assert_eq!(leftovers.len(), 1);
    let leftover = leftovers.pop().unwrap();
    assert_eq!(leftover.run, 4);
    leftover.instance.kill().unwrap();
    gone(&leftover.instance).await;
    assert_eq!(left.ended().await, "was killed by SIGKILL");
    assert!(again.leftovers().is_empty());
    again.close();
}

#[tokio::test]
async fn a_missing_executable_and_one_without_permission_say_so() {
    let world = World::new();
    let mut start = world.shell(5, "");
    start.program = "/nowhere/app".into();
    let error = world.nursery.start(start).unwrap_err().to_string();
    assert!(error.contains("/nowhere/app") && error.contains("exec"), "{error}");
    let plain = world.dir.path().join("plain");
    fs::write(&plain, "not a program").unwrap();
    let mut start = world.shell(6, "");
    start.program = plain;
    let error = world.nursery.start(start).unwrap_err().to_string();
    assert!(error.contains("Permission denied"), "{error}");
    world.nursery.close();
}

#[tokio::test]
async fn a_handed_over_listener_is_descriptor_3_of_the_very_process() {
    let world = World::new();
    let socket = world.dir.path().join("s.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let script = "[ \"$LISTEN_PID\" = \"$$\" ] && [ \"$LISTEN_FDS\" = 1 ] && \
                  readlink /proc/self/fd/3";
    let mut start = world.shell(7, script);
    start.listener = Some(listener.into());
    let instance = world.nursery.start(start).unwrap();
    assert_eq!(instance.ended().await, "exited with status 0");
    gone(&instance).await;
    assert!(world.output().starts_with("socket:"), "{}", world.output());
    wait_healthy(&socket, "a.test", &Health::Handed).await.unwrap();
    world.nursery.close();
}

#[tokio::test]
async fn a_path_socket_is_waited_for_from_before_its_bind() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("late.sock");
    let waits = wait_healthy(&socket, "a.test", &Health::Connects);
    let binds = async {
        tokio::task::yield_now().await;
        tokio::net::UnixListener::bind(&socket).unwrap()
    };
    let (waited, _listener) =
        tokio::time::timeout(PATIENCE, async { tokio::join!(waits, binds) }).await.unwrap();
    waited.unwrap();
}

#[tokio::test]
async fn a_frozen_instance_does_not_run_until_it_is_thawed() {
    let world = World::new();
    let instance = world.nursery.start(world.shell(8, "read x; echo done")).unwrap();
    if matches!(world.nursery.containment(), Containment::Cgroup(_)) {
        instance.freeze(true).unwrap();
        instance.freeze(false).unwrap();
    }
    instance.ended().await;
    gone(&instance).await;
    world.nursery.close();
}

#[tokio::test]
async fn a_later_activator_takes_over_what_runs_and_hears_of_its_end() {
    let world = World::new();
    let left = world.nursery.start(world.shell(5, "while :; do sleep 1; done")).unwrap();
    let leader = left.leader().unwrap();
    left.freeze(true).unwrap();
    let again = Nursery::open(world.dir.path()).unwrap();
    let found = again.leftovers().pop().unwrap();
    let taken = found.instance.taken_over(leader).unwrap();
    assert_eq!(taken.leader(), Some(leader));
    taken.terminate();
    tokio::time::timeout(PATIENCE, taken.ended()).await.expect("it is frozen no more");
    gone(&taken).await;
    again.close();
}

#[tokio::test]
async fn a_first_process_that_is_another_one_by_now_is_not_taken_for_it() {
    let world = World::new();
    let left = world.nursery.start(world.shell(6, "while :; do sleep 1; done")).unwrap();
    let leader = left.leader().unwrap();
    let found = Nursery::open(world.dir.path()).unwrap().leftovers().pop().unwrap();
    let reused = LeaderId { began: leader.began + 1, ..leader };
    assert!(found.instance.taken_over(reused).is_err());
    let outside = std::process::id().try_into().unwrap();
    let began = crate::processes::began(outside).unwrap();
    assert!(found.instance.taken_over(LeaderId { pid: outside, began }).is_err());
    left.kill().unwrap();
    gone(&left).await;
    world.nursery.close();
}
