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
use tokio::sync::watch;
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
        stream.set_read_timeout(Some(patience.keepalive + patience.answer));
        stream.set_write_timeout(Some(patience.answer));
        let (builder, router, stopped) = (Arc::clone(&builder), router.clone(), stopped.clone());
        connections.spawn(async move {
            serve_one(&builder, stream, router, asking, stopped).await;
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
        // Counts from the end of the request before, too.
        .header_read_timeout(patience.keepalive)
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
    mut stopped: watch::Receiver<bool>,
) {
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(asking.clone()));
        // It is always ready.
        router.clone().call(request)
    });
    let mut connection = pin!(builder.serve_connection(TokioIo::new(Box::pin(stream)), service));
    tokio::select! {
        // How a connection ends is its client's business.
        _ = &mut connection => return,
        // An error means that the sender is gone, which is a stop too.
        _ = stopped.wait_for(|stop| *stop) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}
