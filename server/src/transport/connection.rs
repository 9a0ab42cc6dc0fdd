//! One HTTP/2 connection, on h2 itself: all its requests are worked on in its one task, so that
//! whatever is answered together is also written together. A task for each request, as hyper has
//! it, costs a tenth of a node's time, and makes each one wait in the runtime's queue behind
//! those of others, twice.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use h2::server::{Builder, SendResponse};
use h2::{Ping, PingPong, Reason, RecvStream, SendStream};
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::unconstrained;

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
}

/// What clients are used to.
pub const PATIENCE: Patience = Patience {
    greeting: Duration::from_secs(10),
    keepalive: Duration::from_secs(30),
    answer: Duration::from_secs(10),
    idle: Duration::from_secs(75),
    call: Duration::from_secs(30),
};

/// How many requests of a connection are worked on at once; its client holds back the others. What
/// it sends beyond that before it knows is refused, which libraries send again.
pub(super) const STREAMS: u32 = 200;

/// How many requests that were given up before they were looked at a connection may have. One that
/// has more is closed, with all other requests on it; some guard there must be against callers
/// who do nothing but that.
const GIVEN_UP: usize = 1024;

/// How many bytes a client may send ahead, on one stream and in all.
const WINDOW: u32 = 1 << 20;

/// The most bytes of the headers of a request.
pub(super) const HEADERS: u32 = 16 << 10;

/// The most bytes of an answer that wait to be sent.
const UNSENT: usize = 400 << 10;

/// What may happen to a connection beside its requests.
enum Event {
    /// No more requests should come.
    Stop,
    /// The client is gone.
    Gone,
    /// It is time to look whether the client takes its answers.
    Look,
}

/// Serves a connection until its client closes it, or until `stop` completes and every request
/// under way is answered. `answer` answers one request, and is dropped if its caller gives up;
/// `None`: it has answered it already.
pub async fn serve<F>(
    io: impl AsyncRead + AsyncWrite + Unpin,
    patience: Patience,
    stop: impl Future<Output = ()> + Send + 'static,
    mut answer: impl FnMut(Request<RecvStream>, Answering) -> Option<F>,
) where
    F: Future<Output = ()>,
{
    let mut builder = Builder::new();
    builder
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEADERS)
        .max_send_buffer_size(UNSENT)
        .max_pending_accept_reset_streams(GIVEN_UP);
    let mut stop = Box::pin(stop);
    let turn = Turn::default();
    let greeting = async {
        let greeting = builder.handshake::<_, Bytes>(Turns::new(io, turn.clone()));
        let mut greeting = pin!(tokio::time::timeout(patience.greeting, greeting));
        poll_fn(|context| {
            turn.begin();
            greeting.as_mut().poll(context)
        })
        .await
    };
    let greeted = tokio::select! {
        greeted = greeting => greeted,
        // Nobody has asked for anything.
        () = &mut stop => return,
    };
    let Ok(Ok(mut connection)) = greeted else { return };

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
    let look = || async move {
        tokio::time::sleep(patience.keepalive).await;
        Event::Look
    };
    events.push(Box::pin(look()));
    // How many requests have come, and how many had when nothing was left but to send answers.
    let (mut come, mut idle_at) = (0_u64, None);
    // One for each that is under way, and for each answer that waits to be sent.
    let unsent = Arc::new(());
    poll_fn(|context| {
        turn.begin();
        loop {
            // All that has come is taken before any of it is answered, so that the answers are
            // written at once: it is taking that writes.
            loop {
                match connection.poll_accept(context) {
                    Poll::Ready(Some(Ok((request, respond)))) => {
                        come += 1;
                        let answering = Answering { respond, unsent: Arc::clone(&unsent) };
                        if let Some(answering) = answer(request, answering) {
                            under_way.push(answering);
                        }
                    }
                    // How a connection ends is its client's business.
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(()),
                    Poll::Pending => break,
                }
            }
            let mut written = false;
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
                    Event::Gone => return Poll::Ready(()),
                    Event::Look => {
                        // Also beside one that lasts, as those do who watch the node's health.
                        let wait = Arc::strong_count(&unsent) - 1 > under_way.len()
                            || under_way.is_empty() && connection.has_streams();
                        // Answers to pings alone do not show that anybody wants the others.
                        if wait && idle_at == Some(come) {
                            return Poll::Ready(());
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
    })
    .await;
}

/// Completes once the client does not answer when it is asked whether it is still there.
async fn keep_alive(mut pings: PingPong, patience: Patience) -> Event {
    loop {
        tokio::time::sleep(patience.keepalive).await;
        let answer = tokio::time::timeout(patience.answer, pings.ping(Ping::opaque())).await;
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

    /// Sends whatever a body has, as fast as the caller takes it.
    pub async fn body<B>(mut self, response: Response<B>)
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let (parts, mut body) = response.into_parts();
        let ended = body.is_end_stream();
        let Ok(mut stream) = self.respond.send_response(Response::from_parts(parts, ()), ended)
        else {
            return;
        };
        if !ended && send(&mut body, &mut stream).await.is_err() {
            stream.send_reset(Reason::INTERNAL_ERROR);
        }
    }
}

/// Why a body was not sent to its end; an answer that the caller gave up counts as sent.
struct Broken;

async fn send<B>(body: &mut B, stream: &mut SendStream<Bytes>) -> Result<(), Broken>
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

/// What a caller sends, as tonic takes it.
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

    /// The next bytes; `None`: there are no more. They are given back to the caller's window.
    pub async fn data(&mut self) -> Option<Result<Bytes, h2::Error>> {
        poll_fn(|context| self.poll_data(context)).await
    }

    /// Nothing comes any more.
    pub fn is_over(&self) -> bool {
        self.put_back.is_none() && self.stream.is_end_stream()
    }

    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        if let Some(data) = self.put_back.take() {
            return Poll::Ready(Some(Ok(data)));
        }
        let data = ready!(self.stream.poll_data(context));
        if let Some(Ok(data)) = &data {
            // It fails only for more than was received.
            let _ = self.stream.flow_control().release_capacity(data.len());
        }
        Poll::Ready(data)
    }
}

impl Body for Received {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if let Some(data) = ready!(self.poll_data(context)) {
            return Poll::Ready(Some(data.map(Frame::data)));
        }
        let trailers = ready!(self.stream.poll_trailers(context));
        Poll::Ready(trailers.transpose().map(|trailers| trailers.map(Frame::trailers)))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over()
    }
}

#[cfg(test)]
mod tests;
