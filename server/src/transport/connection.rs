//! Serves one HTTP/2 connection with the `h2` crate. One task handles all requests of a connection,
//! so answers that are ready together are written together. A task per request, as hyper has it,
//! costs a tenth of a node's time, and makes each request wait twice in the runtime's queue behind
//! the requests of other connections.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes};
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use h2::server::{Builder, Connection, SendResponse};
use h2::{Ping, PingPong, Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body::Body;
use http_body_util::BodyExt as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::unconstrained;
use tokio::time::timeout;

use super::budget::Held;
use super::closing;
use super::inbound::{Inbound, ResetFlag};
use super::read_budget::{BudgetedStream, ReadBudget};
use super::resets::Allowance;

/// Timeouts of client connections.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For the handshake: the HTTP/2 preface and SETTINGS, or the first HTTP/1.1 header. Also for
    /// the body of an HTTP request.
    pub greeting: Duration,
    /// Interval between HTTP/2 keepalive PINGs.
    pub keepalive: Duration,
    /// For the answer to a keepalive PING. Over HTTP/1.1: for a client to take more of an answer.
    pub answer: Duration,
    /// Between two requests over HTTP/1.1, which has no PING.
    pub idle: Duration,
    /// For every gRPC call except `Allow`, to the end of its response.
    pub call: Duration,
    /// Maximum age of a connection, with the jitter of [`super::age::of_connection`]. `None`: no
    /// maximum.
    pub age: Option<Duration>,
    /// How long a connection at its maximum age may take to answer its open requests.
    pub grace: Duration,
}

/// The default timeouts.
pub const DEFAULT_TIMEOUTS: Timeouts = Timeouts {
    greeting: Duration::from_secs(10),
    keepalive: Duration::from_secs(30),
    answer: Duration::from_secs(10),
    idle: Duration::from_secs(75),
    call: Duration::from_secs(30),
    age: None,
    grace: Duration::from_secs(30),
};

/// Handshake timeout while the node is stopping.
pub(super) const STOPPING_HANDSHAKE: Duration = Duration::from_secs(1);

/// How long a client may take to read the last frames and close the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Concurrent streams per connection, as announced in SETTINGS. h2 refuses the streams that a
/// client opens above this before it has read the SETTINGS; client libraries retry them.
pub(super) const MAX_STREAMS: u32 = 200;

/// Streams that a client may reset before they are accepted: more than the reads of one turn can
/// contain. [`Allowance`] limits the rate of resets.
const MAX_PENDING_RESETS: usize = 1024;

/// Flow-control window in bytes, of each stream and of the connection. h2 buffers these bytes
/// outside of the node's budget. HTTP/2 allows no smaller window for a connection.
const FLOW_WINDOW: u32 = (64 << 10) - 1;

/// Bytes by which unread DATA frames may in total fall short of 256 bytes each: room for two small
/// frames per stream, because some clients end a request with a separate frame.
const DATA_FRAME_BUDGET: usize = 2 * 256 * MAX_STREAMS as usize;

/// Streams reset by the node that h2 remembers, and for how long. h2 ignores DATA for a remembered
/// stream. It counts DATA for a forgotten one as a client error, and closes the connection after
/// 1,024 of these.
const MAX_RESET_STREAMS: usize = MAX_STREAMS as usize;
const RESET_STREAM_DURATION: Duration = Duration::from_secs(5);

/// Maximum size of a request's headers, in bytes.
pub(super) const MAX_HEADER_BYTES: u32 = 16 << 10;

/// Bytes that a header takes beside its name and value (RFC 9113, 6.5.2).
const HEADER_OVERHEAD: usize = 32;

/// The size of `headers` in bytes, as HTTP/2 counts it.
pub(super) fn header_bytes(headers: &HeaderMap) -> usize {
    let bytes = |(name, value): (&HeaderName, &HeaderValue)| {
        name.as_str().len() + value.len() + HEADER_OVERHEAD
    };
    headers.iter().map(bytes).sum()
}

/// Maximum size of headers that h2 accepts, in bytes. h2 answers longer ones with a bare 431, which
/// gRPC libraries can't explain. Headers between the two limits are refused with a status text.
const MAX_H2_HEADER_BYTES: u32 = 64 << 10;

/// Maximum bytes of a response that are queued for sending.
const MAX_SEND_BUFFER: usize = 400 << 10;

/// An event of a connection that is not a request.
enum Event {
    /// The node is stopping: accept no more requests.
    Stop,
    /// The connection has reached its maximum age.
    MaxAge,
    /// The client is unresponsive, or its time to finish is over.
    CutOff,
    /// Time to check whether the client reads its answers.
    StallCheck,
}

/// How a connection ended.
enum End {
    /// h2 has ended it and sent its last frames.
    Closed,
    /// The server gives up on the client and closes the socket at once.
    CutOff,
}

/// Serves a connection until the client closes it, or until `stop` completes and all open requests
/// are answered. `answer` handles one request, or returns `None` if it has already sent the
/// response. The future that it returns is dropped when the connection ends. A reset of the
/// request's own stream does not drop it: see [`Answering::unless_given_up`].
pub async fn serve<F>(
    mut io: impl AsyncRead + AsyncWrite + Unpin,
    timeouts: Timeouts,
    stop: impl Future<Output = ()> + Send + 'static,
    mut answer: impl FnMut(Request<RecvStream>, Answering) -> Option<F>,
) where
    F: Future<Output = ()>,
{
    let mut stop = Box::pin(stop.fuse());
    let (read_budget, resets) = (ReadBudget::default(), ResetFlag::default());
    let stream = Inbound::new(&mut io, read_budget.clone(), resets.clone());
    let handshake = read_budget.refill_each_poll(handshake(stream, timeouts, &mut stop));
    let Some(mut connection) = handshake.await else { return };

    // `FuturesUnordered` polls only the futures that were woken.
    let mut open_requests = FuturesUnordered::new();
    let mut events: FuturesUnordered<BoxFuture<'static, Event>> = FuturesUnordered::new();
    if let Some(pings) = connection.ping_pong() {
        events.push(Box::pin(keep_alive(pings, timeouts)));
    }
    events.push(Box::pin(async {
        stop.await;
        Event::Stop
    }));
    if let Some(age) = timeouts.age {
        events.push(Box::pin(after(age, Event::MaxAge)));
    }
    let stall_check = || after(timeouts.keepalive, Event::StallCheck);
    events.push(Box::pin(stall_check()));
    // Requests accepted so far, and their number at the last check that found unsent answers.
    let (mut accepted, mut stalled_at) = (0_u64, None);
    // One clone per open request and per response that is not sent yet.
    let unsent = Arc::new(());
    let mut allowance = Allowance::new(Instant::now());
    let ended = poll_fn(|context| {
        read_budget.refill(context);
        resets.clear();
        loop {
            // Accepts every request that has arrived before it answers any: `poll_accept` also
            // writes, so the answers are written together.
            let mut reset_count = 0;
            loop {
                match connection.poll_accept(context) {
                    Poll::Ready(Some(Ok((request, mut respond)))) => {
                        if resets.is_set() && respond.poll_reset(context).is_ready() {
                            reset_count += 1;
                            continue;
                        }
                        accepted += 1;
                        let answering = Answering { respond, unsent: Arc::clone(&unsent) };
                        if let Some(answering) = answer(request, answering) {
                            open_requests.push(answering);
                        }
                    }
                    // A connection error is the client's, and is not reported.
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(End::Closed),
                    Poll::Pending => break,
                }
            }
            let mut written = false;
            if reset_count > 0 && !allowance.pay(reset_count, accepted, Instant::now()) {
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                events.push(Box::pin(after(CLOSE_TIMEOUT, Event::CutOff)));
                written = true;
            }
            // tokio's cooperative budget is meant for a task with one request. There are at most
            // MAX_STREAMS here.
            let answer_all = poll_fn(|context| {
                while let Poll::Ready(Some(())) = open_requests.poll_next_unpin(context) {
                    written = true;
                }
                Poll::<()>::Pending
            });
            let _ = pin!(unconstrained(answer_all)).poll(context);
            while let Poll::Ready(Some(event)) = events.poll_next_unpin(context) {
                written = true;
                match event {
                    Event::Stop => connection.graceful_shutdown(),
                    Event::MaxAge => {
                        connection.graceful_shutdown();
                        events.push(Box::pin(after(timeouts.grace, Event::CutOff)));
                    }
                    Event::CutOff => return Poll::Ready(End::CutOff),
                    Event::StallCheck => {
                        // Unsent answers count even beside a request that stays open, such as a
                        // health watch.
                        let has_unsent = Arc::strong_count(&unsent) - 1 > open_requests.len()
                            || open_requests.is_empty() && connection.has_streams();
                        // A client that only answers PINGs, but reads no answers and sends no
                        // requests, is cut off.
                        if has_unsent && stalled_at == Some(accepted) {
                            return Poll::Ready(End::CutOff);
                        }
                        stalled_at = has_unsent.then_some(accepted);
                        events.push(Box::pin(stall_check()));
                    }
                }
            }
            if !written {
                return Poll::Pending;
            }
        }
    });
    let ended = ended.await;
    drop(connection);
    // A leftover request may be first in this thread's queue, so drop it before the next wait.
    drop((open_requests, events));
    if let End::Closed = ended {
        let stream = BudgetedStream::new(io, read_budget.clone());
        read_budget
            .refill_each_poll(closing::read_to_end(stream, CLOSE_TIMEOUT, CLOSE_TIMEOUT))
            .await;
    }
}

/// Performs the HTTP/2 handshake; `None` if it fails or times out. A client that connects while the
/// node is stopping gets a GOAWAY.
async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    timeouts: Timeouts,
    mut stop: impl Future<Output = ()> + Unpin,
) -> Option<Connection<S, Bytes>> {
    let mut builder = Builder::new();
    builder
        .initial_window_size(FLOW_WINDOW)
        .initial_connection_window_size(FLOW_WINDOW)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_H2_HEADER_BYTES)
        .max_send_buffer_size(MAX_SEND_BUFFER)
        .data_frame_budget(DATA_FRAME_BUDGET)
        .max_concurrent_reset_streams(MAX_RESET_STREAMS)
        .reset_stream_duration(RESET_STREAM_DURATION)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS);
    let mut handshake = pin!(timeout(timeouts.greeting, builder.handshake(stream)));
    tokio::select! {
        done = &mut handshake => done.ok()?.ok(),
        () = &mut stop => {
            let mut connection = timeout(STOPPING_HANDSHAKE, handshake).await.ok()?.ok()?.ok()?;
            connection.graceful_shutdown();
            Some(connection)
        }
    }
}

async fn after(time: Duration, event: Event) -> Event {
    tokio::time::sleep(time).await;
    event
}

/// Sends keepalive PINGs. Completes when one fails or is not answered in time.
async fn keep_alive(mut pings: PingPong, timeouts: Timeouts) -> Event {
    loop {
        tokio::time::sleep(timeouts.keepalive).await;
        let answer = timeout(timeouts.answer, pings.ping(Ping::opaque())).await;
        if !matches!(answer, Ok(Ok(_))) {
            return Event::CutOff;
        }
    }
}

/// Sends the response of one request.
pub struct Answering {
    respond: SendResponse<Bytes>,
    unsent: Arc<()>,
}

/// The bytes of a message. Counts as unsent until h2 drops it.
struct TrackedMessage {
    message: Bytes,
    _counted: Arc<()>,
}

impl AsRef<[u8]> for TrackedMessage {
    fn as_ref(&self) -> &[u8] {
        &self.message
    }
}

impl Answering {
    /// Waits for `future`; `None` if the client resets the stream first.
    pub async fn unless_given_up<T>(
        &mut self,
        mut future: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        poll_fn(|context| match future.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => self.respond.poll_reset(context).map(|_| None),
        })
        .await
    }

    /// Sends a response without a body. This and the methods below do nothing if the client has
    /// reset the stream.
    pub fn headers(mut self, response: Response<()>) {
        let _ = self.respond.send_response(response, true);
    }

    /// Sends headers, one message, and trailers.
    pub fn message(mut self, response: Response<()>, message: Bytes, trailers: http::HeaderMap) {
        let message = Bytes::from_owner(TrackedMessage { message, _counted: self.unsent });
        if let Ok(mut stream) = self.respond.send_response(response, false)
            && stream.send_data(message, false).is_ok()
        {
            let _ = stream.send_trailers(trailers);
        }
    }

    /// Sends the headers of a response of many messages; `None` if the client has reset the stream.
    pub fn begin(mut self, response: Response<()>) -> Option<ResponseStream> {
        let stream = self.respond.send_response(response, false).ok()?;
        Some(ResponseStream { stream, _counted: self.unsent })
    }

    /// Sends headers and a body, as fast as flow control allows. `held` counts the bytes of the
    /// frame that is being sent. After `limit`, `late_trailers` end the response, or the stream is
    /// reset.
    pub async fn body<B>(
        mut self,
        response: Response<B>,
        mut held: Held,
        limit: Duration,
        late_trailers: Option<http::HeaderMap>,
    ) where
        B: Body<Data = Bytes> + Unpin,
    {
        let (parts, mut body) = response.into_parts();
        let ended = body.is_end_stream();
        let Ok(mut stream) = self.respond.send_response(Response::from_parts(parts, ()), ended)
        else {
            return;
        };
        if ended {
            return;
        }
        match timeout(limit, send_body(&mut body, &mut stream, &mut held)).await {
            Ok(Ok(())) => {}
            Ok(Err(BodyError)) => stream.send_reset(Reason::INTERNAL_ERROR),
            // Without trailers the drop of an unfinished stream resets it.
            Err(_) => drop(late_trailers.map(|trailers| stream.send_trailers(trailers))),
        }
    }
}

/// A response of many messages.
pub struct ResponseStream {
    stream: SendStream<Bytes>,
    _counted: Arc<()>,
}

impl ResponseStream {
    /// Sends a message as fast as flow control allows; `None` if the client has closed the stream.
    pub async fn message(&mut self, message: Bytes) -> Option<()> {
        send_data(message, &mut self.stream).await
    }

    /// Sends the trailers, which end the response.
    pub fn end(mut self, trailers: http::HeaderMap) {
        let _ = self.stream.send_trailers(trailers);
    }
}

/// The body of a response failed. A response that the client cancels counts as sent.
struct BodyError;

async fn send_body<B>(
    body: &mut B,
    stream: &mut SendStream<Bytes>,
    held: &mut Held,
) -> Result<(), BodyError>
where
    B: Body<Data = Bytes> + Unpin,
{
    loop {
        let mut next = body.frame();
        let frame = poll_fn(|context| match Pin::new(&mut next).poll(context) {
            Poll::Ready(frame) => Poll::Ready(Some(frame)),
            Poll::Pending => stream.poll_reset(context).map(|_| None),
        });
        let Some(frame) = frame.await else { return Ok(()) };
        let Some(frame) = frame else {
            let _ = stream.send_data(Bytes::new(), true);
            return Ok(());
        };
        match frame.map_err(|_| BodyError)?.into_data() {
            Ok(data) => {
                held.set(data.len());
                if send_data(data, stream).await.is_none() {
                    return Ok(());
                }
            }
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    let _ = stream.send_trailers(trailers);
                    return Ok(());
                }
            }
        }
    }
}

/// Sends `data` as fast as flow control allows; `None` if the client has closed the stream.
async fn send_data(mut data: Bytes, stream: &mut SendStream<Bytes>) -> Option<()> {
    while data.has_remaining() {
        stream.reserve_capacity(data.len());
        let room = loop {
            match poll_fn(|context| stream.poll_capacity(context)).await? {
                Ok(0) => {}
                Ok(room) => break room,
                Err(_) => return None,
            }
        };
        let chunk = data.split_to(room.min(data.len()));
        stream.send_data(chunk, false).ok()?;
    }
    Some(())
}

/// The body of a request.
pub struct RequestBody {
    stream: RecvStream,
    /// Bytes that were read and put back.
    put_back: Option<Bytes>,
    /// How many bytes were read, but not released.
    unreleased: usize,
}

impl RequestBody {
    /// The body of the request on `stream`.
    pub fn new(stream: RecvStream) -> Self {
        Self { stream, put_back: None, unreleased: 0 }
    }

    /// Makes `data` the next bytes to be read.
    pub fn put_back(&mut self, data: Bytes) {
        self.put_back = Some(data);
    }

    /// The next bytes; `None` at the end of the body. They take up the client's flow-control window
    /// until they are [released](Self::release).
    pub async fn data(&mut self) -> Option<Result<Bytes, h2::Error>> {
        if let Some(data) = self.put_back.take() {
            return Some(Ok(data));
        }
        let data = poll_fn(|context| self.stream.poll_data(context)).await;
        if let Some(Ok(data)) = &data {
            self.unreleased += data.len();
        }
        data
    }

    /// Returns all bytes that were read to the client's flow-control window.
    pub fn release(&mut self) {
        // Fails only for more bytes than were received.
        let _ = self.stream.flow_control().release_capacity(mem::take(&mut self.unreleased));
    }

    /// Whether there are no more bytes.
    pub fn is_over(&self) -> bool {
        self.put_back.is_none() && self.stream.is_end_stream()
    }
}

#[cfg(test)]
mod tests;
