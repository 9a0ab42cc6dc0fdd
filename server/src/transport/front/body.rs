//! The messages of gRPC calls, read whole before anything is decided.

use std::io::Read as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use flate2::bufread::GzDecoder;
use futures_util::future::FutureExt as _;
use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::Status;

use super::super::budget::{Account, Held};
use super::super::connection::Received;
use super::super::messages::PREFIX;

/// The most bytes of a request to `Allow`, as in all gRPC libraries.
const LONGEST_ALLOW: usize = 4 << 20;

/// Bytes of a refused request that are read to its end, and how long that may take. Until a
/// request has ended, closing its stream takes a reset, and h2 closes a connection that needs many.
const DRAINED: usize = 64 << 10;
const DRAINING: Duration = Duration::from_secs(5);

/// What is read of a message.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// Bytes beyond which it is refused, on the wire.
    pub(super) longest: usize,
    /// Bytes beyond which it is read, but not kept. Of a compressed message these are those before
    /// and those after.
    kept: usize,
    /// From its first frame to its end.
    pub(super) within: Duration,
    /// Whether the message is taken once it is whole, though the client may leave its side of the
    /// stream open.
    open: bool,
}

impl Bounds {
    /// `Allow`: many times what the longest names take, with room for unknown fields.
    pub(super) const ALLOW: Self = Self {
        longest: LONGEST_ALLOW,
        kept: 8 << 10,
        within: Duration::from_secs(10),
        open: false,
    };

    /// `doorman.Capacity`: as many resources as a request may have, with names of 60 characters,
    /// take less.
    pub(super) const LEASES: Self =
        Self { longest: 1 << 20, kept: 1 << 20, within: Duration::from_secs(10), open: false };

    /// Health and reflection, which need no rights or hardly any.
    pub(super) const SMALL: Self =
        Self { longest: 1 << 10, kept: 1 << 10, within: Duration::from_secs(2), open: false };

    /// `Watch`, which is answered for as long as the stream lasts.
    pub(super) const WATCH: Self = Self { open: true, ..Self::SMALL };
}

/// The one message of a unary call, with its prefix, if it has come already and is in one frame,
/// as it nearly always is: then it is not copied.
pub(super) fn whole(body: &mut Received) -> Option<Bytes> {
    match body.data().now_or_never()? {
        Some(Ok(data)) if body.is_over() => {
            body.release(data.len());
            Some(data)
        }
        Some(Ok(data)) => {
            body.put_back(data);
            None
        }
        // The reader of the slow road meets the error again.
        Some(Err(_)) => None,
        None => Some(Bytes::new()),
    }
}

/// The one message of a unary call as it comes, with its prefix and not compressed. Of a message
/// that is longer than what is kept, an empty one is left. A message that has not come whole takes
/// one of the `unfinished`, if they are bounded.
pub(super) async fn collected(
    body: &mut Received,
    gzip: bool,
    bounds: Bounds,
    account: &Arc<Account>,
    unfinished: Option<&Semaphore>,
) -> Result<(Bytes, Held), Status> {
    let mut held = account.hold(0);
    let message = match whole(body) {
        Some(message) => message,
        None => {
            let _place = unfinished.map(place).transpose()?;
            let message = gathered(body, bounds, account, &mut held);
            tokio::time::timeout(bounds.within, message).await.map_err(|_| too_slow())??
        }
    };
    if announced(&message).is_some_and(|length| length > bounds.longest) {
        return Err(too_long(bounds.longest));
    }
    let message = match message.len() > PREFIX + bounds.kept {
        true => Bytes::from_static(&[0; PREFIX]),
        false => inflated(message, gzip, bounds)?,
    };
    held.set(message.len());
    Ok((message, held))
}

/// A place among the unfinished messages of a connection. Whoever finds none is refused: to wait
/// would leave bytes unread that hold up the other calls of the connection.
pub(super) fn place(unfinished: &Semaphore) -> Result<SemaphorePermit<'_>, Status> {
    unfinished.try_acquire().map_err(|_| {
        Status::resource_exhausted("too many messages on this connection have not ended")
    })
}

fn too_slow() -> Status {
    Status::deadline_exceeded("the request does not end")
}

async fn gathered(
    body: &mut Received,
    bounds: Bounds,
    account: &Arc<Account>,
    held: &mut Held,
) -> Result<Bytes, Status> {
    let (mut gathered, mut length) = (BytesMut::new(), 0);
    while let Some(data) = body.data().await {
        // The caller is gone.
        let data = data.map_err(|error| Status::cancelled(error.to_string()))?;
        length += data.len();
        // Of what is not kept, the prefix stays.
        let room = (PREFIX + bounds.kept + 1).saturating_sub(gathered.len());
        gathered.extend_from_slice(&data[..room.min(data.len())]);
        held.set(gathered.capacity());
        if let Some(announced) = announced(&gathered)
            && announced > bounds.longest
        {
            return Err(too_long(bounds.longest));
        }
        if length > PREFIX + bounds.longest {
            return Err(several());
        }
        if bounds.open && announced(&gathered).is_some_and(|one| one + PREFIX == length) {
            break;
        }
        let bytes = data.len();
        drop(data);
        account.room().await;
        body.release(bytes);
    }
    if length > gathered.len() && announced(&gathered).is_some_and(|one| one + PREFIX < length) {
        return Err(several());
    }
    Ok(gathered.freeze())
}

/// The length of the message that begins here, as it says itself.
pub(super) fn announced(gathered: &[u8]) -> Option<usize> {
    let [_, length @ ..] = *gathered.first_chunk::<PREFIX>()?;
    Some(u32::from_be_bytes(length) as usize)
}

pub(super) fn too_long(longest: usize) -> Status {
    Status::out_of_range(format!("the message has more than {longest} bytes"))
}

fn several() -> Status {
    Status::unimplemented("more than one message in a call that takes one")
}

/// Checks that these are one message of a unary call, and returns it without its prefix.
pub(super) fn unwrapped(mut whole: Bytes) -> Result<Bytes, Status> {
    check(&whole)?;
    if whole[0] != 0 {
        return Err(Status::internal("the message is compressed, but grpc-encoding is not said"));
    }
    whole.advance(PREFIX);
    Ok(whole)
}

fn check(whole: &[u8]) -> Result<(), Status> {
    let cut = || Status::internal("the message is shorter than it says");
    if whole.is_empty() {
        return Err(Status::unimplemented("no message in a call that takes one"));
    }
    let announced = announced(whole).ok_or_else(cut)?;
    match (whole.len() - PREFIX).cmp(&announced) {
        std::cmp::Ordering::Less => Err(cut()),
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Greater => Err(several()),
    }
}

/// The same message, decompressed if it is compressed.
pub(super) fn inflated(whole: Bytes, gzip: bool, bounds: Bounds) -> Result<Bytes, Status> {
    check(&whole)?;
    if !gzip || whole[0] == 0 {
        return Ok(whole);
    }
    let mut plain = Vec::new();
    let read = GzDecoder::new(&whole[PREFIX..])
        .take(bounds.kept as u64 + 1)
        .read_to_end(&mut plain)
        .map_err(|error| Status::internal(format!("the message is no gzip: {error}")))?;
    if read > bounds.kept {
        return match bounds.kept < bounds.longest {
            true => Ok(Bytes::from_static(&[0; PREFIX])),
            false => Err(too_long(bounds.kept)),
        };
    }
    let mut framed = BytesMut::with_capacity(PREFIX + read);
    framed.put_u8(0);
    framed.put_u32(read as u32);
    framed.extend_from_slice(&plain);
    Ok(framed.freeze())
}

/// Reads what is left of a request that is answered already, and keeps nothing.
pub(super) async fn drained(mut body: Received) {
    let ended = async {
        let mut length = 0;
        while let Some(Ok(data)) = body.data().await {
            body.release(data.len());
            length += data.len();
            if length > DRAINED {
                return;
            }
        }
    };
    // Beyond that the stream is reset.
    let _ = tokio::time::timeout(DRAINING, ended).await;
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
    fn one_message_and_no_other_number() {
        let code = |bytes: Bytes| unwrapped(bytes).map_err(|status| status.code());
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
    fn a_compressed_message_is_read_up_to_the_bound() {
        let small = inflated(gzipped(b"abc"), true, Bounds::LEASES).expect("small");
        assert_eq!(small, framed(0, b"abc"));
        let plain = inflated(framed(0, b"abc"), true, Bounds::LEASES).expect("not compressed");
        assert_eq!(plain, framed(0, b"abc"));
        let bomb = gzipped(&vec![0; 64 << 20]);
        assert!(bomb.len() < 100 << 10, "{} bytes", bomb.len());
        let status = inflated(bomb, true, Bounds::LEASES).expect_err("too long");
        assert_eq!(status.code(), Code::OutOfRange);
        let bomb = gzipped(&vec![0; 1 << 20]);
        assert!(bomb.len() < Bounds::ALLOW.kept);
        let nothing = inflated(bomb, true, Bounds::ALLOW).expect("it is answered");
        assert_eq!(nothing, framed(0, b""));
        let status = inflated(framed(1, b"abc"), true, Bounds::LEASES).expect_err("no gzip");
        assert_eq!(status.code(), Code::Internal);
    }
}
