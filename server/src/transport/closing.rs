//! The end of a connection. To close a socket of which bytes are unread sends a reset, and a client
//! that hears of it before it has read its last answer may lose that (RFC 9112, 9.6). HTTP/2
//! clients always send something on their own, such as updates of windows.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::timeout;

/// Reads a stream, the writing half of which is closed, until its client closes the other half: for
/// `longest` at most, and no longer than the client is silent for `silence`.
pub(super) async fn read_to_end(
    mut stream: impl AsyncRead + Unpin,
    silence: Duration,
    longest: Duration,
) {
    let mut dropped = vec![0; 8 << 10];
    let reading =
        async { while let Ok(Ok(1..)) = timeout(silence, stream.read(&mut dropped)).await {} };
    let _ = timeout(longest, reading).await;
}
