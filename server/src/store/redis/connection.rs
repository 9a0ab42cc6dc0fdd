//! A connection to one server of the store: over TCP, TLS or a Unix socket, by the client library
//! once it stands. It breaks where the server replies without end.

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

/// How long making a connection may take. Decisions don't wait for it: they have their own,
/// shorter deadline.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum size of the replies to what was sent in one go, in bytes. The longest real reply is
/// a list of 1000 ids of up to 1 KiB; one batch may ask for several. Small nested values take up to
/// 40 times their size in memory.
const LONGEST_REPLY: usize = 4 << 20;

/// How servers are connected to, beside what their URLs say.
#[derive(Clone, Debug, Default)]
pub(super) struct Access {
    /// Who logs in; `None`: as the URL says.
    pub(super) login: Option<Login>,
    /// Whom to trust and what to show; `None`: no server is asked over TLS.
    pub(super) tls: Option<Arc<ClientConfig>>,
}

/// One server, and how it is connected to.
#[derive(Clone)]
pub(super) struct Address {
    pub(super) server: ConnectionInfo,
    pub(super) access: Access,
}

/// A connection that has logged in. It is closed when it is dropped, also if a reply has not come
/// yet.
pub(super) struct Connection {
    pub(super) redis: MultiplexedConnection,
    /// Reads and writes it.
    driver: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Address {
    /// Connects and logs in, on the current runtime; a connection that takes longer than a second
    /// is given up with [`io::ErrorKind::TimedOut`].
    pub(super) async fn connect(&self) -> Result<Connection, RedisError> {
        let late =
            |_| io::Error::new(io::ErrorKind::TimedOut, format!("after {CONNECT_TIMEOUT:?}"));
        tokio::time::timeout(CONNECT_TIMEOUT, self.access.connect(&self.server))
            .await
            .map_err(late)?
    }
}

impl Access {
    /// Connects to a server and logs in, on the current runtime, for as long as that takes.
    pub(super) async fn connect(&self, server: &ConnectionInfo) -> Result<Connection, RedisError> {
        let stream = Bounded { stream: self.stream(server.addr()).await?, replied: 0 };
        let mut settings = server.redis_settings().clone();
        if let Some(login) = &self.login {
            let (user, password) = login.read().await?;
            settings = settings.set_username(user).set_password(password);
        }
        // Deadlines are the caller's.
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let (redis, driver) =
            MultiplexedConnection::new_with_config(&settings, stream, config).await?;
        Ok(Connection { redis, driver: tokio::spawn(driver).abort_handle() })
    }

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

/// A host may have several addresses, of which some lead nowhere.
async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses = lookup_host((host, port)).await?;
    let attempts: Vec<_> = addresses.map(|address| Box::pin(TcpStream::connect(address))).collect();
    if attempts.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
    }
    let (stream, _) = select_ok(attempts).await?;
    // A batch must not wait for the acknowledgement of the one before.
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn invalid(what: &'static str) -> RedisError {
    RedisError::from((ErrorKind::InvalidClientConfig, what))
}

type Stream = Pin<Box<dyn AsyncStream + Send + Sync>>;

/// A stream of which no more can be read than [`LONGEST_REPLY`] until something is sent again.
struct Bounded<S> {
    stream: S,
    /// Bytes that have come since something was sent.
    replied: usize,
}

impl<S: AsyncRead + Unpin> AsyncRead for Bounded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        self.replied += buffer.filled().len() - before;
        if self.replied > LONGEST_REPLY {
            let text = format!("a reply of more than {LONGEST_REPLY} bytes");
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
        self.replied = 0;
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Connections to one server for what is not urgent. They are kept from one question to the next.
pub(super) struct Spares {
    address: Address,
    idle: Mutex<Vec<Connection>>,
}

impl Spares {
    pub(super) fn new(address: Address) -> Self {
        Self { address, idle: Mutex::default() }
    }

    /// One that idles, which may have died of it.
    pub(super) fn idle(&self) -> Option<Connection> {
        self.lock().pop()
    }

    pub(super) async fn connect(&self) -> Result<Connection, RedisError> {
        self.address.connect().await
    }

    /// Keeps one that works, and waits for no reply.
    pub(super) fn keep(&self, connection: Connection) {
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
    async fn a_reply_without_end_is_given_up_and_long_ones_are_not() {
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let mut stream = Bounded { stream: near, replied: 0 };
        let server = tokio::spawn(async move {
            let page = vec![b'x'; LONGEST_REPLY];
            for _ in 0..3 {
                far.read_u8().await.expect("asked");
                far.write_all(&page).await.expect("read");
            }
            // It breaks when there is nobody who reads.
            while far.write_all(b"x").await.is_ok() {}
        });
        for _ in 0..3 {
            stream.write_u8(b'?').await.expect("asked");
            let mut page = vec![0; LONGEST_REPLY];
            stream.read_exact(&mut page).await.expect("a page");
        }
        let error = stream.read_u8().await.expect_err("more than was asked for");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(stream);
        server.await.expect("it ends");
    }

    /// Nothing else would break it: the reply goes on for as long as it is read.
    #[tokio::test]
    async fn who_waits_for_a_reply_without_end_hears_of_it() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("redis://{}", listener.local_addr().expect("bound"));
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            // The library says first who it is, in two commands.
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
