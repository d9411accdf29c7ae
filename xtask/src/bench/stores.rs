//! A real S3 server for benchmarks, a proxy with a round trip before it, and stock Litestream's
//! ways to it.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dormouse_test_store::{ACCESS_KEY, FaultProxy, SECRET_KEY, Server};

use super::process::{clock, millis};
use super::quantile;
use crate::tools;

/// The bucket of all benchmarks.
pub(crate) const BUCKET: &str = "bench";
/// Bare PUTs of which the median is taken.
const PUTS: usize = 30;
/// About as long as the upload of one small commit.
const PUT_BYTES: usize = 1024;

/// A running server with the bucket.
pub(crate) struct Remote {
    pub(crate) server: Server,
}

impl Remote {
    pub(crate) fn start() -> Result<Self> {
        let server = Server::seaweed_by(&tools::program("DORMOUSE_WEED")?)?;
        server.make_bucket(BUCKET)?;
        Ok(Self { server })
    }

    /// A proxy before it that adds this to each round trip.
    pub(crate) fn behind(&self, round_trip: Duration) -> Result<FaultProxy> {
        delayed(self.server.address(), round_trip)
    }

    /// Median of a PUT on an open connection through a proxy with this round trip, milliseconds:
    /// to the server's own port for files, which asks for no signature.
    pub(crate) fn bare_put_ms(&self, round_trip: Duration) -> Result<f64> {
        let filer = self.server.filer().context("this server has no port for files")?;
        let proxy = delayed(filer, round_trip)?;
        let mut stream = TcpStream::connect(proxy.address())?;
        stream.set_nodelay(true)?;
        let mut samples = Vec::new();
        for n in 0..PUTS {
            let mut request = format!(
                "PUT /buckets/{BUCKET}/bare/{n} HTTP/1.1\r\nHost: {filer}\r\n\
                 Content-Length: {PUT_BYTES}\r\n\r\n"
            )
            .into_bytes();
            request.resize(request.len() + PUT_BYTES, b'x');
            let begun = clock();
            stream.write_all(&request)?;
            answer(&mut stream)?;
            samples.push(millis(begun));
        }
        Ok(quantile(&samples, 0.5))
    }
}

/// Litestream's config for one database, in a file of this folder.
pub(crate) fn litestream_config(
    folder: &Path,
    database: &Path,
    endpoint: &str,
    prefix: &str,
) -> Result<PathBuf> {
    let path = folder.join("litestream.yml");
    let text = format!(
        "dbs:\n  - path: {}\n    replica:\n      type: s3\n      bucket: {BUCKET}\n      \
         path: {prefix}\n      endpoint: {endpoint}\n      region: us-east-1\n      \
         force-path-style: true\n      access-key-id: {ACCESS_KEY}\n      \
         secret-access-key: {SECRET_KEY}\n",
        database.display()
    );
    fs::write(&path, text)?;
    Ok(path)
}

fn delayed(target: SocketAddr, round_trip: Duration) -> Result<FaultProxy> {
    let proxy = FaultProxy::start(target)?;
    proxy.delay(round_trip / 2);
    Ok(proxy)
}

/// Reads one answer with a length.
fn answer(stream: &mut TcpStream) -> Result<()> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.extend_from_slice(&byte);
    }
    let head = String::from_utf8_lossy(&head).to_lowercase();
    ensure!(head.starts_with("http/1.1 20"), "a bare PUT was answered {head}");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length.context("an answer without a length")?.trim().parse()?;
    stream.read_exact(&mut vec![0; length])?;
    Ok(())
}

/// Stock Litestream, kept from certificates that it has no use for.
pub(crate) fn litestream_command(litestream: &Path) -> Command {
    let mut command = Command::new(litestream);
    command.env_remove("AWS_CA_BUNDLE");
    command
}
