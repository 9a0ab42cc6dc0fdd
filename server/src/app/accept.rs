//! The thread that accepts connections for both ports and hands them to the threads that serve
//! them. It does nothing else, so new connections never wait for what older ones ask.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::thread;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};

use super::{Error, Listeners, stop_signal};
use crate::logging::Repeating;
use crate::transport::load::{Place, Places};

/// How long a gRPC connection may take to its first byte.
const SILENCE: Duration = Duration::from_secs(10);

/// How many connections wait to be accepted at most, as the listeners are made.
const BACKLOG: usize = 1024;

/// How long it may still take to that once the node is stopping.
const LAST: Duration = Duration::from_secs(1);

/// A connection, and its place among those that the port has room for.
pub(super) type Accepted = (std::net::TcpStream, Place);

/// What becomes of the connections of one port.
pub(super) struct Gate {
    /// How many there may be.
    pub(super) places: Places,
    /// One for each thread that serves them.
    pub(super) lanes: Vec<mpsc::Sender<Accepted>>,
    /// Tells these threads to stop. That is after the port is closed: clients that are sent away
    /// connect again at once, and would wait for nobody here.
    pub(super) stop: watch::Sender<bool>,
}

/// The thread, which ends when the node stops.
pub(super) struct Accepting(oneshot::Receiver<()>);

impl Accepting {
    /// Accepts until `stopped`. Then it closes both ports, and tells who serves them to stop.
    pub(super) fn start(
        listeners: Listeners,
        grpc: Gate,
        http: Gate,
        stopped: watch::Receiver<bool>,
    ) -> Result<Self, Error> {
        let unusable = |error| Error::System("a bound address", error);
        let grpc_listener = listeners.grpc.into_std().map_err(unusable)?;
        let http_listener = listeners.http.into_std().map_err(unusable)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::System("a runtime", error))?;
        let (end, ended) = oneshot::channel();
        let accepting = async move {
            let grpc_listener = TcpListener::from_std(grpc_listener)?;
            let http_listener = TcpListener::from_std(http_listener)?;
            tokio::join!(
                accept_once_spoken(grpc_listener, grpc, stop_signal(stopped.clone())),
                accept(http_listener, http, stop_signal(stopped)),
            );
            io::Result::Ok(())
        };
        thread::Builder::new()
            .name("accept".to_owned())
            .spawn(move || {
                if let Err(error) = runtime.block_on(accepting) {
                    tracing::error!(%error, "no connections can be accepted");
                }
                // Nobody listens if the node has given up waiting.
                let _ = end.send(());
            })
            .map_err(|error| Error::System("a thread", error))?;
        Ok(Self(ended))
    }

    /// Completes once the thread has ended, which it does by itself only for a fault.
    pub(super) async fn gone(&mut self) -> Error {
        let _ = (&mut self.0).await;
        Error::System("accepting connections", io::Error::other("the thread is gone"))
    }
}

/// Accepts the connections of the HTTP port until `stopped` completes.
async fn accept(listener: TcpListener, gate: Gate, stopped: impl Future<Output = ()>) {
    let (failures, mut deal) = (Repeating::default(), Deal::new(&gate));
    let mut stopped = pin!(stopped);
    let last = loop {
        let accepted = tokio::select! {
            accepted = next(&listener, &failures) => accepted,
            () = &mut stopped => break close(listener, &gate),
        };
        if let Some(stream) = accepted {
            deal.admit(stream).await;
        }
    };
    for stream in last {
        deal.admit(stream).await;
    }
}

/// Accepts the connections of the gRPC port until `stopped` completes, and hands over each once it
/// has sent something: until then it can be closed, whereas a server waits for it to speak.
/// Connections that speak soon after the stop are handed over as well, to hear that they should go.
async fn accept_once_spoken(listener: TcpListener, gate: Gate, stopped: impl Future<Output = ()>) {
    let (failures, mut deal) = (Repeating::default(), Deal::new(&gate));
    let (mut silent, mut stopped) = (JoinSet::new(), pin!(stopped));
    loop {
        let accepted = tokio::select! {
            accepted = next(&listener, &failures) => accepted,
            Some(spoken) = silent.join_next() => {
                deal.hand_over_spoken(spoken).await;
                continue;
            }
            () = &mut stopped => break,
        };
        if let Some(accepted) = accepted.and_then(|stream| placed(stream, &gate.places)) {
            silent.spawn(spoken(accepted));
        }
    }
    for stream in close(listener, &gate) {
        if let Some(accepted) = placed(stream, &gate.places) {
            silent.spawn(spoken(accepted));
        }
    }
    let last = async {
        while let Some(spoken) = silent.join_next().await {
            deal.hand_over_spoken(spoken).await;
        }
    };
    let _ = tokio::time::timeout(LAST, last).await;
}

/// The same connection once its client has sent something.
async fn spoken((stream, place): (TcpStream, Place)) -> io::Result<Accepted> {
    tokio::time::timeout(SILENCE, stream.peek(&mut [0])).await??;
    Ok((stream.into_std()?, place))
}

/// Closes a port, and tells who serves it to stop. Gives back the connections that are made already
/// and wait to be accepted: closing the port would reset them, and their clients could not know
/// that nobody has looked at their requests.
fn close(listener: TcpListener, gate: &Gate) -> Vec<TcpStream> {
    let mut waiting = Vec::new();
    if let Ok(listener) = listener.into_std() {
        // It does not block. Who connects without end is not waited for.
        while waiting.len() < BACKLOG
            && let Ok((stream, _)) = listener.accept()
        {
            waiting.extend(ready(stream).ok());
        }
    }
    gate.stop.send_replace(true);
    waiting
}

fn ready(stream: std::net::TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(true)?;
    // An answer must not wait for the acknowledgement of the one before.
    stream.set_nodelay(true)?;
    TcpStream::from_std(stream)
}

/// The next connection; `None`: it failed, and nothing is gained by trying again sooner.
async fn next(listener: &TcpListener, failures: &Repeating) -> Option<TcpStream> {
    let accepted = listener.accept().await.and_then(|(stream, _)| {
        // An answer must not wait for the acknowledgement of the one before.
        stream.set_nodelay(true)?;
        Ok(stream)
    });
    match accepted {
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

/// The connection and its place. Without a place it is closed at once: left to wait, it would look
/// to a load balancer like one that is served, but slowly.
fn placed(stream: TcpStream, places: &Places) -> Option<(TcpStream, Place)> {
    match places.take() {
        Some(place) => Some((stream, place)),
        None => {
            // Nothing is left of it, not even for the minute that ports are kept.
            let _ = stream.set_zero_linger();
            None
        }
    }
}

/// Deals connections out to the threads of one port, in turn.
struct Deal<'g> {
    gate: &'g Gate,
    next: usize,
}

impl<'g> Deal<'g> {
    fn new(gate: &'g Gate) -> Self {
        Self { gate, next: 0 }
    }

    /// Hands over a new connection, if there is a place for it.
    async fn admit(&mut self, stream: TcpStream) {
        if let Some((stream, place)) = placed(stream, &self.gate.places)
            && let Ok(stream) = stream.into_std()
        {
            self.hand_over((stream, place)).await;
        }
    }

    async fn hand_over_spoken(&mut self, spoken: Result<io::Result<Accepted>, JoinError>) {
        // What has failed before its first byte is nobody's request.
        if let Ok(Ok(accepted)) = spoken {
            self.hand_over(accepted).await;
        }
    }

    /// Hands over to the next thread that has room. Waits only while none of them has any: then
    /// the port's other connections wait to be accepted.
    async fn hand_over(&mut self, mut accepted: Accepted) {
        let lanes = &self.gate.lanes;
        for _ in 0..lanes.len() {
            let lane = &lanes[self.next];
            self.next = (self.next + 1) % lanes.len();
            match lane.try_send(accepted) {
                Ok(()) => return,
                Err(TrySendError::Full(back) | TrySendError::Closed(back)) => accepted = back,
            }
        }
        let room = select_all(lanes.iter().map(|lane| Box::pin(lane.reserve())));
        // A thread that is gone takes no connections, and ends the node.
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

    async fn accepted(listener: &TcpListener, places: &Places) -> (TcpStream, Accepted) {
        let address = listener.local_addr().expect("an address");
        let (client, stream) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (stream, _) = stream.expect("accepted");
        let (stream, place) = placed(stream, places).expect("a place");
        (client.expect("connected"), (stream.into_std().expect("a stream"), place))
    }

    #[tokio::test]
    async fn a_thread_that_takes_nothing_holds_up_no_other() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let places =
            Places::new(100, ConnectionMetrics { open: Gauge::noop(), refused: Counter::noop() });
        let (stuck, _never_received) = mpsc::channel(1);
        let (free, mut received) = mpsc::channel(8);
        let (stop, _) = watch::channel(false);
        let gate = Gate { places: places.clone(), lanes: vec![stuck, free], stop };
        let mut deal = Deal::new(&gate);
        let mut clients = Vec::new();
        // The first goes to the one that is stuck, and the other takes eight more.
        for _ in 0..9 {
            let (client, accepted) = accepted(&listener, &places).await;
            clients.push(client);
            deal.hand_over(accepted).now_or_never().expect("one of them has room");
        }
        // Neither has room now.
        let (_client, last) = accepted(&listener, &places).await;
        let mut waits = Box::pin(deal.hand_over(last));
        assert!(waits.as_mut().now_or_never().is_none());
        received.try_recv().expect("handed over");
        waits.now_or_never().expect("there is room again");
        for _ in 0..8 {
            received.try_recv().expect("handed over");
        }
        assert!(received.try_recv().is_err());
    }

    #[tokio::test]
    async fn who_has_just_connected_is_dealt_out_when_it_stops() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (lane, mut accepted) = mpsc::channel(8);
        let (stop, stopped) = watch::channel(false);
        let counted = ConnectionMetrics { open: Gauge::noop(), refused: Counter::noop() };
        let (stop_workers, workers_stopped) = watch::channel(false);
        let places = Places::new(8, counted);
        let gate = Gate { places, lanes: vec![lane], stop: stop_workers };
        let accepting = tokio::spawn(accept_once_spoken(listener, gate, stop_signal(stopped)));
        let mut spoken = TcpStream::connect(address).await.expect("connected");
        let mut silent = TcpStream::connect(address).await.expect("connected");
        // It was accepted after the one that is silent.
        let mut last = TcpStream::connect(address).await.expect("connected");
        last.write_all(b"x").await.expect("sent");
        assert!(accepted.recv().await.is_some());
        stop.send_replace(true);
        stop_signal(workers_stopped).await;
        TcpStream::connect(address).await.expect_err("the port was closed before");
        spoken.write_all(b"x").await.expect("sent");
        assert!(accepted.recv().await.is_some(), "it has spoken late, but in time");
        assert!(accepted.recv().await.is_none(), "nothing is waited for any more");
        accepting.await.expect("it ends");
        assert_eq!(silent.read(&mut [0]).await.expect("closed"), 0);
    }

    #[tokio::test]
    async fn who_waits_to_be_accepted_is_dealt_out_when_it_stops() {
        for grpc in [true, false] {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("an address");
            let mut clients = Vec::new();
            for _ in 0..8 {
                let mut client = TcpStream::connect(address).await.expect("connected");
                client.write_all(b"x").await.expect("sent");
                clients.push(client);
            }
            let (lane, mut accepted) = mpsc::channel(8);
            let counted = ConnectionMetrics { open: Gauge::noop(), refused: Counter::noop() };
            let (stop, _) = watch::channel(false);
            let gate = Gate { places: Places::new(8, counted), lanes: vec![lane], stop };
            let stopped = std::future::ready(());
            match grpc {
                true => accept_once_spoken(listener, gate, stopped).await,
                false => accept(listener, gate, stopped).await,
            }
            let mut dealt_out = 0;
            while accepted.recv().await.is_some() {
                dealt_out += 1;
            }
            assert_eq!(dealt_out, clients.len());
        }
    }
}
