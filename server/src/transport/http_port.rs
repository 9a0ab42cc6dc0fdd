//! How the HTTP port's connections are served: no more of them than there are places for, and
//! none for as long as its client likes.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::serve::Listener as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_io_timeout::TimeoutStream;
use tower_service::Service as _;

use super::connection::{HEADERS, Patience, STREAMS};
use super::door::{Asking, HttpListener};
use super::load::Places;
use crate::tls::Stream;

/// The most bytes that were read and not taken yet, and so of a request's headers.
const BUFFER: usize = 64 << 10;

/// Serves what comes in until `stop` completes and every request under way is answered.
pub async fn serve(
    mut listener: HttpListener,
    router: Router,
    places: Places,
    patience: Patience,
    stop: impl Future<Output = ()>,
) {
    let builder = Arc::new(builder(patience));
    let (stopping, stopped) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut stop = pin!(stop);
    loop {
        let (stream, asking) = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            () = &mut stop => break,
        };
        // Closed at once.
        let Some(place) = places.take() else { continue };
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(patience.answer));
        let (builder, router, stopped) = (Arc::clone(&builder), router.clone(), stopped.clone());
        connections.spawn(async move {
            serve_one(&builder, stream, router, asking, patience, stopped).await;
            drop(place);
        });
    }
    drop(listener);
    stopping.send_replace(true);
    while connections.join_next().await.is_some() {}
}

fn builder(patience: Patience) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        // Counts from the end of the answer before. While there is none, nobody is silent.
        .header_read_timeout(patience.idle)
        .max_buf_size(BUFFER);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(patience.keepalive)
        .keep_alive_timeout(patience.answer)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEADERS);
    builder
}

async fn serve_one(
    builder: &Builder<TokioExecutor>,
    stream: TimeoutStream<Stream<TcpStream>>,
    router: Router,
    asking: Asking,
    patience: Patience,
    mut stopped: watch::Receiver<bool>,
) {
    let spoken = Arc::new(Notify::new());
    let heard = Arc::clone(&spoken);
    let service = service_fn(move |mut request: Request<Incoming>| {
        heard.notify_one();
        request.extensions_mut().insert(ConnectInfo(asking.clone()));
        // It is always ready.
        router.clone().call(request)
    });
    let silent = async {
        let words = patience.greeting.min(patience.idle);
        if tokio::time::timeout(words, spoken.notified()).await.is_ok() {
            std::future::pending::<()>().await;
        }
    };
    let mut connection = pin!(builder.serve_connection(TokioIo::new(Box::pin(stream)), service));
    tokio::select! {
        // How a connection ends is its client's business.
        _ = &mut connection => return,
        // It has not asked for anything.
        () = silent => return,
        // An error means that the sender is gone, which is a stop too.
        _ = stopped.wait_for(|stop| *stop) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::{Duration, Instant};

    use axum::routing::get;
    use metrics::{Counter, Gauge};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::metrics::ConnectionMetrics;
    use crate::transport::connection::PATIENCE;
    use crate::transport::door::Door;

    const ASK: &[u8] = b"GET /slow HTTP/1.1\r\nhost: node\r\n\r\n";

    /// A port whose one page takes so long.
    async fn port(patience: Patience, takes: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let page = get(async move || {
            sleep(takes).await;
            "there it is"
        });
        let metrics = ConnectionMetrics { open: Gauge::noop(), refused: Counter::noop() };
        let listener = HttpListener::new(listener, Door::default());
        let router = Router::new().route("/slow", page);
        let places = Places::new(100, metrics);
        tokio::spawn(serve(listener, router, places, patience, std::future::pending()));
        address
    }

    /// Asks, and gets an answer.
    async fn ask(stream: &mut TcpStream) {
        stream.write_all(ASK).await.expect("sent");
        let mut answer = Vec::new();
        while !answer.ends_with(b"there it is") {
            let count = timeout(Duration::from_secs(10), stream.read_buf(&mut answer)).await;
            assert_ne!(count.expect("in time").expect("an answer"), 0, "closed instead");
        }
    }

    /// Waits until the connection is closed; tells how long that took.
    async fn closed(stream: &mut TcpStream) -> Duration {
        let started = Instant::now();
        let mut rest = Vec::new();
        let end = timeout(Duration::from_secs(10), stream.read_to_end(&mut rest));
        // A reset is an end, too.
        let _ = end.await.expect("it is closed");
        started.elapsed()
    }

    #[tokio::test]
    async fn who_waits_for_an_answer_is_not_silent() {
        let ms = Duration::from_millis;
        let brief = Patience { greeting: ms(100), keepalive: ms(20), answer: ms(50), ..PATIENCE };
        let node = port(Patience { idle: ms(200), ..brief }, ms(500)).await;
        let mut stream = TcpStream::connect(node).await.expect("a connection");
        ask(&mut stream).await;
        assert!(closed(&mut stream).await >= ms(150), "it is idle only from then on");
    }

    #[tokio::test]
    async fn an_idle_connection_is_kept_for_longer_than_pings_would_be_waited_for() {
        let ms = Duration::from_millis;
        let brief = Patience { greeting: ms(100), keepalive: ms(20), answer: ms(50), ..PATIENCE };
        let node = port(brief, ms(0)).await;
        let mut stream = TcpStream::connect(node).await.expect("a connection");
        ask(&mut stream).await;
        sleep(ms(300)).await;
        ask(&mut stream).await;
    }

    #[tokio::test]
    async fn first_words_are_not_waited_for_for_long() {
        let node =
            port(Patience { greeting: Duration::from_millis(100), ..PATIENCE }, Duration::ZERO);
        let node = node.await;
        let mut begun = Vec::new();
        for words in ["", "P", "PRI * HTTP/2.0\r\n", "GET /slow HTTP/1.1\r\nhost"] {
            let mut stream = TcpStream::connect(node).await.expect("a connection");
            stream.write_all(words.as_bytes()).await.expect("sent");
            begun.push(stream);
        }
        for stream in &mut begun {
            closed(stream).await;
        }
    }
}
