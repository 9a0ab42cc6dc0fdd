//! How much of a connection's input is processed per turn.

use std::pin::Pin;

use http::Response;
use tokio::io::ReadBuf;

use super::*;

/// Open requests of an [`EagerClient`].
const CONCURRENCY: u32 = 100;

/// A client that sends a new request for each answer.
struct EagerClient {
    /// Bytes to be sent next.
    next: Vec<u8>,
    sent: u32,
    most: u32,
    /// Bytes received but not parsed yet.
    answers: Vec<u8>,
    answered: u32,
}

impl AsyncRead for EagerClient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let room = CONCURRENCY - (self.sent - self.answered);
        for _ in 0..room.min(self.most - self.sent) {
            // GET http / by indices of HPACK's static table.
            let id = (2 * self.sent + 1).to_be_bytes();
            self.next.extend([&b"\0\0\x03\x01\x05"[..], &id, b"\x82\x86\x84"].concat());
            self.sent += 1;
        }
        if self.next.is_empty() && self.answered < self.most {
            let _ = pin!(tokio::task::yield_now()).poll(context);
            return Poll::Pending;
        }
        let length = self.next.len().min(buffer.remaining());
        buffer.put_slice(&self.next.drain(..length).collect::<Vec<_>>());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for EagerClient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        self.answers.extend(bytes);
        while let [0, 0, length, kind, ..] = self.answers[..]
            && self.answers.len() >= 9 + usize::from(length)
        {
            self.answered += u32::from(kind == 1);
            self.answers.drain(..9 + usize::from(length));
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn immediate_answers_do_not_prolong_a_turn() {
    const REQUESTS: u32 = 20_000;
    let next = GREETING.to_vec();
    let io = EagerClient { next, sent: 0, most: REQUESTS, answers: Vec::new(), answered: 0 };
    let answered = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&answered);
    let server = serve(io, DEFAULT_TIMEOUTS, pending(), |_, to| {
        count.fetch_add(1, Ordering::Relaxed);
        to.headers(Response::new(()));
        Some(async {})
    });
    let (mut server, mut most) = (pin!(server), 0);
    poll_fn(|context| {
        let before = answered.load(Ordering::Relaxed);
        let polled = server.as_mut().poll(context);
        most = most.max(answered.load(Ordering::Relaxed) - before);
        polled
    })
    .await;
    assert_eq!(answered.load(Ordering::Relaxed), REQUESTS as usize, "all requests are answered");
    assert!(most <= 3 * CONCURRENCY as usize, "{most} in one turn of three reads");
}

/// A client that sends PINGs without end, and accepts all output.
struct PingFlood {
    /// Bytes to be sent next.
    next: Vec<u8>,
    reads: Arc<AtomicUsize>,
    bytes: Arc<AtomicUsize>,
}

impl AsyncRead for PingFlood {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let room = buffer.remaining();
        while self.next.len() < room {
            self.next.extend(b"\0\0\x08\x06\0\0\0\0\0a number");
        }
        buffer.put_slice(&self.next.drain(..room).collect::<Vec<_>>());
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(room, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PingFlood {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Other connections of the thread wait while this much input is processed.
#[tokio::test]
async fn a_turn_is_two_reads_of_8_kb_however_much_there_is() {
    let [reads, bytes] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let next = GREETING.to_vec();
    let io = PingFlood { next, reads: Arc::clone(&reads), bytes: Arc::clone(&bytes) };
    let mut server = pin!(serve(io, DEFAULT_TIMEOUTS, pending(), |_, _| Some(async {})));
    let counted = || [&reads, &bytes].map(|count| count.load(Ordering::Relaxed));
    let mut poll = async || {
        let polled = poll_fn(|context| Poll::Ready(server.as_mut().poll(context))).await;
        assert!(polled.is_pending(), "it never ends");
    };
    // The handshake has its own turn.
    poll().await;
    for turn in 0..100 {
        let before = counted();
        poll().await;
        let after = counted();
        assert!(after[0] - before[0] <= 2, "turn {turn}: {} reads", after[0] - before[0]);
        assert!(after[1] - before[1] <= 16 << 10, "turn {turn}: {} bytes", after[1] - before[1]);
    }
    // Only a few PINGs are passed on per turn, so one read lasts for several turns.
    assert!(counted()[0] >= 10, "{:?} reads and bytes in all", counted());
}
