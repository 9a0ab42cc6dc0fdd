//! The threads that serve gRPC, and how connections get to them.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use futures_util::future::FutureExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};

use super::{Error, stop_signal};
use crate::logging::Repeating;
use crate::store::Store;
use crate::tls::{Port, Room};
use crate::transport::door::Door;
use crate::transport::front::Front;
use crate::transport::load::{Place, Places};

/// How long a connection may take to its first byte.
const SILENCE: Duration = Duration::from_secs(10);

/// How many turns connections have between two looks for the input of others, where there are
/// always some that have more to do.
const TURNS: u32 = 8;

/// A connection that has sent something, and its place.
pub(super) type Accepted = (std::net::TcpStream, Place);

/// Accepts connections and deals them out in turn, each once it has sent something: until
/// then it can be closed, whereas a server waits for it to speak, also when it should stop.
/// One for which there is no place is closed at once: left to wait it would look to a load balancer
/// like one that is served, but slowly. Ends only with its caller.
pub(super) async fn accept(
    listener: TcpListener,
    places: Places,
    lanes: Vec<mpsc::Sender<Accepted>>,
) {
    let failures = Repeating::default();
    let (mut silent, mut lane) = (JoinSet::new(), 0);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted.and_then(|(stream, _)| {
                stream.set_nodelay(true)?;
                Ok(stream)
            }),
            Some(spoken) = silent.join_next() => {
                // What has failed before its first byte is nobody's request.
                if let Ok(Ok(stream)) = spoken {
                    // A thread that is gone takes no connections: dropping this one refuses it.
                    let _ = lanes[lane].send(stream).await;
                    lane = (lane + 1) % lanes.len();
                }
                continue;
            }
        };
        match accepted {
            Ok(stream) => {
                let Some(place) = places.take() else {
                    // Nothing is left of it, not even for the minute that ports are kept.
                    let _ = stream.set_zero_linger();
                    continue;
                };
                silent.spawn(async move {
                    tokio::time::timeout(SILENCE, stream.peek(&mut [0])).await??;
                    io::Result::Ok((stream.into_std()?, place))
                });
            }
            Err(error) => {
                if let Some(held_back) = failures.pass() {
                    tracing::warn!(
                        %error, held_back, advice = "raise the limit of open files (ulimit -n)",
                        "a connection could not be accepted"
                    );
                }
                // Mostly there are too many open files: trying again at once won't help.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

/// What a worker's receiver has heard.
pub(super) type Heard = Result<Result<(), Error>, oneshot::error::RecvError>;

/// The last word of a worker, if it had one.
pub(super) fn word(heard: Result<Heard, JoinError>) -> Option<Result<(), Error>> {
    heard.ok()?.ok()
}

/// Waits for a worker to end, which none does before it is told to.
pub(super) async fn ended_early(workers: &mut JoinSet<Heard>) -> Error {
    let first = workers.join_next().await;
    let result = first.and_then(word).unwrap_or(Err(Error::WorkerEnded));
    result.err().unwrap_or(Error::WorkerEnded)
}

fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().event_interval(TURNS).build()
}

/// One thread that serves gRPC.
pub(super) struct Worker {
    pub(super) accepted: mpsc::Receiver<Accepted>,
    pub(super) stopped: watch::Receiver<bool>,
    pub(super) door: Door,
}

impl Worker {
    /// Starts it; the receiver hears when it has ended.
    pub(super) fn start<S: Store>(
        self,
        number: usize,
        front: impl FnOnce() -> Result<Front<S>, Error> + Send + 'static,
    ) -> Result<oneshot::Receiver<Result<(), Error>>, Error> {
        let (done, ended) = oneshot::channel();
        let runtime = runtime().map_err(|error| Error::System("a runtime", error))?;
        thread::Builder::new()
            .name(format!("grpc-{number}"))
            .spawn(move || {
                // Nobody listens if the node has given up waiting.
                let _ = done.send(runtime.block_on(self.serve(front)));
            })
            .map_err(|error| Error::System("a thread", error))?;
        Ok(ended)
    }

    /// Serves until it is told to stop, and every request under way is answered.
    async fn serve<S: Store>(
        mut self,
        front: impl FnOnce() -> Result<Front<S>, Error>,
    ) -> Result<(), Error> {
        let front = Arc::new(front()?);
        let mut connections = JoinSet::new();
        let mut stopped = pin!(stop_signal(self.stopped.clone()));
        let (door, stop) = (self.door, || stop_signal(self.stopped.clone()));
        let begin = |connections: &mut JoinSet<()>, (accepted, place), room: Room| {
            // One that is broken already is nobody's request.
            let Ok(stream) = TcpStream::from_std(accepted) else { return };
            let (front, door) = (Arc::clone(&front), door.clone());
            let (going, stop) = (stop(), stop());
            connections.spawn(async move {
                let opened = tokio::select! {
                    // Without TLS it is in at once, also when it only comes to be sent away.
                    biased;
                    opened = door.open(stream, Port::Grpc, room) => opened,
                    // A stop waits for requests, not for handshakes.
                    () = going => None,
                };
                if let Some((stream, guard)) = opened {
                    front.serve(stream, stop, guard).await;
                }
                drop::<Place>(place);
            });
        };
        loop {
            let accepted = tokio::select! {
                Some(accepted) = self.accepted.recv() => accepted,
                Some(_) = connections.join_next() => continue,
                () = &mut stopped => break,
            };
            // Until there is, connections wait in the lane, and then to be accepted.
            let room = tokio::select! {
                biased;
                room = door.room(Port::Grpc) => room,
                () = &mut stopped => break,
            };
            begin(&mut connections, accepted, room);
        }
        // Those that were dealt already have sent something, and hear that they should go elsewhere.
        while let Ok(accepted) = self.accepted.try_recv() {
            let Some(room) = door.room(Port::Grpc).now_or_never() else { continue };
            begin(&mut connections, accepted, room);
        }
        while connections.join_next().await.is_some() {}
        Ok(())
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
    use crate::transport::connection::PATIENCE;
    use crate::transport::load::Load;

    fn front() -> Front<MemoryStore> {
        let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/limits.yaml");
        let metrics = Arc::new(Metrics::new());
        let limits = LiveLimits::load(limits.into(), Arc::clone(&metrics)).expect("limits");
        let shared = Shared::new(Arc::new(limits), None, Clock::system(), false, &metrics);
        let allow = AllowService::new(MemoryStore::new(), Arc::new(shared));
        let load = Load::new(1, metrics.shed("grpc"));
        Front::new(allow, metrics.rpc_duration("grpc"), Routes::default(), load, PATIENCE)
    }

    #[tokio::test]
    async fn a_worker_that_ends_is_noticed() {
        let (_stop, stopped) = watch::channel(false);
        let mut workers = JoinSet::new();
        let mut lanes = Vec::new();
        let mut start = |number, front: fn() -> Result<Front<MemoryStore>, Error>| {
            let (lane, accepted) = mpsc::channel(1);
            let worker = Worker { accepted, stopped: stopped.clone(), door: Door::default() };
            let ended = worker.start(number, front).expect("a thread");
            lanes.push(lane);
            ended
        };
        workers.spawn(start(0, || Ok(front())));
        workers.spawn(start(1, || Err(Error::Grpc("no routes".to_owned()))));
        assert_eq!(ended_early(&mut workers).await.to_string(), "no routes");
        workers.spawn(start(2, || panic!("as a test")));
        assert!(matches!(ended_early(&mut workers).await, Error::WorkerEnded));
        assert_eq!(workers.len(), 1, "the first goes on");
    }

    #[test]
    fn input_is_looked_for_after_a_few_turns_of_others() {
        let (mut sender, receiver) = std::os::unix::net::UnixStream::pair().expect("a pair");
        receiver.set_nonblocking(true).expect("as tokio wants it");
        runtime().expect("a runtime").block_on(async {
            let mut receiver = UnixStream::from_std(receiver).expect("registered");
            let turns = Arc::new(AtomicU32::new(0));
            let counted = Arc::clone(&turns);
            // It always has more to do.
            tokio::spawn(poll_fn(move |context| {
                counted.fetch_add(1, Ordering::Relaxed);
                context.waker().wake_by_ref();
                Poll::<()>::Pending
            }));
            for _ in 0..100 {
                let mut input = pin!(receiver.read_u8());
                assert!(input.as_mut().now_or_never().is_none(), "there is none yet");
                sender.write_all(&[7]).expect("sent");
                let before = turns.load(Ordering::Relaxed);
                assert_eq!(input.await.expect("received"), 7);
                let waited = turns.load(Ordering::Relaxed) - before;
                assert!(waited <= 10, "it has waited for {waited} turns of another");
            }
        });
    }
}
