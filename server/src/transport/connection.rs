//! One HTTP/2 connection, on h2 itself: all its requests are worked on in its one task, so that
//! whatever is answered together is also written together. A task for each request, as hyper has
//! it, costs a tenth of a node's time, and makes each one wait in the runtime's queue behind
//! those of others, twice.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes};
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use h2::server::{Builder, Connection, SendResponse};
use h2::{Ping, PingPong, Reason, RecvStream, SendStream};
use http::{Request, Response};
use http_body::Body;
use http_body_util::BodyExt as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::unconstrained;
use tokio::time::timeout;

use super::budget::Held;
use super::closing;
use super::inbound::{Inbound, Resets};
use super::resets::Allowance;
use super::turns::{Turn, Turns};

/// How long a client is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// To the end of its first words, and of a request's body over HTTP.
    pub greeting: Duration,
    /// How often it is asked whether it is still there, …
    pub keepalive: Duration,
    /// … and how long it may take to answer.
    pub answer: Duration,
    /// From one request to the next over HTTP/1.1, where nobody can be asked.
    pub idle: Duration,
    /// All calls but `Allow`, to the end of their answers.
    pub call: Duration,
    /// The age at which a connection ends; `None`: it ends with its client. Spread by
    /// [`super::age::of_connection`].
    pub age: Option<Duration>,
    /// How long one that ends for its age may take to answer what is under way.
    pub grace: Duration,
}

/// What clients are used to.
pub const PATIENCE: Patience = Patience {
    greeting: Duration::from_secs(10),
    keepalive: Duration::from_secs(30),
    answer: Duration::from_secs(10),
    idle: Duration::from_secs(75),
    call: Duration::from_secs(30),
    age: None,
    grace: Duration::from_secs(30),
};

/// How long a client may take to the end of its first words once the node is stopping.
pub(super) const LAST_GREETING: Duration = Duration::from_secs(1);

/// How long a client may take to read what it was told last, and to close the connection.
const LAST_WORD: Duration = Duration::from_secs(1);

/// How many requests of a connection are worked on at once; its client holds back the others. What
/// it sends beyond that before it knows is refused, which libraries send again.
pub(super) const STREAMS: u32 = 200;

/// How many requests may have been reset before they are looked at, at one time: more than fit into
/// what is read in one turn. How many a client may reset in the long run is for [`Allowance`] to say.
const GIVEN_UP: usize = 1024;

/// Bytes that a client may send ahead, on one stream and in all. These are buffered outside of the
/// node's budget. HTTP/2 allows no smaller window for a connection.
const WINDOW: u32 = (64 << 10) - 1;

/// Bytes by which h2 lets unread DATA frames fall short of 256 bytes each: room for two small
/// ones on every stream, because some clients end a request with a frame of its own.
const SMALL_FRAMES: usize = 2 * 256 * STREAMS as usize;

/// Streams that may be reset early and still be remembered, and for how long. DATA that was on its
/// way is ignored for as long. For a forgotten stream h2 counts it as an error of the client, of
/// which 1,024 end the connection.
const RESETS: usize = STREAMS as usize;
const REMEMBERED: Duration = Duration::from_secs(5);

/// The most bytes of the headers of a request.
pub(super) const HEADERS: u32 = 16 << 10;

/// The most bytes of headers that h2 reads. What is longer gets a bare 431, which gRPC libraries
/// can't explain, so requests of up to this many bytes are refused with a text.
const METADATA: u32 = 64 << 10;

/// The most bytes of an answer that wait to be sent.
const UNSENT: usize = 400 << 10;

/// What may happen to a connection beside its requests.
enum Event {
    /// No more requests should come.
    Stop,
    /// The connection has lasted for long enough.
    Old,
    /// The client is gone, or had time enough to go.
    Gone,
    /// It is time to look whether the client takes its answers.
    Look,
}

/// How a connection has ended.
enum End {
    /// All was sent, also that nothing more will come.
    Closed,
    /// Its client takes nothing.
    GivenUp,
}

/// Serves a connection until its client closes it, or until `stop` completes and every request
/// under way is answered. `answer` answers one request, and is dropped if its caller gives up;
/// `None`: it has answered it already.
pub async fn serve<F>(
    mut io: impl AsyncRead + AsyncWrite + Unpin,
    patience: Patience,
    stop: impl Future<Output = ()> + Send + 'static,
    mut answer: impl FnMut(Request<RecvStream>, Answering) -> Option<F>,
) where
    F: Future<Output = ()>,
{
    let mut stop = Box::pin(stop.fuse());
    let (turn, resets) = (Turn::default(), Resets::default());
    let stream = Inbound::new(&mut io, turn.clone(), resets.clone());
    let greeting = turn.each_poll(greet(stream, patience, &mut stop));
    let Some(mut connection) = greeting.await else { return };

    // Each polls only what has something to do.
    let mut under_way = FuturesUnordered::new();
    let mut events: FuturesUnordered<BoxFuture<'static, Event>> = FuturesUnordered::new();
    if let Some(pings) = connection.ping_pong() {
        events.push(Box::pin(keep_alive(pings, patience)));
    }
    events.push(Box::pin(async {
        stop.await;
        Event::Stop
    }));
    if let Some(age) = patience.age {
        events.push(Box::pin(after(age, Event::Old)));
    }
    let look = || after(patience.keepalive, Event::Look);
    events.push(Box::pin(look()));
    // How many requests have come, and how many had when nothing was left but to send answers.
    let (mut come, mut idle_at) = (0_u64, None);
    // One for each that is under way, and for each answer that waits to be sent.
    let unsent = Arc::new(());
    let mut allowance = Allowance::new(Instant::now());
    let ended = poll_fn(|context| {
        turn.begin(context);
        resets.forget();
        loop {
            // All that has come is taken before any of it is answered, so that the answers are
            // written at once: it is taking that writes.
            let mut given_up = 0;
            loop {
                match connection.poll_accept(context) {
                    Poll::Ready(Some(Ok((request, mut respond)))) => {
                        if resets.any() && respond.poll_reset(context).is_ready() {
                            given_up += 1;
                            continue;
                        }
                        come += 1;
                        let answering = Answering { respond, unsent: Arc::clone(&unsent) };
                        if let Some(answering) = answer(request, answering) {
                            under_way.push(answering);
                        }
                    }
                    // How a connection ends is its client's business.
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(End::Closed),
                    Poll::Pending => break,
                }
            }
            let mut written = false;
            if given_up > 0 && !allowance.pay(given_up, come, Instant::now()) {
                connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                events.push(Box::pin(after(LAST_WORD, Event::Gone)));
                written = true;
            }
            // A task's budget is meant for one request. There are no more than streams.
            let all = poll_fn(|context| {
                while let Poll::Ready(Some(())) = under_way.poll_next_unpin(context) {
                    written = true;
                }
                Poll::<()>::Pending
            });
            let _ = pin!(unconstrained(all)).poll(context);
            while let Poll::Ready(Some(event)) = events.poll_next_unpin(context) {
                written = true;
                match event {
                    Event::Stop => connection.graceful_shutdown(),
                    Event::Old => {
                        connection.graceful_shutdown();
                        events.push(Box::pin(after(patience.grace, Event::Gone)));
                    }
                    Event::Gone => return Poll::Ready(End::GivenUp),
                    Event::Look => {
                        // Also beside one that lasts, as those do who watch the node's health.
                        let wait = Arc::strong_count(&unsent) - 1 > under_way.len()
                            || under_way.is_empty() && connection.has_streams();
                        // Answers to pings alone do not show that anybody wants the others.
                        if wait && idle_at == Some(come) {
                            return Poll::Ready(End::GivenUp);
                        }
                        idle_at = wait.then_some(come);
                        events.push(Box::pin(look()));
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
    // A request that is left over may be the first in a queue of this thread.
    drop((under_way, events));
    if let End::Closed = ended {
        let stream = Turns::new(io, turn.clone());
        turn.each_poll(closing::read_to_end(stream, LAST_WORD, LAST_WORD)).await;
    }
}

/// Greets a client. One that comes while the node stops is told to go elsewhere, like all others.
async fn greet<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    patience: Patience,
    mut stop: impl Future<Output = ()> + Unpin,
) -> Option<Connection<S, Bytes>> {
    let mut builder = Builder::new();
    builder
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(METADATA)
        .max_send_buffer_size(UNSENT)
        .data_frame_budget(SMALL_FRAMES)
        .max_concurrent_reset_streams(RESETS)
        .reset_stream_duration(REMEMBERED)
        .max_pending_accept_reset_streams(GIVEN_UP);
    let mut greeting = pin!(timeout(patience.greeting, builder.handshake(stream)));
    tokio::select! {
        greeted = &mut greeting => greeted.ok()?.ok(),
        () = &mut stop => {
            let mut connection = timeout(LAST_GREETING, greeting).await.ok()?.ok()?.ok()?;
            connection.graceful_shutdown();
            Some(connection)
        }
    }
}

async fn after(time: Duration, event: Event) -> Event {
    tokio::time::sleep(time).await;
    event
}

/// Completes once the client does not answer when it is asked whether it is still there.
async fn keep_alive(mut pings: PingPong, patience: Patience) -> Event {
    loop {
        tokio::time::sleep(patience.keepalive).await;
        let answer = timeout(patience.answer, pings.ping(Ping::opaque())).await;
        if !matches!(answer, Ok(Ok(_))) {
            return Event::Gone;
        }
    }
}

/// The way back to the caller of one request.
pub struct Answering {
    respond: SendResponse<Bytes>,
    unsent: Arc<()>,
}

/// A message that is counted until it is sent.
struct Unsent {
    message: Bytes,
    _counted: Arc<()>,
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        &self.message
    }
}

impl Answering {
    /// Waits for something, but not after the caller has given up: then there is `None`.
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

    /// Sends headers and nothing else. A caller who has given up meanwhile gets nothing, here and
    /// below.
    pub fn headers(mut self, response: Response<()>) {
        let _ = self.respond.send_response(response, true);
    }

    /// Sends headers, one message, and what comes after it.
    pub fn message(mut self, response: Response<()>, message: Bytes, trailers: http::HeaderMap) {
        let message = Bytes::from_owner(Unsent { message, _counted: self.unsent });
        if let Ok(mut stream) = self.respond.send_response(response, false)
            && stream.send_data(message, false).is_ok()
        {
            let _ = stream.send_trailers(trailers);
        }
    }

    /// Sends the headers of an answer of many messages; `None` if the caller has given up.
    pub fn begin(mut self, response: Response<()>) -> Option<Sending> {
        let stream = self.respond.send_response(response, false).ok()?;
        Some(Sending { stream, _counted: self.unsent })
    }

    /// Sends whatever a body has, as fast as the caller takes it. `held` counts the bytes that
    /// are not sent yet.
    pub async fn body<B>(mut self, response: Response<B>, mut held: Held)
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let (parts, mut body) = response.into_parts();
        let ended = body.is_end_stream();
        let Ok(mut stream) = self.respond.send_response(Response::from_parts(parts, ()), ended)
        else {
            return;
        };
        if !ended && send(&mut body, &mut stream, &mut held).await.is_err() {
            stream.send_reset(Reason::INTERNAL_ERROR);
        }
    }
}

/// An answer of many messages.
pub struct Sending {
    stream: SendStream<Bytes>,
    _counted: Arc<()>,
}

impl Sending {
    /// Sends a message as fast as the caller takes it; `None`: it has gone.
    pub async fn message(&mut self, message: Bytes) -> Option<()> {
        send_data(message, &mut self.stream).await
    }

    /// Ends the answer.
    pub fn end(mut self, trailers: http::HeaderMap) {
        let _ = self.stream.send_trailers(trailers);
    }
}

/// Why a body was not sent to its end; an answer that the caller gave up counts as sent.
struct Broken;

async fn send<B>(
    body: &mut B,
    stream: &mut SendStream<Bytes>,
    held: &mut Held,
) -> Result<(), Broken>
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
        match frame.map_err(|_| Broken)?.into_data() {
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

/// Sends as much at a time as the caller has room for; `None`: it has gone.
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
        let some = data.split_to(room.min(data.len()));
        stream.send_data(some, false).ok()?;
    }
    Some(())
}

/// The body of a request.
pub struct Received {
    stream: RecvStream,
    /// What was taken too early.
    put_back: Option<Bytes>,
}

impl Received {
    /// All that comes on a stream.
    pub fn new(stream: RecvStream) -> Self {
        Self { stream, put_back: None }
    }

    /// Makes these the next bytes again.
    pub fn put_back(&mut self, data: Bytes) {
        self.put_back = Some(data);
    }

    /// The next bytes; `None`: there are no more. The caller's window is smaller by them until
    /// they are [released](Self::release).
    pub async fn data(&mut self) -> Option<Result<Bytes, h2::Error>> {
        if let Some(data) = self.put_back.take() {
            return Some(Ok(data));
        }
        poll_fn(|context| self.stream.poll_data(context)).await
    }

    /// Gives so many bytes back to the caller's window.
    pub fn release(&mut self, bytes: usize) {
        // It fails only for more than was received.
        let _ = self.stream.flow_control().release_capacity(bytes);
    }

    /// Nothing comes any more.
    pub fn is_over(&self) -> bool {
        self.put_back.is_none() && self.stream.is_end_stream()
    }
}

#[cfg(test)]
mod tests;
