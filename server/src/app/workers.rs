//! Worker threads, which serve connections: several for gRPC, one for HTTP.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use futures_util::future::FutureExt as _;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};

use super::accept::Accepted;
use super::{Error, stop_signal};
use crate::access::Guard;
use crate::store::Store;
use crate::tls::{Port, Room, Stream};
use crate::transport::door::Door;
use crate::transport::grpc_service::GrpcService;
use crate::transport::http_port::HttpPort;
use crate::transport::load::ConnectionSlot;

/// How long a TLS handshake may still take once the node is stopping.
const LAST_HANDSHAKE: Duration = Duration::from_secs(1);

/// Task polls between two I/O polls if tasks are always ready (tokio's `event_interval`).
const EVENT_INTERVAL: u32 = 8;

/// What the receiver of a worker returns when the thread ends.
pub(super) type WorkerExit = Result<Result<(), Error>, oneshot::error::RecvError>;

/// The result that a worker sent before it ended; `None` if it panicked.
pub(super) fn exit_result(exit: Result<WorkerExit, JoinError>) -> Option<Result<(), Error>> {
    exit.ok()?.ok()
}

/// Completes with an error when a worker ends before it was told to stop.
pub(super) async fn ended_early(workers: &mut JoinSet<WorkerExit>) -> Error {
    let first = workers.join_next().await;
    let result = first.and_then(exit_result).unwrap_or(Err(Error::WorkerEnded));
    result.err().unwrap_or(Error::WorkerEnded)
}

fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .event_interval(EVENT_INTERVAL)
        .build()
}

/// A thread that serves connections of one port.
pub(super) struct Worker {
    pub(super) port: Port,
    pub(super) accepted: mpsc::Receiver<Accepted>,
    pub(super) stopped: watch::Receiver<bool>,
    pub(super) door: Door,
}

impl Worker {
    /// Starts the thread; the receiver resolves when it ends. `open` creates the server on the new
    /// thread.
    pub(super) fn start<F>(
        self,
        name: String,
        open: impl FnOnce() -> Result<F, Error> + Send + 'static,
    ) -> Result<oneshot::Receiver<Result<(), Error>>, Error>
    where
        F: Server,
    {
        let (done, ended) = oneshot::channel();
        let runtime = runtime().map_err(|error| Error::System("a runtime", error))?;
        thread::Builder::new()
            .name(name)
            .spawn(move || {
                // Fails if the node no longer waits for its threads.
                let _ = done.send(runtime.block_on(self.serve(open)));
            })
            .map_err(|error| Error::System("a thread", error))?;
        Ok(ended)
    }

    /// Serves until it is told to stop and all open requests are answered.
    async fn serve<F: Server>(
        mut self,
        open: impl FnOnce() -> Result<F, Error>,
    ) -> Result<(), Error> {
        let server = open()?;
        let mut connections = JoinSet::new();
        let mut stopped = pin!(stop_signal(self.stopped.clone()));
        let (door, port) = (self.door, self.port);
        let spawn = |connections: &mut JoinSet<()>, (accepted, slot), room: Room| {
            // Fails if the connection is already broken.
            let Ok(stream) = TcpStream::from_std(accepted) else { return };
            let (server, door) = (server.clone(), door.clone());
            let (stopping, stop) = (stop_signal(self.stopped.clone()), self.stopped.clone());
            connections.spawn(async move {
                let mut opening = pin!(door.open(stream, port, room));
                let opened = tokio::select! {
                    // Without TLS this is ready at once, even while the node is stopping.
                    biased;
                    opened = &mut opening => opened,
                    // A stopping node waits for open requests, but only briefly for handshakes.
                    () = stopping => {
                        tokio::time::timeout(LAST_HANDSHAKE, opening).await.ok().flatten()
                    }
                };
                if let Some((stream, guard)) = opened {
                    server.serve(stream, guard, stop_signal(stop)).await;
                }
                drop::<ConnectionSlot>(slot);
            });
        };
        loop {
            let accepted = tokio::select! {
                Some(accepted) = self.accepted.recv() => accepted,
                Some(_) = connections.join_next() => continue,
                () = &mut stopped => break,
            };
            // Until a handshake may begin, connections wait in the channel, then in the backlog of
            // the listener.
            let room = tokio::select! {
                biased;
                room = door.room(port) => room,
                () = &mut stopped => break,
            };
            spawn(&mut connections, accepted, room);
        }
        // Connections that are still handed over are told to go away. The accept thread ends soon
        // and closes the channel.
        while let Some(accepted) = self.accepted.recv().await {
            let Some(room) = door.room(port).now_or_never() else { continue };
            spawn(&mut connections, accepted, room);
        }
        while connections.join_next().await.is_some() {}
        Ok(())
    }
}

/// Serves the connections of a port.
pub(super) trait Server: Clone + Send + 'static {
    /// Serves one connection until its client closes it, or until `stop` completes and all open
    /// requests are answered.
    fn serve(
        self,
        stream: Stream<TcpStream>,
        guard: Guard,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send;
}

impl<S: Store> Server for Arc<GrpcService<S>> {
    fn serve(
        self,
        stream: Stream<TcpStream>,
        guard: Guard,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send {
        let expires = stream.expires_in();
        GrpcService::serve(self, stream, stop, guard, expires)
    }
}

impl Server for HttpPort {
    fn serve(
        self,
        stream: Stream<TcpStream>,
        guard: Guard,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send {
        let expires = stream.expires_in();
        Self::serve(self, stream, guard, stop, expires)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Write as _;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Poll;

    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;
    use tonic::service::Routes;

    use super::*;
    use crate::metrics::Metrics;
    use crate::service::Shared;
    use crate::service::allow::AllowService;
    use crate::service::limits::LiveLimits;
    use crate::store::clock::Clock;
    use crate::store::memory::MemoryStore;
    use crate::transport::budget::Budget;
    use crate::transport::connection::DEFAULT_TIMEOUTS;
    use crate::transport::load::{Bounds, Load};

    fn grpc_service() -> GrpcService<MemoryStore> {
        let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/limits.yaml");
        let metrics = Arc::new(Metrics::new());
        let limits = LiveLimits::load(limits.into(), Arc::clone(&metrics)).expect("limits");
        let shared = Shared::new(Arc::new(limits), None, Clock::system(), false, &metrics);
        let allow = AllowService::new(MemoryStore::new(), Arc::new(shared));
        let (load, budget) = (Load::new(1, metrics.shed("grpc")), Budget::unlimited());
        let bounds = Bounds { load, timeouts: DEFAULT_TIMEOUTS, budget };
        GrpcService::new(allow, metrics.rpc_duration("grpc"), Routes::default(), bounds)
    }

    #[tokio::test]
    async fn a_worker_that_ends_early_is_reported() {
        let (_stop, stopped) = watch::channel(false);
        let mut workers = JoinSet::new();
        let mut senders = Vec::new();
        let mut start = |number, grpc_service: fn() -> Result<GrpcService<MemoryStore>, Error>| {
            let (sender, accepted) = mpsc::channel(1);
            let (stopped, door) = (stopped.clone(), Door::default());
            let worker = Worker { port: Port::Grpc, accepted, stopped, door };
            let name = format!("grpc-{number}");
            let ended = worker.start(name, move || grpc_service().map(Arc::new)).expect("a thread");
            senders.push(sender);
            ended
        };
        workers.spawn(start(0, || Ok(grpc_service())));
        workers.spawn(start(1, || Err(Error::Grpc("no routes".to_owned()))));
        assert_eq!(ended_early(&mut workers).await.to_string(), "no routes");
        workers.spawn(start(2, || panic!("as a test")));
        assert!(matches!(ended_early(&mut workers).await, Error::WorkerEnded));
        assert_eq!(workers.len(), 1, "the first continues");
    }

    #[test]
    fn input_is_looked_for_after_a_few_turns_of_others() {
        let (mut sender, receiver) = std::os::unix::net::UnixStream::pair().expect("a pair");
        receiver.set_nonblocking(true).expect("as tokio wants it");
        runtime().expect("a runtime").block_on(async {
            let mut receiver = UnixStream::from_std(receiver).expect("registered");
            let polls = Arc::new(AtomicU32::new(0));
            let counted = Arc::clone(&polls);
            // This task is always ready.
            tokio::spawn(poll_fn(move |context| {
                counted.fetch_add(1, Ordering::Relaxed);
                context.waker().wake_by_ref();
                Poll::<()>::Pending
            }));
            for _ in 0..100 {
                let mut input = pin!(receiver.read_u8());
                assert!(input.as_mut().now_or_never().is_none(), "no input yet");
                sender.write_all(&[7]).expect("sent");
                let before = polls.load(Ordering::Relaxed);
                assert_eq!(input.await.expect("received"), 7);
                let waited = polls.load(Ordering::Relaxed) - before;
                assert!(waited <= 10, "it waited for {waited} polls of another task");
            }
        });
    }
}
