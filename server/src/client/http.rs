//! HTTP requests to a node's HTTP port: one per connection.

use std::error::Error;
use std::io;
use std::time::Duration;

use http::header::{AUTHORIZATION, CONNECTION, ETAG, HOST};
use http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tollgate_client::connection::Target;

/// Longest accepted body, in bytes.
const MAX_BODY: usize = 256 * 1024 * 1024;

/// An HTTP response.
#[derive(Debug, PartialEq)]
pub struct HttpResponse {
    /// HTTP status code.
    pub status: u16,
    /// The header `ETag`.
    pub etag: Option<String>,
    /// Body as UTF-8 text.
    pub body: String,
}

/// Sends a request to a node, whose URI is a path. `limit` applies to the connection attempt of each
/// address, then to the TLS handshake and the response together.
///
/// Errors: `InvalidData` for an answer that is not HTTP, not UTF-8 or too long, `UnexpectedEof`
/// for an incomplete one, `TimedOut`, or what the connection failed with. The sources of an
/// error include that of TLS.
pub async fn send(
    target: &Target,
    request: Request<Bytes>,
    limit: Duration,
) -> io::Result<HttpResponse> {
    let request = addressed(target, request).await?;
    let stream = target.address().connect(limit).await?;
    let response = async {
        match target.credentials().dialer() {
            None => exchange(stream, request).await,
            Some(dialer) => {
                let stream = dialer.handshake(target.address().host(), stream).await?;
                exchange(stream, request).await
            }
        }
    };
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("timed out after {limit:?}"));
    timeout(limit, response).await.map_err(late)?
}

/// The request with the headers that each request has.
async fn addressed(target: &Target, request: Request<Bytes>) -> io::Result<Request<Full<Bytes>>> {
    let mut request = request.map(Full::new);
    let authorization = target.credentials().authorization().await;
    let headers = request.headers_mut();
    let host = HeaderValue::try_from(target.address().to_string()).map_err(io::Error::other)?;
    headers.insert(HOST, host);
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    headers.extend(authorization.map(|value| (AUTHORIZATION, value)));
    Ok(request)
}

/// Sends the request on the connection `stream`, and receives the response.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    request: Request<Full<Bytes>>,
) -> io::Result<HttpResponse> {
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(io_error)?;
    let response =
        async move { receive(sender.send_request(request).await.map_err(io_error)?).await };
    let (response, connection) = tokio::join!(response, connection);
    match (response, connection) {
        // The connection knows why it ended; the request may only know that it did.
        (Err(_), Err(error)) => Err(io_error(error)),
        (response, _) => response,
    }
}

async fn receive(response: Response<Incoming>) -> io::Result<HttpResponse> {
    let status = response.status().as_u16();
    let etag = response.headers().get(ETAG).and_then(|value| value.to_str().ok());
    let etag = etag.map(str::to_owned);
    let body = Limited::new(response.into_body(), MAX_BODY).collect().await;
    let body = body.map_err(|error| match error.downcast::<hyper::Error>() {
        Ok(error) => io_error(*error),
        Err(error) => io::Error::new(io::ErrorKind::InvalidData, error),
    })?;
    let body = String::from_utf8(body.to_bytes().into());
    let body = body.map_err(|_| invalid("the answer is not UTF-8 text"))?;
    Ok(HttpResponse { status, etag, body })
}

/// The I/O error that caused `error`, or one that says what is wrong with the answer.
fn io_error(error: hyper::Error) -> io::Error {
    let cause = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    if let Some(kind) = cause.map(io::Error::kind) {
        io::Error::new(kind, error)
    } else if error.is_incomplete_message() {
        io::Error::new(io::ErrorKind::UnexpectedEof, "the answer is incomplete")
    } else if error.is_parse() {
        invalid("the answer is not HTTP")
    } else {
        io::Error::other(error)
    }
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use tollgate_client::connection::Credentials;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn target(listener: &TcpListener) -> Target {
        let address = listener.local_addr().unwrap().into();
        Target::new(address, Credentials::default()).unwrap()
    }

    async fn get(target: &Target, path: &'static str, limit: Duration) -> io::Result<HttpResponse> {
        send(target, Request::get(path).body(Bytes::new()).unwrap(), limit).await
    }

    /// The result of a GET against a server that sends `answer`, and the request it received.
    async fn answered(answer: &'static [u8]) -> (io::Result<HttpResponse>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = target(&listener);
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut received = Vec::new();
            while !received.ends_with(b"\r\n\r\n") {
                received.push(stream.read_u8().await.unwrap());
            }
            stream.write_all(answer).await.unwrap();
            String::from_utf8(received).unwrap()
        };
        tokio::join!(get(&target, "/a?b=%20", LIMIT), server)
    }

    #[tokio::test]
    async fn reads_the_whole_body() {
        let answer = b"HTTP/1.1 404 Not Found\r\ncontent-LENGTH: 6\r\nX: y\r\n\r\nno\r\n\r\n";
        let (response, received) = answered(answer).await;
        assert_eq!(
            response.unwrap(),
            HttpResponse { status: 404, etag: None, body: "no\r\n\r\n".to_owned() }
        );
        assert!(received.starts_with("GET /a?b=%20 HTTP/1.1\r\nhost: 127.0.0.1:"), "{received}");
        let (response, _) = answered(b"HTTP/1.0 200 OK\r\n\r\nwithout a length").await;
        assert_eq!(response.unwrap().body, "without a length");
    }

    #[tokio::test]
    async fn malformed_responses_and_timeouts() {
        for (answer, kind) in [
            (&b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nhalf"[..], ErrorKind::UnexpectedEof),
            (b"", ErrorKind::UnexpectedEof),
            (b"SSH-2.0-x\r\n\r\n", ErrorKind::InvalidData),
            (b"HTTP/1.1 many\r\n\r\n", ErrorKind::InvalidData),
            (b"HTTP/1.1 200 OK\r\n\r\n\xff", ErrorKind::InvalidData),
        ] {
            let error = answered(answer).await.0.unwrap_err();
            assert_eq!(error.kind(), kind, "{answer:?}: {error}");
        }
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let limit = Duration::from_millis(20);
        let error = get(&target(&silent), "/", limit).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }
}
