//! Connections to the servers of the store, over TCP, TLS or a Unix socket. This module opens the
//! stream, and the client library uses it. A connection fails if a reply is too long.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::future::select_ok;
use redis::aio::{AsyncStream, MultiplexedConnection};
use redis::{AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;

use super::login::Login;

/// The time limit for making a connection. Decisions do not wait that long: they have their own,
/// shorter deadline.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The time limit for making a connection for decisions, in decision timeouts. A server that is fast
/// enough for decisions answers at least this number of round trips in that time.
pub(crate) const CONNECT_ROUND_TRIPS: u32 = 4;

/// The maximum number of bytes to read between two writes, so that faulty replies can't use up the
/// memory. The longest proper reply is a list of 1000 ids of up to 1 KiB; one round trip may have
/// several. Small nested values take up to 40 times their size in memory.
pub(crate) const MAX_REPLY: usize = 4 << 20;

/// Login and TLS settings that are not in the URLs of the servers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Access {
    /// User and password from files; `None`: those in the URL.
    pub(crate) login: Option<Login>,
    /// The CA certificates and this node's certificate; `None` if no connection uses TLS.
    pub(crate) tls: Option<Arc<ClientConfig>>,
}

/// The address and URL settings of a server, with login and TLS settings.
#[derive(Clone)]
pub(crate) struct Address {
    pub(crate) server: ConnectionInfo,
    pub(crate) access: Access,
}

/// A connection that has logged in. Closed when dropped, even if replies are outstanding.
pub(crate) struct Connection {
    pub(crate) redis: MultiplexedConnection,
    /// The task that reads and writes the stream.
    driver: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Address {
    /// Connects and logs in. The current thread drives the connection. Fails with
    /// [`io::ErrorKind::TimedOut`] after 1 s.
    pub(crate) async fn connect(&self) -> Result<Connection, RedisError> {
        let late =
            |_| io::Error::new(io::ErrorKind::TimedOut, format!("after {CONNECT_TIMEOUT:?}"));
        tokio::time::timeout(CONNECT_TIMEOUT, self.access.connect(&self.server))
            .await
            .map_err(late)?
    }
}

impl Access {
    /// Connects to a server and logs in, without a time limit. The current thread drives the
    /// connection.
    pub(crate) async fn connect(&self, server: &ConnectionInfo) -> Result<Connection, RedisError> {
        let stream = Bounded { stream: self.stream(server.addr()).await?, read: 0 };
        let mut settings = server.redis_settings().clone();
        if let Some(login) = &self.login {
            let (user, password) = login.read().await?;
            settings = settings.set_username(user).set_password(password);
        }
        // The callers set time limits.
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let (redis, driver) =
            MultiplexedConnection::new_with_config(&settings, stream, config).await?;
        Ok(Connection { redis, driver: tokio::spawn(driver).abort_handle() })
    }

    /// Opens the stream to an address.
    async fn stream(&self, address: &ConnectionAddr) -> Result<Stream, RedisError> {
        Ok(match address {
            ConnectionAddr::Tcp(host, port) => Box::pin(tcp(host, *port).await?),
            ConnectionAddr::TcpTls { host, port, insecure: false, .. } => {
                let unusable = || invalid("TLS is not set up");
                let tls = self.tls.clone().ok_or_else(unusable)?;
                let name = ServerName::try_from(host.clone());
                let name = name.map_err(|_| invalid("no name that a certificate can have"))?;
                let stream = tcp(host, *port).await?;
                Box::pin(TlsConnector::from(tls).connect(name, stream).await?)
            }
            ConnectionAddr::TcpTls { .. } => {
                return Err(invalid(
                    "certificates of servers are always checked: leave #insecure out",
                ));
            }
            ConnectionAddr::Unix(path) => Box::pin(UnixStream::connect(path).await?),
            _ => return Err(invalid("an unknown kind of address")),
        })
    }
}

/// Connects to all addresses of a host at once, because some may be unreachable. Returns the first
/// connection that succeeds.
async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses = lookup_host((host, port)).await?;
    let attempts: Vec<_> = addresses.map(|address| Box::pin(TcpStream::connect(address))).collect();
    if attempts.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
    }
    let (stream, _) = select_ok(attempts).await?;
    // With Nagle's algorithm, a batch could wait for the acknowledgement of the previous one.
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn invalid(detail: &'static str) -> RedisError {
    RedisError::from((ErrorKind::InvalidClientConfig, detail))
}

type Stream = Pin<Box<dyn AsyncStream + Send + Sync>>;

/// A stream that fails when more than [`MAX_REPLY`] bytes are read between two writes.
struct Bounded<S> {
    stream: S,
    /// The bytes read since the last write.
    read: usize,
}

impl<S: AsyncRead + Unpin> AsyncRead for Bounded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        self.read += buffer.filled().len() - before;
        if self.read > MAX_REPLY {
            let text = format!("a reply of more than {MAX_REPLY} bytes");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, text)));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Bounded<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.read = 0;
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Makes connections to one server for requests that are not urgent, and keeps idle ones.
pub(crate) struct Spares {
    address: Address,
    idle: Mutex<Vec<Connection>>,
}

impl Spares {
    pub(crate) fn new(address: Address) -> Self {
        Self { address, idle: Mutex::default() }
    }

    /// Takes an idle connection, which may have been closed meanwhile.
    pub(crate) fn idle(&self) -> Option<Connection> {
        self.lock().pop()
    }

    /// Makes a new connection; see [`Address::connect`].
    pub(crate) async fn connect(&self) -> Result<Connection, RedisError> {
        self.address.connect().await
    }

    /// Keeps a connection for the next request. It must work, and have no outstanding reply.
    pub(crate) fn keep(&self, connection: Connection) {
        self.lock().push(connection);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn an_endless_reply_fails_and_long_ones_do_not() {
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let mut stream = Bounded { stream: near, read: 0 };
        let server = tokio::spawn(async move {
            let page = vec![b'x'; MAX_REPLY];
            for _ in 0..3 {
                far.read_u8().await.expect("asked");
                far.write_all(&page).await.expect("read");
            }
            // Ends when the other end is closed.
            while far.write_all(b"x").await.is_ok() {}
        });
        for _ in 0..3 {
            stream.write_u8(b'?').await.expect("asked");
            let mut page = vec![0; MAX_REPLY];
            stream.read_exact(&mut page).await.expect("a page");
        }
        let error = stream.read_u8().await.expect_err("one byte too many");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(stream);
        server.await.expect("the server ends");
    }

    /// The server sends one reply for as long as it is read.
    #[tokio::test]
    async fn a_request_with_an_endless_reply_fails() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("redis://{}", listener.local_addr().expect("bound"));
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            // The client library sends two commands when it connects.
            stream.write_all(b"+OK\r\n+OK\r\n$99999999999\r\n").await.expect("sent");
            let garbage = vec![b'x'; 1 << 16];
            while stream.write_all(&garbage).await.is_ok() {}
        });
        let server_info = redis::IntoConnectionInfo::into_connection_info(url).expect("a URL");
        let mut connection = Access::default().connect(&server_info).await.expect("connected");
        let reply = redis::cmd("PING").query_async::<redis::Value>(&mut connection.redis).await;
        let error = reply.expect_err("no reply");
        assert!(error.to_string().contains("a reply of more than"), "{error}");
        server.await.expect("the connection is closed");
    }
}
