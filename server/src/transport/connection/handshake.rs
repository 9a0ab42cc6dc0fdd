//! The HTTP/2 handshake, and the limits that it sets for a connection.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use h2::server::{Builder, Connection};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use super::timeouts::Timeouts;

/// Handshake timeout while the node is stopping.
pub(in crate::transport) const STOPPING_HANDSHAKE: Duration = Duration::from_secs(1);

/// Concurrent streams per connection, as announced in SETTINGS. h2 refuses the streams that a
/// client opens above this before it has read the SETTINGS; client libraries retry them.
pub(super) const MAX_STREAMS: u32 = 200;

/// Streams that a client may reset before they are accepted: more than the reads of one turn can
/// contain. [`Allowance`](crate::transport::resets::Allowance) limits the rate of resets.
const MAX_PENDING_RESETS: usize = 1024;

/// Flow-control window in bytes, of each stream and of the connection. h2 buffers these bytes
/// outside of the node's budget. HTTP/2 allows no smaller window for a connection.
const FLOW_WINDOW: u32 = (64 << 10) - 1;

/// Bytes by which unread DATA frames may in total fall short of 256 bytes each: room for two small
/// frames per stream, because some clients end a request with a separate frame.
const DATA_FRAME_BUDGET: usize = 2 * 256 * MAX_STREAMS as usize;

/// Streams reset by the node that h2 remembers, and for how long. h2 ignores DATA for a remembered
/// stream. It counts DATA for a forgotten one as a client error, and closes the connection after
/// 1,024 of these.
const MAX_RESET_STREAMS: usize = MAX_STREAMS as usize;
const RESET_STREAM_DURATION: Duration = Duration::from_secs(5);

/// Maximum size of headers that h2 accepts, in bytes. h2 answers longer ones with a bare 431, which
/// gRPC libraries can't explain. Headers between `MAX_HEADER_BYTES` and this are refused with a
/// status text.
const MAX_H2_HEADER_BYTES: u32 = 64 << 10;

/// Maximum bytes of a response that are queued for sending.
const MAX_SEND_BUFFER: usize = 400 << 10;

/// Performs the HTTP/2 handshake; `None` if it fails or times out. A client that connects while the
/// node is stopping gets a GOAWAY.
pub(super) async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    timeouts: Timeouts,
    mut stop: impl Future<Output = ()> + Unpin,
) -> Option<Connection<S, Bytes>> {
    let mut builder = Builder::new();
    builder
        .initial_window_size(FLOW_WINDOW)
        .initial_connection_window_size(FLOW_WINDOW)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_H2_HEADER_BYTES)
        .max_send_buffer_size(MAX_SEND_BUFFER)
        .data_frame_budget(DATA_FRAME_BUDGET)
        .max_concurrent_reset_streams(MAX_RESET_STREAMS)
        .reset_stream_duration(RESET_STREAM_DURATION)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS);
    let mut handshake = pin!(timeout(timeouts.greeting, builder.handshake(stream)));
    tokio::select! {
        done = &mut handshake => done.ok()?.ok(),
        () = &mut stop => {
            let mut connection = timeout(STOPPING_HANDSHAKE, handshake).await.ok()?.ok()?.ok()?;
            connection.graceful_shutdown();
            Some(connection)
        }
    }
}
