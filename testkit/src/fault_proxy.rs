//! A TCP proxy that simulates network faults, which tests set and clear.

use std::future::pending;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};

/// A network fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No fault.
    Nothing,
    /// Adds this delay in each direction.
    Delay(Duration),
    /// Requests arrive; replies are held back until the fault is cleared.
    NoReplies,
    /// The server vanishes without closing: data is discarded, and open as well as new connections
    /// stay dead.
    HalfOpen,
    /// Sends half of each reply, then a reset.
    CutReplies,
    /// Limits the rate to this many bytes/s in each direction.
    RateLimit(u32),
    /// Resets open connections and refuses new ones.
    Refused,
    /// Accepts connections and resets them at once.
    ResetOnAccept,
}

/// Read size in bytes.
const CHUNK_BYTES: usize = 16 * 1024;

/// Chunks buffered per direction.
const MAX_CHUNKS: usize = 1024;

/// A proxy to one server on loopback; stops when dropped.
pub struct FaultProxy {
    address: SocketAddr,
    target: Arc<AtomicU16>,
    fault: watch::Sender<Fault>,
    accepted: Arc<AtomicU64>,
    // Stops the proxy when dropped.
    _alive: oneshot::Sender<()>,
}

impl FaultProxy {
    /// Starts a proxy on a free port for the server on port `target`.
    pub fn to(target: u16) -> Self {
        let (fault, faults) = watch::channel(Fault::Nothing);
        let (alive, ended) = oneshot::channel();
        let (target, accepted) = (Arc::new(AtomicU16::new(target)), Arc::default());
        let (targeted, counted) = (Arc::clone(&target), Arc::clone(&accepted));
        let (sender, address) = std::sync::mpsc::channel();
        thread::spawn(move || {
            super::runtime().block_on(async move {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
                let near = listener.local_addr().unwrap();
                sender.send(near).unwrap();
                tokio::select! {
                    () = serve(listener, near, &targeted, faults, &counted) => {}
                    _ = ended => {}
                }
            });
        });
        Self { address: address.recv().unwrap(), target, fault, accepted, _alive: alive }
    }

    /// Address of the proxy.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Store URL of the proxy.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Store URL of the proxy with a host name.
    pub fn url_with_host(&self, host: &str) -> String {
        format!("redis://{host}:{}", self.address.port())
    }

    /// Sets the port of the server for connections from now on.
    pub fn set_target(&self, target: u16) {
        self.target.store(target, Ordering::SeqCst);
    }

    /// Replaces the current fault.
    pub fn set(&self, fault: Fault) {
        self.fault.send_replace(fault);
    }

    /// Number of connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::SeqCst)
    }
}

async fn serve(
    listener: TcpListener,
    near: SocketAddr,
    target: &AtomicU16,
    mut faults: watch::Receiver<Fault>,
    accepted: &AtomicU64,
) {
    let mut listener = Some(listener);
    loop {
        let fault = *faults.borrow_and_update();
        if fault == Fault::Refused {
            listener = None;
        } else if listener.is_none() {
            listener = Some(TcpListener::bind(near).await.unwrap());
        }
        let next = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => pending().await,
            }
        };
        tokio::select! {
            taken = next => {
                let Ok((stream, _)) = taken else { continue };
                accepted.fetch_add(1, Ordering::SeqCst);
                if *faults.borrow() == Fault::ResetOnAccept {
                    reset(&stream);
                } else {
                    // Errors of a connection end only that connection.
                    let (target, faults) = (target.load(Ordering::SeqCst), faults.clone());
                    tokio::spawn(async move { drop(proxy(stream, target, faults).await) });
                }
            }
            changed = faults.changed() => if changed.is_err() { return },
        }
    }
}

/// Makes the peer see a reset when `stream` is dropped.
fn reset(stream: &TcpStream) {
    // Fails if the stream is closed already.
    let _ = stream.set_zero_linger();
}

/// The rate limit in bytes/s; `None` without one.
fn rate_limit(faults: &mut watch::Receiver<Fault>) -> Option<u32> {
    match *faults.borrow_and_update() {
        Fault::RateLimit(rate) => Some(rate),
        _ => None,
    }
}

/// How a proxied connection ends.
enum End {
    /// One side closed it.
    Closed,
    /// The node sees a reset.
    Reset,
    /// The node sees an open connection without traffic.
    Dead,
}

/// Proxies one connection until it ends.
async fn proxy(mut near: TcpStream, target: u16, faults: watch::Receiver<Fault>) -> io::Result<()> {
    let mut far = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let mut fault_watch = faults.clone();
    let ends_connection =
        |fault: &Fault| matches!(fault, Fault::HalfOpen | Fault::Refused | Fault::ResetOnAccept);
    let end = {
        let (from_near, to_near) = near.split();
        let (from_far, to_far) = far.split();
        tokio::select! {
            end = copy(from_near, to_far, faults.clone(), false) => end,
            end = copy(from_far, to_near, faults, true) => end,
            fault = fault_watch.wait_for(ends_connection) => match fault.as_deref() {
                Ok(Fault::HalfOpen) => End::Dead,
                _ => End::Reset,
            },
        }
    };
    match end {
        End::Closed => {}
        End::Reset => reset(&near),
        End::Dead => {
            drop(far);
            // Discards input until the node closes the connection.
            while near.read(&mut [0; 1024]).await? > 0 {}
        }
    }
    Ok(())
}

/// Copies one direction.
async fn copy(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut faults: watch::Receiver<Fault>,
    replies: bool,
) -> End {
    let (sender, mut chunks) = mpsc::channel(MAX_CHUNKS);
    let seen = faults.clone();
    let read = async move {
        let mut buffer = vec![0; CHUNK_BYTES];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            let delay = match *seen.borrow() {
                Fault::Delay(delay) => delay,
                _ => Duration::ZERO,
            };
            let chunk = (Instant::now() + delay, buffer[..count].to_vec());
            if sender.send(chunk).await.is_err() {
                break;
            }
        }
        // Delivers buffered data before the copy ends.
        drop(sender);
        pending::<()>().await;
    };
    let write = async move {
        while let Some((due, chunk)) = chunks.recv().await {
            sleep_until(due).await;
            if replies {
                // If the proxy was dropped, continues.
                let _ = faults.wait_for(|fault| *fault != Fault::NoReplies).await;
            }
            let mut rest = chunk.as_slice();
            while let Some(rate) = rate_limit(&mut faults)
                && let Some((first, others)) = rest.split_first()
            {
                if to.write_all(&[*first]).await.is_err() {
                    return End::Closed;
                }
                rest = others;
                // Ends early when the fault changes.
                let _ = timeout(Duration::from_secs(1) / rate, faults.changed()).await;
            }
            let cut = replies && *faults.borrow() == Fault::CutReplies;
            let whole = if cut { &rest[..rest.len() / 2] } else { rest };
            if to.write_all(whole).await.is_err() {
                return End::Closed;
            }
            if cut {
                return End::Reset;
            }
        }
        End::Closed
    };
    tokio::select! {
        () = read => End::Closed,
        end = write => end,
    }
}
