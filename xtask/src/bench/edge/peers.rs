//! The proxies that are compared: ours on each engine, nginx, haproxy and the relay.
//!
//! Each is one process with one loop, in front of the same unix socket with kept connections, with
//! no log of requests. All are children in the foreground, ended by their ids.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use dormouse_e2e::edge::Proxy;
use dormouse_e2e::wait::until;
use dormouse_e2e::world::PATIENCE;
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;

use super::HOST;
use crate::shell::binaries;
use crate::tools;

/// One that is measured.
pub(super) struct Target {
    pub(super) name: &'static str,
    pub(super) address: SocketAddr,
    process: Process,
}

enum Process {
    Ours(Proxy),
    Other(Owned),
}

/// A child that is ended on drop.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Target {
    /// Processor time of all its threads so far.
    pub(super) fn cpu(&self) -> Result<Duration> {
        let id = match &self.process {
            Process::Ours(proxy) => proxy.pid(),
            Process::Other(child) => child.0.id(),
        };
        let clock = clock_getcpuclockid(Pid::from_raw(i32::try_from(id)?))?;
        Ok(clock.now()?.into())
    }
}

/// Where all are set up.
pub(super) struct Place<'a> {
    pub(super) dir: &'a Path,
    pub(super) upstream: &'a Path,
}

impl Place<'_> {
    /// Ours; gives the name of the engine that it took.
    pub(super) fn ours(&self, name: &'static str, engine: &str) -> Result<(Target, String)> {
        let config = self.dir.join(format!("dormouse-{engine}.toml"));
        let text = format!(
            "[edge]\nloops = 1\nlisten = [{{ name = \"http\", address = \"127.0.0.1:0\" }}]\n\
             [[route]]\nhost = \"{HOST}\"\nupstream = \"unix:{}\"\n",
            self.upstream.display()
        );
        fs::write(&config, text)?;
        let mut command = Command::new(binaries("release").join("dormouse-proxy"));
        command.arg("--config").arg(&config).args(["--engine", engine]);
        let proxy = Proxy::spawn(command, None)?;
        let log = proxy.log();
        let (_, after) = log.split_once("engine=").context("the proxy names no engine")?;
        let taken = after.trim_start_matches('"').chars().take_while(char::is_ascii_alphabetic);
        let taken = taken.collect();
        Ok((Target { name, address: proxy.address, process: Process::Ours(proxy) }, taken))
    }

    /// nginx: one process, its buffers large enough for every answer of the bench.
    pub(super) fn nginx(&self) -> Result<Target> {
        let address = free_address()?;
        let kinds = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temporary =
            kinds.map(|kind| format!("{kind}_temp_path {};\n", self.dir.join(kind).display()));
        let temporary = temporary.concat();
        let config = format!(
            "daemon off;\nmaster_process off;\npid {dir}/nginx.pid;\nerror_log stderr;\n\
             events {{ worker_connections 1024; }}\n\
             http {{\naccess_log off;\n{temporary}\
             upstream app {{ server unix:{upstream}; keepalive 64; \
             keepalive_requests 1000000000; }}\n\
             server {{\nlisten {address} backlog=1024;\nserver_name {HOST};\n\
             keepalive_requests 1000000000;\n\
             location / {{\nproxy_pass http://app;\nproxy_http_version 1.1;\n\
             proxy_buffer_size 16k;\nproxy_buffers 8 16k;\n\
             proxy_set_header Connection \"\";\nproxy_set_header Host $host;\n\
             proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;\n\
             proxy_set_header X-Forwarded-Proto $scheme;\n}}\n}}\n}}\n",
            dir = self.dir.display(),
            upstream = self.upstream.display(),
        );
        let file = self.dir.join("nginx.conf");
        fs::write(&file, config)?;
        let mut command = Command::new(tools::find("nginx")?);
        command.arg("-p").arg(self.dir).arg("-c").arg(&file).args(["-e", "stderr"]);
        self.start("nginx", address, command)
    }

    /// haproxy: one thread.
    pub(super) fn haproxy(&self) -> Result<Target> {
        let address = free_address()?;
        let config = format!(
            "global\n nbthread 1\n maxconn 4096\n\
             defaults\n mode http\n option http-keep-alive\n option forwardfor\n \
             http-reuse always\n timeout connect 10s\n timeout client 75s\n timeout server 300s\n\
             frontend edge\n bind {address} backlog 1024\n \
             acl served hdr(host) -i {HOST}\n use_backend app if served\n\
             backend app\n http-request set-header X-Forwarded-Proto http\n \
             server app unix@{} pool-max-conn 64\n",
            self.upstream.display(),
        );
        let file = self.dir.join("haproxy.cfg");
        fs::write(&file, config)?;
        let mut command = Command::new(tools::find("haproxy")?);
        command.arg("-db").arg("-f").arg(&file);
        self.start("haproxy", address, command)
    }

    /// The relay of the ring's crate, on that engine.
    pub(super) fn relay(&self, engine: &str) -> Result<Target> {
        let address = free_address()?;
        let mut command = Command::new(binaries("release").join("examples/relay"));
        command.arg(engine).arg(address.to_string()).arg(self.upstream);
        self.start("relay", address, command)
    }

    fn start(
        &self,
        name: &'static str,
        address: SocketAddr,
        mut command: Command,
    ) -> Result<Target> {
        let log = self.dir.join(format!("{name}.log"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        let mut child = Owned(command.spawn().with_context(|| format!("{command:?}"))?);
        until(PATIENCE, "a proxy listens", || {
            if let Some(status) = child.0.try_wait()? {
                bail!("{name} ended: {status}\n{}", fs::read_to_string(&log)?);
            }
            Ok(TcpStream::connect(address).is_ok())
        })?;
        Ok(Target { name, address, process: Process::Other(child) })
    }
}

fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}
