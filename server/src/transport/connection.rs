//! Serves one HTTP/2 connection with the `h2` crate. One task handles all requests of a connection,
//! so answers that are ready together are written together. A task per request, as hyper has it,
//! costs a tenth of a node's time, and makes each request wait twice in the runtime's queue behind
//! the requests of other connections.

use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use h2::server::Connection;
use h2::{Ping, PingPong, Reason, RecvStream};
use http::Request;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::unconstrained;
use tokio::time::timeout;

use super::closing;
use super::inbound::{Inbound, ResetFlag};
use super::read_budget::{BudgetedStream, ReadBudget};
use super::resets::Allowance;

mod handshake;
mod headers;
mod request_body;
mod responder;
mod timeouts;

pub(super) use handshake::STOPPING_HANDSHAKE;
use handshake::handshake;
pub(super) use headers::{MAX_HEADER_BYTES, header_bytes};
pub use request_body::RequestBody;
pub use responder::{Responder, ResponseStream};
pub use timeouts::{DEFAULT_TIMEOUTS, Timeouts};

/// How long a client may take to read the last frames and close the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

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
/// request's own stream does not drop it: see [`Responder::unless_given_up`].
pub async fn serve<F>(
    mut io: impl AsyncRead + AsyncWrite + Unpin,
    timeouts: Timeouts,
    stop: impl Future<Output = ()> + Send + 'static,
    answer: impl FnMut(Request<RecvStream>, Responder) -> Option<F>,
) where
    F: Future<Output = ()>,
{
    let mut stop = Box::pin(stop.fuse());
    let (read_budget, resets) = (ReadBudget::default(), ResetFlag::default());
    let stream = Inbound::new(&mut io, read_budget.clone(), resets.clone());
    let handshake = read_budget.refill_each_poll(handshake(stream, timeouts, &mut stop));
    let Some(connection) = handshake.await else { return };
    let mut serving = Serving::new(connection, timeouts, stop, answer, resets.clone());
    let ended = poll_fn(|context| {
        read_budget.refill(context);
        resets.clear();
        serving.poll(context)
    })
    .await;
    // A leftover request may be first in this thread's queue, so drop it before the next wait.
    drop(serving);
    if let End::Closed = ended {
        let stream = BudgetedStream::new(io, read_budget.clone());
        read_budget
            .refill_each_poll(closing::read_to_end(stream, CLOSE_TIMEOUT, CLOSE_TIMEOUT))
            .await;
    }
}

/// A connection after its handshake, with its open requests. Dropped in the order of the fields:
/// the connection before the requests.
struct Serving<S, A, F>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    connection: Connection<S, Bytes>,
    timeouts: Timeouts,
    answer: A,
    /// `FuturesUnordered` polls only the futures that were woken.
    open_requests: FuturesUnordered<F>,
    events: FuturesUnordered<BoxFuture<'static, Event>>,
    /// Whether a RST_STREAM was read in this poll.
    resets: ResetFlag,
    allowance: Allowance,
    /// Requests accepted so far.
    accepted: u64,
    /// `accepted` at the last check that found unsent answers.
    stalled_at: Option<u64>,
    /// One clone per open request and per response that is not sent yet.
    unsent: Arc<()>,
}

impl<S, A, F> Serving<S, A, F>
where
    S: AsyncRead + AsyncWrite + Unpin,
    A: FnMut(Request<RecvStream>, Responder) -> Option<F>,
    F: Future<Output = ()>,
{
    fn new(
        mut connection: Connection<S, Bytes>,
        timeouts: Timeouts,
        stop: impl Future<Output = ()> + Send + 'static,
        answer: A,
        resets: ResetFlag,
    ) -> Self {
        let events = FuturesUnordered::<BoxFuture<'static, Event>>::new();
        if let Some(pings) = connection.ping_pong() {
            events.push(keep_alive(pings, timeouts).boxed());
        }
        events.push(stop.map(|()| Event::Stop).boxed());
        if let Some(age) = timeouts.age {
            events.push(after(age, Event::MaxAge).boxed());
        }
        events.push(after(timeouts.keepalive, Event::StallCheck).boxed());
        Self {
            connection,
            timeouts,
            answer,
            open_requests: FuturesUnordered::new(),
            events,
            resets,
            allowance: Allowance::new(Instant::now()),
            accepted: 0,
            stalled_at: None,
            unsent: Arc::new(()),
        }
    }

    /// Polls until nothing is left to write.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        loop {
            match self.poll_all(context) {
                ControlFlow::Break(end) => return Poll::Ready(end),
                ControlFlow::Continue(true) => {}
                ControlFlow::Continue(false) => return Poll::Pending,
            }
        }
    }

    /// Returns whether something was written since the requests were accepted. Only
    /// [`accept_all`](Self::accept_all) sends what is written.
    fn poll_all(&mut self, context: &mut Context<'_>) -> ControlFlow<End, bool> {
        let reset_count = self.accept_all(context)?;
        let refused = self.charge_resets(reset_count);
        let answered = self.answer_all(context);
        let handled = self.handle_events(context)?;
        ControlFlow::Continue(refused || answered || handled)
    }

    /// Accepts every request that has arrived before any is answered: `poll_accept` also writes, so
    /// the answers are written together. Returns the number of requests that were already reset.
    fn accept_all(&mut self, context: &mut Context<'_>) -> ControlFlow<End, u32> {
        let mut reset_count = 0;
        loop {
            match self.connection.poll_accept(context) {
                Poll::Ready(Some(Ok((request, mut respond)))) => {
                    if self.resets.is_set() && respond.poll_reset(context).is_ready() {
                        reset_count += 1;
                        continue;
                    }
                    self.accepted += 1;
                    let responder = Responder { respond, unsent: Arc::clone(&self.unsent) };
                    if let Some(open_request) = (self.answer)(request, responder) {
                        self.open_requests.push(open_request);
                    }
                }
                // A connection error is the client's, and is not reported.
                Poll::Ready(Some(Err(_)) | None) => return ControlFlow::Break(End::Closed),
                Poll::Pending => return ControlFlow::Continue(reset_count),
            }
        }
    }

    /// Closes the connection if its client resets more than its allowance. Returns whether it does.
    fn charge_resets(&mut self, reset_count: u32) -> bool {
        if reset_count == 0 || self.allowance.pay(reset_count, self.accepted, Instant::now()) {
            return false;
        }
        self.connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
        self.events.push(after(CLOSE_TIMEOUT, Event::CutOff).boxed());
        true
    }

    /// Polls the open requests. Returns whether one has ended.
    fn answer_all(&mut self, context: &mut Context<'_>) -> bool {
        let mut answered = false;
        // tokio's cooperative budget is meant for a task with one request. There are at most
        // `MAX_STREAMS` here.
        let answer_all = poll_fn(|context| {
            while let Poll::Ready(Some(())) = self.open_requests.poll_next_unpin(context) {
                answered = true;
            }
            Poll::<()>::Pending
        });
        let _ = pin!(unconstrained(answer_all)).poll(context);
        answered
    }

    /// Handles the events that have happened. Returns whether there was one.
    fn handle_events(&mut self, context: &mut Context<'_>) -> ControlFlow<End, bool> {
        let mut handled = false;
        while let Poll::Ready(Some(event)) = self.events.poll_next_unpin(context) {
            handled = true;
            match event {
                Event::Stop => self.connection.graceful_shutdown(),
                Event::MaxAge => {
                    self.connection.graceful_shutdown();
                    self.events.push(after(self.timeouts.grace, Event::CutOff).boxed());
                }
                Event::CutOff => return ControlFlow::Break(End::CutOff),
                Event::StallCheck => {
                    self.check_for_stall()?;
                    self.events.push(after(self.timeouts.keepalive, Event::StallCheck).boxed());
                }
            }
        }
        ControlFlow::Continue(handled)
    }

    /// Cuts off a client that only answers PINGs, but reads no answers and sends no requests.
    fn check_for_stall(&mut self) -> ControlFlow<End> {
        // Unsent answers count even beside a request that stays open, such as a health watch.
        let has_unsent = Arc::strong_count(&self.unsent) - 1 > self.open_requests.len()
            || self.open_requests.is_empty() && self.connection.has_streams();
        if has_unsent && self.stalled_at == Some(self.accepted) {
            return ControlFlow::Break(End::CutOff);
        }
        self.stalled_at = has_unsent.then_some(self.accepted);
        ControlFlow::Continue(())
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

#[cfg(test)]
mod tests;
