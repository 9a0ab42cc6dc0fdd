//! How the body of a request is read: to its end before anything is answered, so that no answer
//! closes a connection or resets a stream on which the client still writes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use bytes::{Bytes, BytesMut};
use http::Version;
use http_body_util::BodyExt as _;

use crate::transport::budget::{Account, Held};

/// How many bytes are read that nobody wants. HTTP/1.1 can close the connection instead, after an
/// answer that says so.
const DROPPED_HTTP1: usize = 64 << 10;

/// The same over HTTP/2, where other requests share the connection: all that any known client
/// sends before it looks at an early answer.
const DROPPED_HTTP2: usize = 4 << 20;

/// Why there is no body.
#[derive(Debug)]
pub(super) enum Fault {
    TooLong,
    TooSlow,
    Broken(axum::Error),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong => write!(f, "the body is longer than {} bytes", super::BODY_LIMIT),
            Self::TooSlow => f.write_str("the request does not end"),
            Self::Broken(error) => write!(f, "the body can't be read: {error}"),
        }
    }
}

/// What came of reading a body.
pub(super) struct Read {
    pub(super) body: Result<Bytes, Fault>,
    /// Counts the bytes of the body for as long as the request is under way.
    pub(super) _held: Held,
    /// All of it has come: the connection can take another request.
    pub(super) ended: bool,
}

impl Read {
    /// Of a body that is not read at all.
    pub(super) fn nothing(account: &Arc<Account>) -> Self {
        Self { body: Ok(Bytes::new()), _held: account.hold(0), ended: false }
    }
}

/// How a body is read.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    /// The most bytes that are kept; a longer body is dropped.
    pub(super) kept: usize,
    /// How long it may take.
    pub(super) within: Duration,
    pub(super) version: Version,
}

/// Reads a body to its end, or until it is longer or slower than `terms` allow.
/// Reading waits while `account` has no room.
pub(super) async fn read(mut body: Body, terms: Terms, account: &Arc<Account>) -> Read {
    let mut held = account.hold(0);
    let gathering = gather(&mut body, terms, account, &mut held);
    let gathered = tokio::time::timeout(terms.within, gathering).await;
    let body = gathered.unwrap_or(Err(Stopped { fault: Fault::TooSlow, ended: false }));
    let ended = body.as_ref().map_or_else(|stopped| stopped.ended, |_| true);
    Read { body: body.map_err(|stopped| stopped.fault), _held: held, ended }
}

struct Stopped {
    fault: Fault,
    ended: bool,
}

async fn gather(
    body: &mut Body,
    terms: Terms,
    account: &Account,
    held: &mut Held,
) -> Result<Bytes, Stopped> {
    let dropped = if terms.version == Version::HTTP_2 { DROPPED_HTTP2 } else { DROPPED_HTTP1 };
    let longest = terms.kept + dropped;
    if body.size_hint().lower() > longest as u64 {
        return Err(Stopped { fault: Fault::TooLong, ended: false });
    }
    let (mut first, mut all, mut length) = (Bytes::new(), BytesMut::new(), 0);
    loop {
        account.room().await;
        let Some(frame) = body.frame().await else { break };
        let frame = frame.map_err(|error| Stopped { fault: Fault::Broken(error), ended: false })?;
        // Trailers say nothing that is of use here.
        let Ok(data) = frame.into_data() else { continue };
        let before = length;
        length += data.len();
        if length > longest {
            return Err(Stopped { fault: Fault::TooLong, ended: false });
        }
        held.set(if length > terms.kept { 0 } else { length });
        if length > terms.kept {
            (first, all) = (Bytes::new(), BytesMut::new());
        } else if before == 0 {
            // Most bodies come in one piece, which need not be copied.
            first = data;
        } else {
            if all.is_empty() {
                all.extend_from_slice(&std::mem::take(&mut first));
            }
            all.extend_from_slice(&data);
        }
    }
    match length > terms.kept {
        true => Err(Stopped { fault: Fault::TooLong, ended: true }),
        false if all.is_empty() => Ok(first),
        false => Ok(all.freeze()),
    }
}
