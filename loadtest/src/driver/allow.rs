//! Allow over h2 itself: a caller reuses its buffers and its timer, so that a request costs this
//! side little of the CPU time that it shares with those who are measured.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use h2::client::{self, SendRequest};
use h2::{Reason, RecvStream};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, TE};
use http::{Method, Request, StatusCode, Uri, Version};
use prost::Message as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::Sleep;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tollgate_server::tls::Dialer;
use tonic::Code;

use super::{CONNECT_TIMEOUT, Failure, Target};
use crate::allow::LONGEST_RUN;

/// Bytes on their way to this side before the other must wait: more than fit at once.
const WINDOW: u32 = 16 << 20;

/// A message on the wire comes after this: one byte says whether it is compressed, four how long
/// it is.
const PREFIX: usize = 5;

/// Where an answer says what came of it.
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// Bytes that a caller asks for at once, for some of its requests to come.
const BUFFER: usize = 4096;

/// One of those who ask over an HTTP/2 connection, with one request at a time.
#[derive(Debug)]
pub struct Caller {
    link: Arc<Link>,
    line: Option<Line>,
    timeout: Duration,
    /// Rings at the earliest when the request under way has taken too long.
    alarm: Option<Pin<Box<Sleep>>>,
    frames: BytesMut,
    answer: AllowResponse,
}

impl Caller {
    /// Dials `target`. Where nobody answers yet, the requests dial again and fail one by one: an
    /// outage at the start is counted like one in the middle.
    pub async fn dial(target: &Target, timeout: Duration) -> Self {
        let caller = Self::new(Arc::new(Link::new(target)), timeout);
        let _ = caller.link.line(0).await;
        caller
    }

    /// Another one on the same connection.
    pub fn another(&self) -> Self {
        Self::new(Arc::clone(&self.link), self.timeout)
    }

    fn new(link: Arc<Link>, timeout: Duration) -> Self {
        let (frames, answer) = (BytesMut::new(), AllowResponse::default());
        Self { link, line: None, timeout, alarm: None, frames, answer }
    }

    /// Asks for tokens once. `sent` is now.
    pub async fn allow(
        &mut self,
        request: &AllowRequest,
        sent: Instant,
    ) -> Result<&AllowResponse, Failure> {
        // No clock reaches the end of a timeout that is longer.
        let deadline = sent + self.timeout.min(LONGEST_RUN);
        self.ask(request, deadline).await.map_err(Failure)?;
        Ok(&self.answer)
    }

    /// Leaves the answer in its place.
    async fn ask(&mut self, request: &AllowRequest, deadline: Instant) -> Result<(), Code> {
        let message = frame(&mut self.frames, request);
        let Self { link, line, alarm, answer, .. } = self;
        let mut asked = pin!(ask(link, line, message, answer));
        let alarm =
            alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline.into())));
        poll_fn(|context| {
            if let Poll::Ready(result) = asked.as_mut().poll(context) {
                return Poll::Ready(result);
            }
            // Set once in a while, not for each request: it costs less to let it ring early.
            while alarm.as_mut().poll(context).is_ready() {
                if Instant::now() >= deadline {
                    return Poll::Ready(Err(Code::DeadlineExceeded));
                }
                alarm.as_mut().reset(deadline.into());
            }
            Poll::Pending
        })
        .await
    }
}

/// One message with its prefix.
fn frame(frames: &mut BytesMut, request: &AllowRequest) -> Bytes {
    let length = request.encoded_len();
    if frames.capacity() < PREFIX + length {
        frames.reserve(BUFFER.max(PREFIX + length));
    }
    frames.put_u8(0);
    frames.put_u32(length as u32);
    request.encode_raw(frames);
    frames.split().freeze()
}

/// Asks once, over `line` or, where that has been lost, over a new one.
async fn ask(
    link: &Link,
    line: &mut Option<Line>,
    message: Bytes,
    answer: &mut AllowResponse,
) -> Result<(), Code> {
    let mut lost = 0;
    let (response, mut body) = loop {
        let Line { number, sender } = match line {
            Some(line) => line,
            None => line.insert(link.line(lost).await?),
        };
        let ready = poll_fn(|context| sender.poll_ready(context)).await;
        let begun = ready.and_then(|()| sender.send_request(link.head.clone(), false));
        match begun {
            Ok(begun) => break begun,
            // This request was never sent, so it is not the one to fail.
            Err(_) if lost == 0 => {
                lost = *number;
                *line = None;
            }
            Err(error) => return Err(failed(line, &error)),
        }
    };
    let sent = body.send_data(message, true);
    let answered = match sent {
        Ok(()) => response.await,
        Err(error) => Err(error),
    };
    match answered {
        Ok(response) => {
            let (head, body) = response.into_parts();
            read(head.status, &head.headers, body, answer).await
        }
        Err(error) => Err(failed(line, &error)),
    }
}

/// Forgets a line that is no more, and tells the code.
fn failed(line: &mut Option<Line>, error: &h2::Error) -> Code {
    if error.is_io() || error.is_go_away() {
        *line = None;
    }
    code(error)
}

/// Reads an answer to its end.
async fn read(
    status: StatusCode,
    head: &HeaderMap,
    mut body: RecvStream,
    answer: &mut AllowResponse,
) -> Result<(), Code> {
    if let Some(code) = grpc_status(head) {
        // There is no message when the status comes first.
        return Err(if code == Code::Ok { Code::Internal } else { code });
    }
    let mut message = Bytes::new();
    while let Some(data) = body.data().await {
        let data = data.map_err(|error| code(&error))?;
        // The connection is as good as the window that is given back.
        let _ = body.flow_control().release_capacity(data.len());
        message = match message.is_empty() {
            true => data,
            false => [message, data].concat().into(),
        };
    }
    let trailers = body.trailers().await.map_err(|error| code(&error))?;
    match trailers.as_ref().and_then(grpc_status) {
        Some(Code::Ok) => decode(message, answer).ok_or(Code::Internal),
        Some(code) => Err(code),
        None => Err(of_http(status)),
    }
}

/// Reads the one message that an answer has.
fn decode(mut message: Bytes, answer: &mut AllowResponse) -> Option<()> {
    let compressed = message.try_get_u8().ok()?;
    let length = message.try_get_u32().ok()?;
    if compressed != 0 || length as usize != message.len() {
        return None;
    }
    // Keeps the memory of its text.
    answer.clear();
    answer.merge(message).ok()
}

fn grpc_status(headers: &HeaderMap) -> Option<Code> {
    Some(Code::from_bytes(headers.get(&GRPC_STATUS)?.as_bytes()))
}

/// What the gRPC documents say of an answer without a gRPC status.
fn of_http(status: StatusCode) -> Code {
    match status.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502 | 503 | 504 => Code::Unavailable,
        _ => Code::Unknown,
    }
}

/// What the gRPC documents say of the errors of HTTP/2; a connection that broke is a node that
/// can't be reached.
fn code(error: &h2::Error) -> Code {
    match error.reason() {
        _ if error.is_io() || error.is_go_away() => Code::Unavailable,
        Some(Reason::REFUSED_STREAM) => Code::Unavailable,
        Some(Reason::CANCEL) => Code::Cancelled,
        Some(Reason::ENHANCE_YOUR_CALM) => Code::ResourceExhausted,
        Some(Reason::INADEQUATE_SECURITY) => Code::PermissionDenied,
        Some(_) => Code::Internal,
        None => Code::Unknown,
    }
}

/// A connection, which is dialled again when it breaks.
struct Link {
    /// What every request begins with.
    head: Request<()>,
    /// Over TLS.
    dialer: Option<Dialer>,
    line: Mutex<Option<Line>>,
}

/// A connection while it lasts.
#[derive(Clone, Debug)]
struct Line {
    /// Which of the link's, from 1.
    number: u64,
    sender: SendRequest<Bytes>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("line", &self.line).finish_non_exhaustive()
    }
}

impl Link {
    fn new(Target { uri, secure }: &Target) -> Self {
        let mut head = Request::new(());
        let mut parts = uri.clone().into_parts();
        parts.path_and_query =
            Some(http::uri::PathAndQuery::from_static("/quotaservice.QuotaService/Allow"));
        *head.method_mut() = Method::POST;
        *head.version_mut() = Version::HTTP_2;
        // A target has a scheme and a host.
        *head.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
        head.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        head.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
        if let Some(value) = &secure.authorization {
            head.headers_mut().insert(AUTHORIZATION, value.clone());
        }
        Self { head, dialer: secure.dialer.clone(), line: Mutex::new(None) }
    }

    /// A line that came after number `lost`. One dials for all who wait.
    async fn line(&self, lost: u64) -> Result<Line, Code> {
        let mut line = self.line.lock().await;
        if let Some(line) = line.as_ref().filter(|line| line.number > lost) {
            return Ok(line.clone());
        }
        let number = line.as_ref().map_or(0, |line| line.number).max(lost) + 1;
        let dialled = tokio::time::timeout(CONNECT_TIMEOUT, self.dial()).await;
        match dialled {
            Ok(Ok(sender)) => Ok(line.insert(Line { number, sender }).clone()),
            _ => Err(Code::Unavailable),
        }
    }

    async fn dial(&self) -> io::Result<SendRequest<Bytes>> {
        let uri = self.head.uri();
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        let port = uri.port_u16();
        if let Some(dialer) = &self.dialer {
            return talk(dialer.dial(host, port.unwrap_or(443)).await?).await;
        }
        let stream = TcpStream::connect((host, port.unwrap_or(80))).await?;
        stream.set_nodelay(true)?;
        talk(stream).await
    }
}

/// Begins to speak HTTP/2.
async fn talk(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> io::Result<SendRequest<Bytes>> {
    let (sender, connection) = client::Builder::new()
        .enable_push(false)
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .handshake(stream)
        .await
        .map_err(io::Error::other)?;
    // Whoever waits for an answer hears of its errors.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}

#[cfg(test)]
#[path = "allow_tests.rs"]
mod tests;
