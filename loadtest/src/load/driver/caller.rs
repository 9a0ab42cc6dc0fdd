//! Client for one gRPC method directly on h2. A caller reuses its buffers and its timer, which keeps
//! the client's CPU use low: it shares the CPUs with the measured servers.

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
use http::uri::{PathAndQuery, Scheme};
use http::{Method, Request, StatusCode, Version};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;
use tokio::time::Sleep;
use tollgate_client::connection::Target;
use tonic::Code;

use super::{CONNECT_TIMEOUT, Failure};
use crate::args::MAX_RUN;
use crate::load::protocol::Protocol;

/// Flow-control window of streams and connections, in bytes; larger than all answers in flight.
const WINDOW_BYTES: u32 = 16 << 20;

/// Length of the gRPC message prefix: a compression flag (1 byte) and the message length (4 bytes).
const PREFIX_BYTES: usize = 5;

/// The trailer with the gRPC status code.
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// Allocation size for request frames, in bytes; serves several requests.
const BUFFER_BYTES: usize = 4096;

/// A caller on a shared HTTP/2 connection, with one request at a time.
#[derive(Debug)]
pub struct Caller<P: Protocol> {
    reconnector: Arc<Reconnector>,
    connection: Option<H2Connection>,
    timeout: Duration,
    /// Timer for the request deadline; may fire early.
    timer: Option<Pin<Box<Sleep>>>,
    frames: BytesMut,
    answer: P::Answer,
}

impl<P: Protocol> Caller<P> {
    /// Connects to `target`. If that fails, each request reconnects and fails by itself, so an
    /// outage at the start is measured like a later one.
    pub async fn dial(target: &Target, timeout: Duration) -> Self {
        let authorization = target.credentials().authorization().await;
        let reconnector = Reconnector::new(target.clone(), P::PATH, authorization);
        let caller = Self::new(Arc::new(reconnector), timeout);
        let _ = caller.reconnector.connection(0).await;
        caller
    }

    /// A new caller on the same connection.
    pub fn sibling(&self) -> Self {
        Self::new(Arc::clone(&self.reconnector), self.timeout)
    }

    fn new(reconnector: Arc<Reconnector>, timeout: Duration) -> Self {
        let (frames, answer) = (BytesMut::new(), P::Answer::default());
        Self { reconnector, connection: None, timeout, timer: None, frames, answer }
    }

    /// Sends one request. `sent` is the current time.
    pub async fn ask(
        &mut self,
        request: &P::Request,
        sent: Instant,
    ) -> Result<&P::Answer, Failure> {
        // Capped so that adding it to a clock reading cannot overflow.
        let deadline = sent + self.timeout.min(MAX_RUN);
        self.exchange(request, deadline).await.map_err(Failure)?;
        Ok(&self.answer)
    }

    /// Sends the request and stores the answer in `self.answer`.
    async fn exchange(&mut self, request: &P::Request, deadline: Instant) -> Result<(), Code> {
        let message = frame(&mut self.frames, request);
        let Self { reconnector, connection, timer, answer, .. } = self;
        let mut pending = pin!(exchange(reconnector, connection, message, answer));
        let timer =
            timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline.into())));
        poll_fn(|context| {
            if let Poll::Ready(result) = pending.as_mut().poll(context) {
                return Poll::Ready(result);
            }
            // Resetting the timer for every request would cost more than letting it fire early.
            while timer.as_mut().poll(context).is_ready() {
                if Instant::now() >= deadline {
                    return Poll::Ready(Err(Code::DeadlineExceeded));
                }
                timer.as_mut().reset(deadline.into());
            }
            Poll::Pending
        })
        .await
    }
}

/// Encodes a message with its prefix.
fn frame(frames: &mut BytesMut, request: &impl Message) -> Bytes {
    let length = request.encoded_len();
    if frames.capacity() < PREFIX_BYTES + length {
        frames.reserve(BUFFER_BYTES.max(PREFIX_BYTES + length));
    }
    frames.put_u8(0);
    frames.put_u32(length as u32);
    request.encode_raw(frames);
    frames.split().freeze()
}

/// Sends one request over `connection`; reconnects first if that connection is gone.
async fn exchange(
    reconnector: &Reconnector,
    connection: &mut Option<H2Connection>,
    message: Bytes,
    answer: &mut impl Message,
) -> Result<(), Code> {
    let mut lost = 0;
    let (response, mut body) = loop {
        let H2Connection { number, sender } = match connection {
            Some(connection) => connection,
            None => connection.insert(reconnector.connection(lost).await?),
        };
        let ready = poll_fn(|context| sender.poll_ready(context)).await;
        let begun = ready.and_then(|()| sender.send_request(reconnector.head.clone(), false));
        match begun {
            Ok(begun) => break begun,
            // The request was never sent, so it is retried on a new connection.
            Err(_) if lost == 0 => {
                lost = *number;
                *connection = None;
            }
            Err(error) => return Err(drop_if_closed(connection, &error)),
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
        Err(error) => Err(drop_if_closed(connection, &error)),
    }
}

/// Drops a closed connection and returns the status code of `error`.
fn drop_if_closed(connection: &mut Option<H2Connection>, error: &h2::Error) -> Code {
    if error.is_io() || error.is_go_away() {
        *connection = None;
    }
    code(error)
}

/// Reads a response with its trailers.
async fn read(
    status: StatusCode,
    head: &HeaderMap,
    mut body: RecvStream,
    answer: &mut impl Message,
) -> Result<(), Code> {
    if let Some(code) = grpc_status(head) {
        // Trailers-only response: it has no message.
        return Err(if code == Code::Ok { Code::Internal } else { code });
    }
    let mut message = Bytes::new();
    while let Some(data) = body.data().await {
        let data = data.map_err(|error| code(&error))?;
        // Cannot fail: exactly the received bytes are released.
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
        None => Err(code_of_http_status(status)),
    }
}

/// Decodes the single message of a response.
fn decode(mut message: Bytes, answer: &mut impl Message) -> Option<()> {
    let compressed = message.try_get_u8().ok()?;
    let length = message.try_get_u32().ok()?;
    if compressed != 0 || length as usize != message.len() {
        return None;
    }
    // `clear` keeps the allocations of the previous answer.
    answer.clear();
    answer.merge(message).ok()
}

fn grpc_status(headers: &HeaderMap) -> Option<Code> {
    Some(Code::from_bytes(headers.get(&GRPC_STATUS)?.as_bytes()))
}

/// Status code for an HTTP status without a gRPC status, as specified by gRPC.
fn code_of_http_status(status: StatusCode) -> Code {
    match status.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502 | 503 | 504 => Code::Unavailable,
        _ => Code::Unknown,
    }
}

/// Status code for an HTTP/2 error, as specified by gRPC. A broken connection is `Unavailable`.
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

/// A shared connection that reconnects when it breaks.
struct Reconnector {
    /// Head of every request.
    head: Request<()>,
    target: Target,
    connection: Mutex<Option<H2Connection>>,
}

/// One established connection.
#[derive(Clone, Debug)]
struct H2Connection {
    /// Sequence number within its [`Reconnector`], from 1.
    number: u64,
    sender: SendRequest<Bytes>,
}

impl fmt::Debug for Reconnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reconnector").field("connection", &self.connection).finish_non_exhaustive()
    }
}

impl Reconnector {
    fn new(target: Target, path: &'static str, authorization: Option<HeaderValue>) -> Self {
        let scheme = match target.credentials().dialer() {
            None => Scheme::HTTP,
            Some(_) => Scheme::HTTPS,
        };
        let path = PathAndQuery::from_static(path);
        let mut head = Request::new(());
        *head.method_mut() = Method::POST;
        *head.version_mut() = Version::HTTP_2;
        *head.uri_mut() = target.address().uri(scheme, path);
        head.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        head.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
        head.headers_mut().extend(authorization.map(|value| (AUTHORIZATION, value)));
        Self { head, target, connection: Mutex::new(None) }
    }

    /// A connection newer than number `lost`. One caller connects on behalf of all that wait.
    async fn connection(&self, lost: u64) -> Result<H2Connection, Code> {
        let mut connection = self.connection.lock().await;
        if let Some(connection) = connection.as_ref().filter(|connection| connection.number > lost)
        {
            return Ok(connection.clone());
        }
        let number = connection.as_ref().map_or(0, |connection| connection.number).max(lost) + 1;
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, self.dial()).await;
        match connected {
            Ok(Ok(sender)) => Ok(connection.insert(H2Connection { number, sender }).clone()),
            _ => Err(Code::Unavailable),
        }
    }

    async fn dial(&self) -> io::Result<SendRequest<Bytes>> {
        let address = self.target.address();
        if let Some(dialer) = self.target.credentials().dialer() {
            return handshake(dialer.dial(address.host(), (address.host(), address.port())).await?)
                .await;
        }
        let stream = address.connect(CONNECT_TIMEOUT).await?;
        stream.set_nodelay(true)?;
        handshake(stream).await
    }
}

/// Performs the HTTP/2 handshake.
async fn handshake(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> io::Result<SendRequest<Bytes>> {
    let (sender, connection) = client::Builder::new()
        .enable_push(false)
        .initial_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .handshake(stream)
        .await
        .map_err(io::Error::other)?;
    // Connection errors surface in the pending requests.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}

#[cfg(test)]
#[path = "caller_tests.rs"]
mod tests;
