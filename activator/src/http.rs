//! A small HTTP/1.1 client over a unix socket: one request, one answer, connection closed.

use std::io;
use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// Longest answer that is read: a status of 100,000 hosts has about 20 MiB.
const ANSWER_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Most fields of an answer's head.
const FIELDS_MAX: usize = 64;

/// Sends a GET.
pub(crate) async fn get(
    socket: &Path,
    host: &str,
    path: &str,
    bearer: Option<&str>,
) -> io::Result<Answer> {
    let token = bearer.map(|token| format!("Authorization: Bearer {token}\r\n"));
    request(socket, "GET", host, path, &token.unwrap_or_default(), b"").await
}

/// Sends a JSON body, or none.
pub(crate) async fn send(
    socket: &Path,
    method: &str,
    path: &str,
    body: &[u8],
) -> io::Result<Answer> {
    let fields = "Content-Type: application/json\r\n";
    request(socket, method, "dormouse", path, fields, body).await
}

async fn request(
    socket: &Path,
    method: &str,
    host: &str,
    path: &str,
    fields: &str,
    body: &[u8],
) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket).await?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\
         Content-Length: {length}\r\n{fields}\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await?;
    parse(&answer)
}

/// The connection was closed behind the answer, so the body is what follows the head, unless it is
/// chunked.
fn parse(answer: &[u8]) -> io::Result<Answer> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut response = httparse::Response::new(&mut fields);
    let parsed = response.parse(answer).map_err(|_| invalid("the answer is not HTTP"))?;
    let httparse::Status::Complete(head) = parsed else {
        return Err(invalid("the answer ends in its head"));
    };
    let status = response.code.unwrap_or_default();
    let body = answer.get(head..).unwrap_or_default();
    let field = |name: &str| {
        response.headers.iter().find(|f| f.name.eq_ignore_ascii_case(name)).map(|f| f.value)
    };
    let body = match (field("transfer-encoding"), field("content-length")) {
        (Some(_), _) => unchunk(body).ok_or_else(|| invalid("the answer's chunks are damaged"))?,
        (None, Some(length)) => {
            let length = std::str::from_utf8(length).ok().and_then(|text| text.trim().parse().ok());
            let length: usize = length.ok_or_else(|| invalid("a bad Content-Length"))?;
            body.get(..length).ok_or_else(|| invalid("the answer is cut short"))?.to_vec()
        }
        (None, None) => body.to_vec(),
    };
    Ok(Answer { status, body })
}

fn unchunk(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
        let line = std::str::from_utf8(rest.get(..end)?).ok()?;
        let size = usize::from_str_radix(line.split(';').next()?.trim(), 16).ok()?;
        if size == 0 {
            return Some(body);
        }
        let start = end.checked_add(2)?;
        let stop = start.checked_add(size)?;
        body.extend_from_slice(rest.get(start..stop)?);
        rest = rest.get(stop.checked_add(2)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_with_a_length_or_with_chunks_gives_its_body() {
        let plain = parse(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
        assert_eq!((plain.status, plain.body.as_slice()), (200, b"ok".as_slice()));
        let chunked = b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x\r\nc\r\n0\r\n\r\n";
        assert_eq!(parse(chunked).unwrap().body, b"abc");
    }

    #[test]
    fn a_damaged_answer_is_an_error() {
        for bad in [
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok".as_slice(),
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
            b"HTTP/1.1 200",
            b"SSH-2.0\r\n\r\n",
        ] {
            parse(bad).unwrap_err();
        }
    }
}
