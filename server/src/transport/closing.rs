//! Closes connections without a TCP reset. Closing a socket that has unread bytes sends a reset,
//! and a client that gets it before it has read its last answer may lose that answer (RFC 9112,
//! 9.6). HTTP/2 clients always send frames of their own, such as WINDOW_UPDATE.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::timeout;

use super::read_budget::READ_BYTES;

/// Reads and discards the bytes of `stream`, whose write half is closed, until the client closes
/// its half, is silent for `silence`, or has taken `total`.
pub(super) async fn read_to_end(
    mut stream: impl AsyncRead + Unpin,
    silence: Duration,
    total: Duration,
) {
    let mut discarded = vec![0; READ_BYTES];
    let reading =
        async { while let Ok(Ok(1..)) = timeout(silence, stream.read(&mut discarded)).await {} };
    let _ = timeout(total, reading).await;
}
