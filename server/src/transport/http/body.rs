//! Reads a request's body to its end before the node responds, so that no response closes a
//! connection or resets a stream on which the client is still writing.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use bytes::{Bytes, BytesMut};
use http::Version;
use http_body_util::BodyExt as _;

use crate::transport::budget::{Account, HeldBytes};

/// Maximum bytes of a body that are read and discarded over HTTP/1.1. Beyond that, the response
/// closes the connection.
const MAX_DISCARDED_HTTP1: usize = 64 << 10;

/// The same over HTTP/2, where other requests share the connection: as much as any known client
/// sends before it reads an early response.
const MAX_DISCARDED_HTTP2: usize = 4 << 20;

/// Why a body was not read.
#[derive(Debug)]
pub(super) enum BodyError {
    /// Longer than this many bytes.
    TooLong(usize),
    TooSlow,
    Broken(axum::Error),
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(limit) => write!(f, "the body is longer than {limit} bytes"),
            Self::TooSlow => f.write_str("the request was not received completely in time"),
            Self::Broken(error) => write!(f, "the body can't be read: {error}"),
        }
    }
}

/// A body that was read, or discarded.
pub(super) struct ReadBody {
    pub(super) body: Result<Bytes, BodyError>,
    /// Counts the body's bytes in the connection's account until the request is done.
    pub(super) _held: HeldBytes,
    /// The whole body has arrived, so the connection can carry another request.
    pub(super) ended: bool,
}

impl ReadBody {
    /// An unread body.
    pub(super) fn nothing(account: &Arc<Account>) -> Self {
        Self { body: Ok(Bytes::new()), _held: account.count(0), ended: false }
    }
}

/// Bounds on reading a body.
#[derive(Clone, Copy)]
pub(super) struct ReadLimits {
    /// Maximum bytes kept; a longer body is discarded.
    pub(super) max_bytes: usize,
    /// Time for the whole body.
    pub(super) timeout: Duration,
    pub(super) version: Version,
}

/// Reads a body to its end, or until it exceeds `limits`. After each chunk, pauses while `account`
/// has no room; the chunk's bytes return to the client's flow-control window with the next read.
pub(super) async fn read(mut body: Body, limits: ReadLimits, account: &Arc<Account>) -> ReadBody {
    let mut held = account.count(0);
    let collecting = collect(&mut body, limits, account, &mut held);
    let collected = tokio::time::timeout(limits.timeout, collecting).await;
    let body = collected.unwrap_or(Err(ReadError { reason: BodyError::TooSlow, ended: false }));
    let ended = body.as_ref().map_or_else(|error| error.ended, |_| true);
    ReadBody { body: body.map_err(|error| error.reason), _held: held, ended }
}

struct ReadError {
    reason: BodyError,
    ended: bool,
}

async fn collect(
    body: &mut Body,
    limits: ReadLimits,
    account: &Account,
    held: &mut HeldBytes,
) -> Result<Bytes, ReadError> {
    let max_discarded =
        if limits.version == Version::HTTP_2 { MAX_DISCARDED_HTTP2 } else { MAX_DISCARDED_HTTP1 };
    let max_read = limits.max_bytes + max_discarded;
    if body.size_hint().lower() > max_read as u64 {
        return Err(ReadError { reason: BodyError::TooLong(limits.max_bytes), ended: false });
    }
    let (mut chunks, mut length) = (Chunks::default(), 0);
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| ReadError { reason: BodyError::Broken(error), ended: false })?;
        // Trailers are ignored.
        let Ok(data) = frame.into_data() else { continue };
        length += data.len();
        if length > max_read {
            return Err(ReadError { reason: BodyError::TooLong(limits.max_bytes), ended: false });
        }
        if length > limits.max_bytes {
            held.set(0);
            chunks = Chunks::default();
        } else {
            held.set(length);
            chunks.push(data);
        }
        if body.is_end_stream() {
            break;
        }
        account.wait_for_room().await;
    }
    match length > limits.max_bytes {
        true => Err(ReadError { reason: BodyError::TooLong(limits.max_bytes), ended: true }),
        false => Ok(chunks.joined()),
    }
}

/// The chunks of a body. Most bodies arrive as one chunk, which is not copied.
#[derive(Default)]
struct Chunks {
    /// The only chunk; empty once there are more.
    first: Bytes,
    /// All chunks, if there are several.
    all: BytesMut,
}

impl Chunks {
    fn push(&mut self, data: Bytes) {
        if self.first.is_empty() && self.all.is_empty() {
            self.first = data;
            return;
        }
        if self.all.is_empty() {
            self.all.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.all.extend_from_slice(&data);
    }

    fn joined(self) -> Bytes {
        if self.all.is_empty() { self.first } else { self.all.freeze() }
    }
}
