//! Reads the messages of gRPC calls completely, before anything is decided.

use std::io::Read as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use flate2::bufread::GzDecoder;
use futures_util::future::FutureExt as _;
use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::Status;

use super::super::budget::{Account, HeldBytes};
use super::super::connection::RequestBody;
use super::super::messages::PREFIX;

/// Maximum bytes of a request to `Allow`: the default of all gRPC libraries.
const MAX_ALLOW_BYTES: usize = 4 << 20;

/// How many bytes of a refused request are read, and for how long. Closing a stream before the
/// request has ended takes a RST_STREAM, and h2 closes a connection that needs many of those.
const MAX_DRAINED_BYTES: usize = 64 << 10;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Limits for reading a message.
#[derive(Clone, Copy)]
pub(super) struct MessageLimits {
    /// Longer messages are refused, by their length on the wire.
    pub(super) max_bytes: usize,
    /// Longer messages are read, but their bytes are dropped. For a compressed message this applies
    /// before and after decompression.
    kept_bytes: usize,
    /// Time from the first frame to the end of the message.
    pub(super) timeout: Duration,
    /// Whether the message is accepted once it is complete, although the client leaves its side of
    /// the stream open.
    accepts_open_stream: bool,
}

impl MessageLimits {
    /// `Allow`: keeps many times the bytes of the longest names, with room for unknown fields.
    pub(super) const ALLOW: Self = Self {
        max_bytes: MAX_ALLOW_BYTES,
        kept_bytes: 8 << 10,
        timeout: Duration::from_secs(10),
        accepts_open_stream: false,
    };

    /// `doorman.Capacity`: more than a request with the maximum number of resources takes, if their
    /// names have 60 characters.
    pub(super) const LEASES: Self = Self {
        max_bytes: 1 << 20,
        kept_bytes: 1 << 20,
        timeout: Duration::from_secs(10),
        accepts_open_stream: false,
    };

    /// Requests for hits or about holds, and settlements: keeps many times the bytes of the longest names, with room for
    /// unknown fields.
    pub(super) const TENANTS: Self =
        Self { max_bytes: 16 << 10, kept_bytes: 16 << 10, ..Self::ALLOW };

    /// Descriptors: several times the headers that Envoy accepts of a request, which may be in them. A refusal
    /// because of the length would be no limit at all where Envoy lets requests pass after errors.
    pub(super) const RATE_LIMIT: Self =
        Self { max_bytes: 512 << 10, kept_bytes: 512 << 10, ..Self::ALLOW };

    /// Renewals of sessions: twice what as many as are allowed take, with the longest names.
    pub(super) const KEEP_ALIVE: Self =
        Self { max_bytes: 256 << 10, kept_bytes: 256 << 10, ..Self::ALLOW };

    /// Health and reflection, which need few rights or none.
    pub(super) const SMALL: Self = Self {
        max_bytes: 1 << 10,
        kept_bytes: 1 << 10,
        timeout: Duration::from_secs(2),
        accepts_open_stream: false,
    };

    /// `Watch`, which is answered until the stream ends.
    pub(super) const WATCH: Self = Self { accepts_open_stream: true, ..Self::SMALL };
}

/// The one message of a unary call, with its gRPC prefix, if it has arrived in one frame, as it
/// nearly always has. It is not copied. `None` if more has to be read.
pub(super) fn ready_message(body: &mut RequestBody) -> Option<Bytes> {
    match body.data().now_or_never()? {
        Some(Ok(data)) if body.is_over() => {
            body.release();
            Some(data)
        }
        Some(Ok(data)) => {
            body.put_back(data);
            None
        }
        // `read_message` gets the error again.
        Some(Err(_)) => None,
        None => Some(Bytes::new()),
    }
}

/// Reads the one message of a unary call: decompressed, with its gRPC prefix. A message longer than
/// the `kept_bytes` limit becomes an empty one. A message that has not arrived completely takes one
/// slot of `unfinished`, if given.
pub(super) async fn read_message(
    body: &mut RequestBody,
    gzip: bool,
    limits: MessageLimits,
    account: &Arc<Account>,
    unfinished: Option<&Semaphore>,
) -> Result<(Bytes, HeldBytes), Status> {
    let mut held = account.count(0);
    let message = match ready_message(body) {
        Some(message) => message,
        None => {
            let _slot = unfinished.map(unfinished_slot).transpose()?;
            let message = read_frames(body, limits, account, &mut held);
            tokio::time::timeout(limits.timeout, message).await.map_err(|_| too_slow())??
        }
    };
    if message_length(&message).is_some_and(|length| length > limits.max_bytes) {
        return Err(too_long(limits.max_bytes));
    }
    let message = match message.len() > PREFIX + limits.kept_bytes {
        true => Bytes::from_static(&[0; PREFIX]),
        false => decompressed(message, gzip, limits)?,
    };
    held.set(message.len());
    Ok((message, held))
}

/// Takes a slot for an unfinished message. A caller that finds none is refused: waiting would leave
/// bytes unread, which hold up the other calls of the connection.
pub(super) fn unfinished_slot(unfinished: &Semaphore) -> Result<SemaphorePermit<'_>, Status> {
    unfinished.try_acquire().map_err(|_| {
        Status::resource_exhausted("too many messages on this connection have not ended")
    })
}

fn too_slow() -> Status {
    Status::deadline_exceeded("the request was not received completely in time")
}

async fn read_frames(
    body: &mut RequestBody,
    limits: MessageLimits,
    account: &Arc<Account>,
    held: &mut HeldBytes,
) -> Result<Bytes, Status> {
    let (mut buffer, mut length) = (BytesMut::new(), 0);
    while let Some(data) = body.data().await {
        // The client has closed the stream.
        let data = data.map_err(|error| Status::cancelled(error.to_string()))?;
        length += data.len();
        // The prefix is kept even of a message whose bytes are dropped.
        let room = (PREFIX + limits.kept_bytes + 1).saturating_sub(buffer.len());
        buffer.extend_from_slice(&data[..room.min(data.len())]);
        held.set(buffer.capacity());
        if let Some(expected) = message_length(&buffer)
            && expected > limits.max_bytes
        {
            return Err(too_long(limits.max_bytes));
        }
        if length > PREFIX + limits.max_bytes {
            return Err(multiple_messages());
        }
        drop(data);
        if limits.accepts_open_stream
            && message_length(&buffer).is_some_and(|expected| expected + PREFIX == length)
        {
            body.release();
            break;
        }
        account.wait_for_room().await;
        body.release();
    }
    if length > buffer.len()
        && message_length(&buffer).is_some_and(|expected| expected + PREFIX < length)
    {
        return Err(multiple_messages());
    }
    Ok(buffer.freeze())
}

/// The length of the first message in `bytes`, as its prefix states; `None` without a whole prefix.
pub(super) fn message_length(bytes: &[u8]) -> Option<usize> {
    let [_, length @ ..] = *bytes.first_chunk::<PREFIX>()?;
    Some(u32::from_be_bytes(length) as usize)
}

pub(super) fn too_long(max_bytes: usize) -> Status {
    Status::out_of_range(format!("the message has more than {max_bytes} bytes"))
}

fn multiple_messages() -> Status {
    Status::unimplemented("more than one message in a call that takes one")
}

/// Checks that `message` is exactly one uncompressed message with its prefix, and removes the
/// prefix.
pub(super) fn without_prefix(mut message: Bytes) -> Result<Bytes, Status> {
    check(&message)?;
    if message[0] != 0 {
        return Err(Status::internal("the message is compressed, but grpc-encoding is not said"));
    }
    message.advance(PREFIX);
    Ok(message)
}

fn check(message: &[u8]) -> Result<(), Status> {
    let cut = || Status::internal("the message is shorter than it says");
    if message.is_empty() {
        return Err(Status::unimplemented("no message in a call that takes one"));
    }
    let expected = message_length(message).ok_or_else(cut)?;
    match (message.len() - PREFIX).cmp(&expected) {
        std::cmp::Ordering::Less => Err(cut()),
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Greater => Err(multiple_messages()),
    }
}

/// Decompresses a message, if it is compressed. Keeps the prefix.
pub(super) fn decompressed(
    message: Bytes,
    gzip: bool,
    limits: MessageLimits,
) -> Result<Bytes, Status> {
    check(&message)?;
    if !gzip || message[0] == 0 {
        return Ok(message);
    }
    let mut plain = Vec::new();
    let read = GzDecoder::new(&message[PREFIX..])
        .take(limits.kept_bytes as u64 + 1)
        .read_to_end(&mut plain)
        .map_err(|error| Status::internal(format!("the message is not valid gzip: {error}")))?;
    if read > limits.kept_bytes {
        return match limits.kept_bytes < limits.max_bytes {
            true => Ok(Bytes::from_static(&[0; PREFIX])),
            false => Err(too_long(limits.kept_bytes)),
        };
    }
    let mut framed = BytesMut::with_capacity(PREFIX + read);
    framed.put_u8(0);
    framed.put_u32(read as u32);
    framed.extend_from_slice(&plain);
    Ok(framed.freeze())
}

/// Reads and discards the rest of a request that is already answered. First returns what was read
/// to the connection's window, which the request may have filled.
pub(super) async fn drain(mut body: RequestBody) {
    body.release();
    let ended = async {
        let mut length = 0;
        while let Some(Ok(data)) = body.data().await {
            body.release();
            length += data.len();
            if length > MAX_DRAINED_BYTES {
                return;
            }
        }
    };
    // Beyond these limits the stream is reset.
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, ended).await;
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use tonic::Code;

    use super::*;

    fn framed(compressed: u8, message: &[u8]) -> Bytes {
        let length = (message.len() as u32).to_be_bytes();
        [&[compressed][..], &length, message].concat().into()
    }

    fn gzipped(message: &[u8]) -> Bytes {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(message).expect("compressed");
        framed(1, &encoder.finish().expect("compressed"))
    }

    #[test]
    fn exactly_one_message_is_accepted() {
        let code = |bytes: Bytes| without_prefix(bytes).map_err(|status| status.code());
        assert_eq!(code(framed(0, b"abc")), Ok("abc".into()));
        assert_eq!(code(framed(0, b"")), Ok(Bytes::new()));
        assert_eq!(code(Bytes::new()), Err(Code::Unimplemented));
        let two = [framed(0, b"abc"), framed(0, b"")].concat();
        assert_eq!(code(two.into()), Err(Code::Unimplemented));
        assert_eq!(code(framed(0, b"abc").slice(..7)), Err(Code::Internal));
        assert_eq!(code(framed(0, b"abc").slice(..4)), Err(Code::Internal));
        assert_eq!(code(framed(1, b"abc")), Err(Code::Internal));
    }

    #[test]
    fn decompression_stops_at_the_limit() {
        let small = decompressed(gzipped(b"abc"), true, MessageLimits::LEASES).expect("small");
        assert_eq!(small, framed(0, b"abc"));
        let plain =
            decompressed(framed(0, b"abc"), true, MessageLimits::LEASES).expect("not compressed");
        assert_eq!(plain, framed(0, b"abc"));
        let bomb = gzipped(&vec![0; 64 << 20]);
        assert!(bomb.len() < 100 << 10, "{} bytes", bomb.len());
        let status = decompressed(bomb, true, MessageLimits::LEASES).expect_err("too long");
        assert_eq!(status.code(), Code::OutOfRange);
        let bomb = gzipped(&vec![0; 1 << 20]);
        assert!(bomb.len() < MessageLimits::ALLOW.kept_bytes);
        let nothing = decompressed(bomb, true, MessageLimits::ALLOW).expect("no error");
        assert_eq!(nothing, framed(0, b""));
        let status =
            decompressed(framed(1, b"abc"), true, MessageLimits::LEASES).expect_err("no gzip");
        assert_eq!(status.code(), Code::Internal);
    }
}
