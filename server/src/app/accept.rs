//! The accept thread. It accepts connections on both ports and hands them to the worker threads. It
//! does nothing else, so new connections never wait for requests of other connections.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};

use super::thread::{self, stop_signal};
use super::{Error, Listeners};
use crate::logging::LogThrottle;
use crate::transport::overload::{ConnectionSlot, ConnectionSlots};

/// How long a gRPC client may take to send its first byte.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);

/// The most connections that wait to be accepted, unless the kernel allows fewer
/// (`net.core.somaxconn`). Beyond it the kernel drops a client's SYN, and the client tries again
/// after a second. With tokio's default of 128, hundreds of clients that came back at once did.
const BACKLOG: u32 = 4096;

/// How long a gRPC client may take to send its first byte once the node is stopping.
const FIRST_BYTE_TIMEOUT_ON_STOP: Duration = Duration::from_secs(1);

/// An accepted connection and its slot among the port's connections.
pub(super) type Accepted = (std::net::TcpStream, ConnectionSlot);

/// The worker threads of one port.
pub(super) struct PortWorkers {
    /// The port's connection slots.
    pub(super) slots: ConnectionSlots,
    /// One channel per worker.
    pub(super) senders: Vec<mpsc::Sender<Accepted>>,
    /// Stops the workers. Sent after the listener is closed, so that clients that are told to go
    /// away can't reconnect to this node.
    pub(super) stop: watch::Sender<bool>,
}

/// Listens on an address.
pub(super) fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restarted node does not wait for its old connections in TIME_WAIT.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

/// Handle of the accept thread, which ends when the node stops.
pub(super) struct AcceptThread(oneshot::Receiver<()>);

impl AcceptThread {
    /// Accepts until `stopped` is true, then closes both listeners and stops the workers.
    pub(super) fn start(
        listeners: Listeners,
        grpc: PortWorkers,
        http: PortWorkers,
        stopped: watch::Receiver<bool>,
    ) -> Result<Self, Error> {
        let system_error = |error| Error::System("the listening sockets", error);
        let grpc_listener = listeners.grpc.into_std().map_err(system_error)?;
        let http_listener = listeners.http.into_std().map_err(system_error)?;
        let accepting = async move {
            let grpc_listener = TcpListener::from_std(grpc_listener)?;
            let http_listener = TcpListener::from_std(http_listener)?;
            tokio::join!(
                accept_after_first_byte(grpc_listener, grpc, stop_signal(stopped.clone())),
                accept(http_listener, http, stop_signal(stopped)),
            );
            io::Result::Ok(())
        };
        let ended = thread::start("accept".to_owned(), || async {
            if let Err(error) = accepting.await {
                tracing::error!(%error, "no connections can be accepted");
            }
        })?;
        Ok(Self(ended))
    }

    /// Completes if the thread exits. Before `stopped` is true, it exits only on an error.
    pub(super) async fn gone(&mut self) -> Error {
        let _ = (&mut self.0).await;
        Error::System("accepting connections", io::Error::other("the thread is gone"))
    }
}

/// Accepts the connections of the HTTP port until `stopped` completes.
async fn accept(listener: TcpListener, workers: PortWorkers, stopped: impl Future<Output = ()>) {
    let (failures, mut dispatcher) = (LogThrottle::default(), Dispatcher::new(&workers));
    let mut stopped = pin!(stopped);
    let last = loop {
        let accepted = tokio::select! {
            accepted = next(&listener, &failures) => accepted,
            () = &mut stopped => break close(listener, &workers),
        };
        if let Some(accepted) = accepted.and_then(|stream| take_slot(stream, &workers.slots)) {
            dispatcher.dispatch(accepted).await;
        }
    };
    for accepted in last {
        dispatcher.dispatch(accepted).await;
    }
}

/// Accepts the connections of the gRPC port until `stopped` completes. Hands each over when its
/// first byte arrives. Until then a stopping node can close it, as it has sent no request; a worker
/// would first wait for its HTTP/2 preface. Connections that send a byte soon after the stop are handed over to get GOAWAY.
async fn accept_after_first_byte(
    listener: TcpListener,
    workers: PortWorkers,
    stopped: impl Future<Output = ()>,
) {
    let (failures, mut dispatcher) = (LogThrottle::default(), Dispatcher::new(&workers));
    let (mut waiting, mut stopped) = (JoinSet::new(), pin!(stopped));
    loop {
        let accepted = tokio::select! {
            accepted = next(&listener, &failures) => accepted,
            Some(result) = waiting.join_next() => {
                dispatcher.hand_over_result(result).await;
                continue;
            }
            () = &mut stopped => break,
        };
        if let Some(accepted) = accepted.and_then(|stream| take_slot(stream, &workers.slots)) {
            waiting.spawn(await_first_byte(accepted));
        }
    }
    for accepted in close(listener, &workers) {
        waiting.spawn(await_first_byte(accepted));
    }
    let last = async {
        while let Some(result) = waiting.join_next().await {
            dispatcher.hand_over_result(result).await;
        }
    };
    let _ = tokio::time::timeout(FIRST_BYTE_TIMEOUT_ON_STOP, last).await;
}

/// Waits for the first byte of a connection, and returns the connection.
async fn await_first_byte((stream, slot): (TcpStream, ConnectionSlot)) -> io::Result<Accepted> {
    tokio::time::timeout(FIRST_BYTE_TIMEOUT, stream.peek(&mut [0])).await??;
    Ok((stream.into_std()?, slot))
}

/// Closes a listener and stops the workers. Returns the connections in the listener's backlog that
/// there are slots for: closing the listener would reset them, and clients could not tell whether
/// their requests were processed.
fn close(listener: TcpListener, workers: &PortWorkers) -> Vec<(TcpStream, ConnectionSlot)> {
    let mut waiting = Vec::new();
    if let Ok(listener) = listener.into_std() {
        // The listener is non-blocking. Clients that keep connecting take the places that become
        // free, so the bound is higher than the backlog.
        for _ in 0..2 * BACKLOG {
            let Ok((stream, _)) = listener.accept() else { break };
            let accepted = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
            let accepted = accepted.and_then(without_delay).ok();
            waiting.extend(accepted.and_then(|stream| take_slot(stream, &workers.slots)));
        }
    }
    workers.stop.send_replace(true);
    waiting
}

/// Disables Nagle's algorithm, which would delay a response until the one before it is
/// acknowledged.
fn without_delay(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The next connection; `None` after a failure and a pause.
async fn next(listener: &TcpListener, failures: &LogThrottle) -> Option<TcpStream> {
    match listener.accept().await.and_then(|(stream, _)| without_delay(stream)) {
        Ok(stream) => Some(stream),
        Err(error) => {
            if let Some(held_back) = failures.pass() {
                tracing::warn!(
                    %error, held_back, advice = "raise the limit of open files (ulimit -n)",
                    "a connection could not be accepted"
                );
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            None
        }
    }
}

/// Takes a slot for a connection. If none is free, closes the connection at once: if it
/// waited, a load balancer would see a slow node rather than a full one.
fn take_slot(stream: TcpStream, slots: &ConnectionSlots) -> Option<(TcpStream, ConnectionSlot)> {
    match slots.take() {
        Some(slot) => Some((stream, slot)),
        None => {
            // Closes with a reset, which leaves no socket in TIME_WAIT.
            let _ = stream.set_zero_linger();
            None
        }
    }
}

/// Distributes connections to the workers of one port, round-robin.
struct Dispatcher<'w> {
    workers: &'w PortWorkers,
    next: usize,
}

impl<'w> Dispatcher<'w> {
    fn new(workers: &'w PortWorkers) -> Self {
        Self { workers, next: 0 }
    }

    async fn dispatch(&mut self, (stream, slot): (TcpStream, ConnectionSlot)) {
        if let Ok(stream) = stream.into_std() {
            self.hand_over((stream, slot)).await;
        }
    }

    async fn hand_over_result(&mut self, result: Result<io::Result<Accepted>, JoinError>) {
        // A connection that failed before its first byte carried no request.
        if let Ok(Ok(accepted)) = result {
            self.hand_over(accepted).await;
        }
    }

    /// Hands over to the next worker whose channel has room. Waits while all channels are full; new
    /// connections then wait in the listen backlog.
    async fn hand_over(&mut self, mut accepted: Accepted) {
        let senders = &self.workers.senders;
        for _ in 0..senders.len() {
            let sender = &senders[self.next];
            self.next = (self.next + 1) % senders.len();
            match sender.try_send(accepted) {
                Ok(()) => return,
                Err(TrySendError::Full(back) | TrySendError::Closed(back)) => accepted = back,
            }
        }
        let room = select_all(senders.iter().map(|sender| Box::pin(sender.reserve())));
        // A closed channel means that its worker is gone, which ends the node.
        if let (Ok(permit), _, _) = room.await {
            permit.send(accepted);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::FutureExt as _;
    use metrics::{Counter, Gauge};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::metrics::ConnectionMetrics;

    async fn accepted(listener: &TcpListener, slots: &ConnectionSlots) -> (TcpStream, Accepted) {
        let address = listener.local_addr().expect("an address");
        let (client, stream) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (stream, _) = stream.expect("accepted");
        let (stream, slot) = take_slot(stream, slots).expect("a slot");
        (client.expect("connected"), (stream.into_std().expect("a stream"), slot))
    }

    #[tokio::test]
    async fn a_stuck_worker_does_not_block_the_others() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let slots = ConnectionSlots::new(
            100,
            ConnectionMetrics { open: Gauge::noop(), refused: Counter::noop() },
        );
        let (stuck, _never_received) = mpsc::channel(1);
        let (free, mut received) = mpsc::channel(8);
        let (stop, _) = watch::channel(false);
        let workers = PortWorkers { slots: slots.clone(), senders: vec![stuck, free], stop };
        let mut dispatcher = Dispatcher::new(&workers);
        let mut clients = Vec::new();
        // The stuck worker takes the first connection, the other worker the next eight.
        for _ in 0..9 {
            let (client, accepted) = accepted(&listener, &slots).await;
            clients.push(client);
            dispatcher.hand_over(accepted).now_or_never().expect("a channel has room");
        }
        // Both channels are full now.
        let (_client, last) = accepted(&listener, &slots).await;
        let mut waits = Box::pin(dispatcher.hand_over(last));
        assert!(waits.as_mut().now_or_never().is_none());
        received.try_recv().expect("handed over");
        waits.now_or_never().expect("there is room again");
        for _ in 0..8 {
            received.try_recv().expect("handed over");
        }
        assert!(received.try_recv().is_err());
    }

    #[tokio::test]
    async fn new_connections_are_handed_over_on_stop() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (sender, mut accepted) = mpsc::channel(8);
        let (stop, stopped) = watch::channel(false);
        let counted = ConnectionMetrics { open: Gauge::noop(), refused: Counter::noop() };
        let (stop_workers, workers_stopped) = watch::channel(false);
        let slots = ConnectionSlots::new(8, counted);
        let workers = PortWorkers { slots, senders: vec![sender], stop: stop_workers };
        let accepting =
            tokio::spawn(accept_after_first_byte(listener, workers, stop_signal(stopped)));
        let mut late = TcpStream::connect(address).await.expect("connected");
        let mut silent = TcpStream::connect(address).await.expect("connected");
        // Accepted after the silent connection.
        let mut last = TcpStream::connect(address).await.expect("connected");
        last.write_all(b"x").await.expect("sent");
        assert!(accepted.recv().await.is_some());
        stop.send_replace(true);
        stop_signal(workers_stopped).await;
        TcpStream::connect(address).await.expect_err("the listener is closed first");
        late.write_all(b"x").await.expect("sent");
        assert!(accepted.recv().await.is_some(), "its first byte came late, but in time");
        assert!(accepted.recv().await.is_none(), "the channel is closed");
        accepting.await.expect("it ends");
        assert_eq!(silent.read(&mut [0]).await.expect("closed"), 0);
    }

    #[tokio::test]
    async fn hundreds_of_connections_at_once_wait_to_be_accepted() {
        let listener = listen(([127, 0, 0, 1], 0).into()).expect("a port");
        let address = listener.local_addr().expect("an address");
        let connected =
            futures_util::future::try_join_all((0..300).map(|_| TcpStream::connect(address)));
        // None is accepted, so a client whose SYN was dropped would never be connected. Needs a
        // `net.core.somaxconn` and a `ulimit -n` of more than 300.
        let connected = tokio::time::timeout(Duration::from_secs(20), connected).await;
        assert_eq!(connected.expect("in time").expect("connected").len(), 300);
    }

    #[tokio::test]
    async fn connections_in_the_backlog_are_handed_over_on_stop() {
        for grpc in [true, false] {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("an address");
            let mut clients = Vec::new();
            for _ in 0..8 {
                let mut client = TcpStream::connect(address).await.expect("connected");
                client.write_all(b"x").await.expect("sent");
                clients.push(client);
            }
            let (sender, mut accepted) = mpsc::channel(8);
            let counted = ConnectionMetrics { open: Gauge::noop(), refused: Counter::noop() };
            let (stop, _) = watch::channel(false);
            let workers = PortWorkers {
                slots: ConnectionSlots::new(8, counted),
                senders: vec![sender],
                stop,
            };
            let stopped = std::future::ready(());
            match grpc {
                true => accept_after_first_byte(listener, workers, stopped).await,
                false => accept(listener, workers, stopped).await,
            }
            let mut handed_over = 0;
            while accepted.recv().await.is_some() {
                handed_over += 1;
            }
            assert_eq!(handed_over, clients.len());
        }
    }
}
