//! Worker threads, which serve connections: several for gRPC, one for HTTP.

use std::future::Future;
use std::net::IpAddr;
use std::pin::pin;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::Error;
use super::accept::{Accepted, PortWorkers};
use super::thread::{self, stop_signal};
use crate::access::Guard;
use crate::tls::{Port, Stream};
use crate::transport::overload::{ConnectionSlot, ConnectionSlots};
use crate::transport::port_security::PortSecurity;

/// Capacity of the channel of accepted connections to each serving thread.
const ACCEPT_QUEUE: usize = 128;

/// How long a TLS handshake may still take once the node is stopping.
const LAST_HANDSHAKE: Duration = Duration::from_secs(1);

/// The worker threads of a node. Each item resolves with the result of a thread when it ends.
#[derive(Default)]
pub(super) struct Workers(FuturesUnordered<oneshot::Receiver<Result<(), Error>>>);

impl Workers {
    /// Starts the threads of a port. Each has a name, and a function that creates its server: what
    /// serves a connection until its client closes it, or until it is told to stop and all open
    /// requests are answered.
    pub(super) fn start<O, S, F>(
        &mut self,
        port: Port,
        security: &PortSecurity,
        slots: ConnectionSlots,
        threads: impl IntoIterator<Item = (String, O)>,
    ) -> Result<PortWorkers, Error>
    where
        O: FnOnce() -> Result<S, Error> + Send + 'static,
        S: FnOnce(Opened) -> F + Clone + Send + 'static,
        F: Future<Output = ()> + Send,
    {
        let (stop, stopped) = watch::channel(false);
        let mut senders = Vec::new();
        for (name, open) in threads {
            let (sender, accepted) = mpsc::channel(ACCEPT_QUEUE);
            let worker =
                Worker { port, accepted, stopped: stopped.clone(), security: security.clone() };
            self.0.push(thread::start(name, async move || worker.serve(open()?).await)?);
            senders.push(sender);
        }
        Ok(PortWorkers { slots, senders, stop })
    }

    /// Completes with an error when a worker ends before it was told to stop.
    pub(super) async fn ended_early(&mut self) -> Error {
        match self.0.next().await {
            Some(Ok(Err(error))) => error,
            _ => Error::WorkerEnded,
        }
    }

    /// Waits until all workers have ended.
    pub(super) async fn ended(&mut self) -> Result<(), Error> {
        let mut result = Ok(());
        while let Some(ended) = self.0.next().await {
            // A thread without a result has panicked, which the panic message shows.
            result = result.and(ended.unwrap_or(Err(Error::WorkerEnded)));
        }
        result
    }
}

/// A connection whose requests may be read.
pub(super) struct Opened {
    pub(super) stream: Stream<TcpStream>,
    pub(super) guard: Guard,
    /// The address of the client.
    pub(super) peer: IpAddr,
    /// The time until the client's certificate expires.
    pub(super) expires: Option<Duration>,
    /// `true` when the node stops.
    pub(super) stopped: watch::Receiver<bool>,
}

/// A thread that serves connections of one port.
struct Worker {
    port: Port,
    accepted: mpsc::Receiver<Accepted>,
    stopped: watch::Receiver<bool>,
    security: PortSecurity,
}

impl Worker {
    /// Serves until it is told to stop and all open requests are answered.
    async fn serve<S, F>(mut self, server: S) -> Result<(), Error>
    where
        S: FnOnce(Opened) -> F + Clone + Send + 'static,
        F: Future<Output = ()> + Send,
    {
        let mut connections = JoinSet::new();
        let mut stopped = pin!(stop_signal(self.stopped.clone()));
        let (security, port) = (self.security, self.port);
        let spawn = |connections: &mut JoinSet<()>, (accepted, slot)| {
            // Fails if the connection is already broken.
            let Ok(stream) = TcpStream::from_std(accepted) else { return };
            let (server, security) = (server.clone(), security.clone());
            let stopped = self.stopped.clone();
            connections.spawn(async move {
                serve_connection(stream, port, &security, server, stopped).await;
                drop::<ConnectionSlot>(slot);
            });
        };
        loop {
            tokio::select! {
                Some(accepted) = self.accepted.recv() => spawn(&mut connections, accepted),
                Some(_) = connections.join_next() => {}
                () = &mut stopped => break,
            }
        }
        // Connections that are still handed over are told to go away. The accept thread ends soon
        // and closes the channel.
        while let Some(accepted) = self.accepted.recv().await {
            spawn(&mut connections, accepted);
        }
        while connections.join_next().await.is_some() {}
        Ok(())
    }
}

/// Makes the handshake of a connection, and serves it with `server`.
async fn serve_connection<S, F>(
    stream: TcpStream,
    port: Port,
    security: &PortSecurity,
    server: S,
    stopped: watch::Receiver<bool>,
) where
    S: FnOnce(Opened) -> F,
    F: Future<Output = ()>,
{
    // Fails if the connection is already broken.
    let Ok(peer) = stream.peer_addr() else { return };
    let mut handshake = pin!(security.handshake(stream, port));
    let opened = tokio::select! {
        // Without TLS this is ready at once, even while the node is stopping.
        biased;
        opened = &mut handshake => opened,
        // A stopping node waits for open requests, but only briefly for handshakes.
        () = stop_signal(stopped.clone()) => {
            tokio::time::timeout(LAST_HANDSHAKE, handshake).await.ok().flatten()
        }
    };
    if let Some((stream, guard)) = opened {
        let expires = stream.expires_in();
        server(Opened { stream, guard, peer: peer.ip(), expires, stopped }).await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::{Ready, ready};

    use super::*;
    use crate::metrics::{ConnectionMetrics, Metrics};

    type Server = fn(Opened) -> Ready<()>;

    #[tokio::test]
    async fn a_worker_that_ends_early_is_reported() {
        let (metrics, security) = (Metrics::new(), PortSecurity::default());
        let mut workers = Workers::default();
        let mut ports = Vec::new();
        let mut start = |workers: &mut Workers, open: fn() -> Result<Server, Error>| {
            let slots = ConnectionSlots::new(1, ConnectionMetrics::new(&metrics, "grpc"));
            let threads = [("grpc".to_owned(), open)];
            ports.push(workers.start(Port::Grpc, &security, slots, threads).expect("a thread"));
        };
        start(&mut workers, || Ok(|_| ready(())));
        start(&mut workers, || Err(Error::Grpc("no routes".to_owned())));
        assert_eq!(workers.ended_early().await.to_string(), "no routes");
        start(&mut workers, || panic!("as a test"));
        assert!(matches!(workers.ended_early().await, Error::WorkerEnded));
        assert_eq!(workers.0.len(), 1, "the first continues");
    }
}
