//! What h2 makes of a connection that was looked at first, against what its client meant.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::Waker;

use bytes::Bytes;
use http::uri::Authority;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use super::*;

const GREETING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Gives out bytes in pieces, then nothing more for ever; takes whatever is written.
struct Pieces {
    left: VecDeque<Vec<u8>>,
    /// Set once it is asked for more than there is.
    over: Arc<AtomicBool>,
}

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(mut piece) = self.left.pop_front() else {
            self.over.store(true, Ordering::Relaxed);
            return Poll::Pending;
        };
        let rest = piece.split_off(piece.len().min(buffer.remaining()));
        if !rest.is_empty() {
            self.left.push_front(rest);
        }
        buffer.put_slice(&piece);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pieces {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// The bytes in pieces of these lengths, in turn.
fn in_pieces(mut bytes: &[u8], lengths: &[usize]) -> Pieces {
    let mut pieces = VecDeque::new();
    for length in lengths.iter().cycle() {
        if bytes.is_empty() {
            break;
        }
        let (piece, rest) = bytes.split_at((*length).min(bytes.len()));
        pieces.push_back(piece.to_vec());
        bytes = rest;
    }
    Pieces { left: pieces, over: Arc::default() }
}

/// What each read of at most `room` bytes hands on, and whether it ends in an error.
fn reads(pieces: Pieces, room: usize) -> (Vec<Vec<u8>>, bool) {
    let (over, turn) = (Arc::clone(&pieces.over), Turn::default());
    let mut inbound = Inbound::new(pieces, turn.clone(), Resets::default());
    let mut context = Context::from_waker(Waker::noop());
    let (mut reads, mut room) = (Vec::new(), vec![0; room]);
    while !over.load(Ordering::Relaxed) {
        turn.begin(&mut context);
        let mut buffer = ReadBuf::new(&mut room);
        match Pin::new(&mut inbound).poll_read(&mut context, &mut buffer) {
            Poll::Ready(Ok(())) => reads.push(buffer.filled().to_vec()),
            Poll::Ready(Err(_)) => return (reads, true),
            Poll::Pending => {}
        }
    }
    (reads, false)
}

/// What is handed on, and whether it ends in an error.
fn handed_on(bytes: &[u8], lengths: &[usize]) -> (Vec<u8>, bool) {
    let (reads, failed) = reads(in_pieces(bytes, lengths), 100);
    (reads.concat(), failed)
}

type Field = (Vec<u8>, Vec<u8>);

/// How one field is written.
#[derive(Clone, Debug)]
struct Style {
    /// 0 and 1: without an index where there may be one; 2: as a literal to be indexed, …
    kind: u8,
    name_by_index: bool,
    name_encoded: bool,
    value_encoded: bool,
}

/// One request.
#[derive(Clone, Debug)]
struct Sent {
    authority: Option<Vec<u8>>,
    path: String,
    fields: Vec<(String, String)>,
    styles: Vec<Style>,
    resized: Option<usize>,
    padding: Option<u8>,
    priority: bool,
    /// Lengths of the parts that the block is cut into.
    parts: Vec<usize>,
}

/// A client's encoder, by the book.
struct Encoder {
    /// Newest first.
    table: VecDeque<Field>,
    most: usize,
}

const STATIC: [(usize, &str, &str); 6] = [
    (1, ":authority", ""),
    (3, ":method", "POST"),
    (4, ":path", "/"),
    (6, ":scheme", "http"),
    (31, "content-type", ""),
    (58, "user-agent", ""),
];

impl Encoder {
    fn shrink(&mut self) {
        let size = |table: &VecDeque<Field>| -> usize {
            table.iter().map(|(name, value)| name.len() + value.len() + 32).sum()
        };
        while size(&self.table) > self.most {
            self.table.pop_back();
        }
    }

    fn resize(&mut self, most: usize, out: &mut Vec<u8>) {
        self.most = most;
        self.shrink();
        integer(0x20, 5, most, out);
    }

    fn index(&self, matches: impl Fn(&[u8], &[u8]) -> bool) -> Option<usize> {
        let dynamic = self.table.iter().position(|(name, value)| matches(name, value));
        let fixed =
            STATIC.iter().find(|(_, name, value)| matches(name.as_bytes(), value.as_bytes()));
        dynamic.map(|at| at + 62).or(fixed.map(|(index, ..)| *index))
    }

    fn field(&mut self, name: &[u8], value: &[u8], style: &Style, out: &mut Vec<u8>) {
        let whole = self.index(|n, v| n == name && v == value);
        if let Some(index) = whole
            && style.kind > 1
        {
            return integer(0x80, 7, index, out);
        }
        let (first, prefix) = [(0, 4), (0x10, 4), (0x40, 6)][usize::from(style.kind % 3)];
        let named = self.index(|n, _| n == name).filter(|_| style.name_by_index);
        integer(first, prefix, named.unwrap_or(0), out);
        if named.is_none() {
            string(name, style.name_encoded, out);
        }
        string(value, style.value_encoded, out);
        if first == 0x40 {
            self.table.push_front((name.to_vec(), value.to_vec()));
            self.shrink();
        }
    }

    fn block(&mut self, sent: &Sent) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(most) = sent.resized {
            self.resize(most, &mut out);
        }
        let mut styles = sent.styles.iter().cycle();
        let mut field = |name: &str, value: &[u8]| {
            self.field(name.as_bytes(), value, styles.next().expect("endless"), &mut out);
        };
        field(":method", b"POST");
        field(":path", sent.path.as_bytes());
        if let Some(authority) = &sent.authority {
            field(":authority", authority);
        }
        field(":scheme", b"http");
        for (name, value) in &sent.fields {
            field(name, value.as_bytes());
        }
        out
    }
}

fn integer(first: u8, prefix: u32, value: usize, out: &mut Vec<u8>) {
    let mask = (1 << prefix) - 1;
    if value < mask {
        return out.push(first | value as u8);
    }
    out.push(first | mask as u8);
    let mut rest = value - mask;
    while rest > 127 {
        out.push(128 | (rest % 128) as u8);
        rest /= 128;
    }
    out.push(rest as u8);
}

fn string(text: &[u8], encoded: bool, out: &mut Vec<u8>) {
    let bytes = if encoded { huffman::encoded(text) } else { text.to_vec() };
    integer(if encoded { 0x80 } else { 0 }, 7, bytes.len(), out);
    out.extend(bytes);
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8], out: &mut Vec<u8>) {
    out.extend(&(payload.len() as u32).to_be_bytes()[1..]);
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend(payload);
}

/// The frames of one request, with a body of random bytes.
fn frames(sent: &Sent, block: &[u8], stream: u32, out: &mut Vec<u8>) {
    let mut parts: Vec<&[u8]> = Vec::new();
    let mut rest = block;
    for length in &sent.parts {
        let (part, others) = rest.split_at((*length).min(rest.len()));
        parts.push(part);
        rest = others;
    }
    parts.push(rest);
    let last = parts.len() - 1;
    for (number, part) in parts.iter().enumerate() {
        let end = if number == last { 4 } else { 0 };
        if number > 0 {
            frame(9, end, stream, part, out);
            continue;
        }
        let (mut flags, mut payload) = (end, Vec::new());
        if let Some(padding) = sent.padding {
            flags |= 8;
            payload.push(padding);
        }
        if sent.priority {
            flags |= 0x20;
            payload.extend([0, 0, 0, 0, 16]);
        }
        payload.extend(*part);
        payload.extend(vec![0; usize::from(sent.padding.unwrap_or(0))]);
        frame(1, flags, stream, &payload, out);
    }
    frame(0, 1, stream, &[1; 20], out);
}

fn sent() -> impl Strategy<Value = Sent> {
    let authorities = select(vec![
        "node",
        "node:1",
        "[::1]:1",
        "",
        "a%2Cb",
        "a:b:c",
        "::1",
        "/tmp/socket",
        "a b",
        "é",
        "10.0.0.1:1,10.0.0.2:2",
        "other",
        "a,b",
    ]);
    let authority = prop_oneof![
        1 => Just(None),
        9 => authorities.prop_map(|text| Some(text.as_bytes().to_vec())),
        1 => prop::collection::vec(any::<u8>(), 0..300).prop_map(Some),
    ];
    let names = select(vec!["te", "content-type", "user-agent", "x-a", "x-b"]);
    let values = select(vec!["trailers"]);
    let field = (names, values, "[ -~]{0,40}").prop_map(|(name, fixed, value)| {
        let value = if name == "te" { fixed.to_owned() } else { value.trim().to_owned() };
        (name.to_owned(), value)
    });
    let style = (0..6_u8, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        |(kind, name_by_index, name_encoded, value_encoded)| Style {
            kind,
            name_by_index,
            name_encoded,
            value_encoded,
        },
    );
    let many = prop_oneof![9 => 0..6_usize, 1 => 30..60_usize];
    let fields = many.prop_flat_map(move |many| prop::collection::vec(field.clone(), many));
    (
        (authority, "/[a-z]{0,20}", fields, prop::collection::vec(style, 1..9)),
        (
            prop::option::weighted(0.1, select(vec![0, 40, 100, 1000, 4096])),
            prop::option::weighted(0.3, any::<u8>()),
            any::<bool>(),
            prop::collection::vec(0..50_usize, 0..3),
        ),
    )
        .prop_map(
            |((authority, path, fields, styles), (resized, padding, priority, parts))| Sent {
                authority,
                path,
                fields,
                styles,
                resized,
                padding,
                priority,
                parts,
            },
        )
}

/// The path, the authority and the fields of a request.
type Got = (String, Option<String>, Vec<Field>);

async fn read_by_h2(io: Pieces, resets: Resets) -> Vec<Got> {
    let mut builder = h2::server::Builder::new();
    builder.max_concurrent_streams(1000).initial_connection_window_size(1 << 20);
    let (over, turn) = (Arc::clone(&io.over), Turn::default());
    let handshake = builder.handshake::<_, Bytes>(Inbound::new(io, turn.clone(), resets));
    let mut connection = turn.each_poll(handshake).await.expect("a greeting");
    let (mut got, mut kept) = (Vec::new(), Vec::new());
    loop {
        let next = poll_fn(|context| {
            turn.begin(context);
            Poll::Ready(connection.poll_accept(context))
        });
        let next = match next.await {
            Poll::Ready(Some(next)) => next,
            Poll::Ready(None) => return got,
            Poll::Pending if over.load(Ordering::Relaxed) => return got,
            Poll::Pending => {
                tokio::task::yield_now().await;
                continue;
            }
        };
        let (request, respond) = next.expect("a request");
        let (parts, body) = request.into_parts();
        let fields =
            parts.headers.iter().map(|(n, v)| (n.as_str().into(), v.as_bytes().into())).collect();
        let authority = parts.uri.authority().map(|authority| authority.to_string());
        got.push((parts.uri.path().to_owned(), authority, fields));
        kept.push((respond, body));
    }
}

/// In the order that h2 has them: by name, as they came.
fn meant(sent: &Sent) -> Got {
    let valid = sent.authority.as_deref().and_then(|text| Authority::try_from(text).ok());
    let mut map = http::HeaderMap::new();
    for (name, value) in &sent.fields {
        let name: http::HeaderName = name.parse().expect("a name");
        map.append(name, value.parse().expect("a value"));
    }
    let fields = map.iter().map(|(n, v)| (n.as_str().into(), v.as_bytes().into())).collect();
    (sent.path.clone(), valid.map(|authority| authority.to_string()), fields)
}

fn written(all: &[Sent]) -> Vec<u8> {
    let mut encoder = Encoder { table: VecDeque::new(), most: 4096 };
    let mut bytes = GREETING.to_vec();
    for (number, sent) in all.iter().enumerate() {
        let block = encoder.block(sent);
        frames(sent, &block, 2 * number as u32 + 1, &mut bytes);
    }
    bytes
}

fn runner(cases: u32) -> TestRunner {
    let seed = RngSeed::Fixed(12);
    TestRunner::new(Config {
        cases,
        rng_seed: seed,
        failure_persistence: None,
        ..Config::default()
    })
}

fn all_sent() -> impl Strategy<Value = (Vec<Sent>, Vec<usize>)> {
    let lengths = prop_oneof![
        prop::collection::vec(1..40_usize, 1..9),
        prop::collection::vec(100..9000_usize, 1..4),
    ];
    (prop::collection::vec(sent(), 1..60), lengths)
}

#[test]
fn h2_reads_what_the_client_meant_but_for_the_authority() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runner(400)
        .run(&all_sent(), |(all, lengths)| {
            let io = in_pieces(&written(&all), &lengths);
            let got = runtime.block_on(read_by_h2(io, Resets::default()));
            let meant: Vec<Got> = all.iter().map(meant).collect();
            prop_assert_eq!(got, meant);
            Ok(())
        })
        .expect("all are read");
}

#[test]
fn what_h2_takes_is_handed_on_unchanged() {
    runner(200)
        .run(&all_sent(), |(mut all, lengths)| {
            for sent in &mut all {
                let valid =
                    sent.authority.take().filter(|text| Authority::try_from(&**text).is_ok());
                sent.authority = valid;
            }
            let bytes = written(&all);
            prop_assert_eq!(handed_on(&bytes, &lengths), (bytes, false));
            Ok(())
        })
        .expect("nothing is changed");
}

#[test]
fn bytes_that_mean_nothing_do_no_harm() {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20);
    runner(1000)
        .run(&(all_sent(), changes), |((all, lengths), changes)| {
            let mut bytes = written(&all);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let (out, _) = handed_on(&bytes, &lengths);
            prop_assert!(out.len() <= bytes.len());
            Ok(())
        })
        .expect("no panic");
}

#[test]
fn a_block_that_does_not_end_is_left_to_h2() {
    let mut bytes = GREETING.to_vec();
    frame(1, 0, 1, b"\x82", &mut bytes);
    for _ in 0..20 {
        frame(9, 0, 1, b"", &mut bytes);
    }
    assert_eq!(handed_on(&bytes, &[1000]), (bytes.clone(), false));
    assert_eq!(handed_on(&bytes, &[1]), (bytes, false));
}

#[test]
fn what_h2_can_not_judge_ends_the_connection() {
    let mut bytes = GREETING.to_vec();
    frame(1, 4, 1, b"\x41\x03a b", &mut bytes);
    let before = handed_on(&bytes, &[1000]).0;
    frame(1, 4, 3, b"\x80", &mut bytes);
    frame(1, 4, 5, b"\x82\xbe", &mut bytes);
    let (out, failed) = handed_on(&bytes, &[1000]);
    assert!(failed && out.len() <= before.len(), "{out:x?}");
}

#[test]
fn resets_are_told_of() {
    let resets = Resets::default();
    let mut bytes = GREETING.to_vec();
    frame(0, 1, 1, b"\0\0\0\x04\x03\0\0\0\x01", &mut bytes);
    frame(1, 5, 1, b"\x82", &mut bytes);
    let mut frames = Frames::default();
    assert!(frames.check(&mut bytes.clone(), &resets).is_ok() && !resets.any());
    let mut reset = Vec::new();
    frame(3, 0, 1, &[0, 0, 0, 8], &mut reset);
    assert!(frames.check(&mut reset, &resets).is_ok() && resets.any());
    resets.forget();
    assert!(!resets.any());
}

/// Those of streams that h2 or nobody opens, and of another length, are for h2 to judge.
#[test]
fn resets_of_streams_that_were_never_opened_are_left_out() {
    let mut bytes = GREETING.to_vec();
    frame(1, 5, 3, b"\x82", &mut bytes);
    let mut expected = bytes.clone();
    for (stream, length, left_out) in
        [(1, 4, false), (3, 4, false), (5, 4, true), (6, 4, false), (0, 4, false), (7, 5, false)]
    {
        let mut reset = Vec::new();
        frame(3, 0, stream, &[0, 0, 0, 8, 0][..length], &mut reset);
        bytes.extend_from_slice(&reset);
        if !left_out {
            expected.extend_from_slice(&reset);
        }
    }
    for size in [1, 7, 1000] {
        assert_eq!(handed_on(&bytes, &[size]), (expected.clone(), false));
    }
}

/// However much was read at once.
#[test]
fn of_frames_without_a_request_a_few_are_handed_on_at_a_time() {
    let mut bytes = GREETING.to_vec();
    for number in 0..10 {
        frame(1, 5, 2 * number + 1, b"\x82", &mut bytes);
        for _ in 0..49 {
            frame(4, 0, 0, b"", &mut bytes);
        }
    }
    let (reads, failed) = reads(in_pieces(&bytes, &[1 << 14]), 1 << 14);
    assert_eq!((reads.concat(), failed), (bytes, false));
    // 490 of them and the one of the greeting; the first read of a connection is short.
    assert_eq!(reads.len(), 1 + 491_usize.div_ceil(64));
}
