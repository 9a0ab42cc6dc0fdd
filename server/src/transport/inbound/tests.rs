//! Compares what h2 reads from a filtered connection with what the client sent.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::Waker;

use bytes::Bytes;
use http::uri::Authority;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use tokio::io::AsyncWrite;

use super::*;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Returns its chunks of bytes, then stays pending forever. Accepts all writes.
struct ChunkedInput {
    remaining: VecDeque<Vec<u8>>,
    /// Set at the first read after the last chunk.
    exhausted: Arc<AtomicBool>,
}

impl AsyncRead for ChunkedInput {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(mut chunk) = self.remaining.pop_front() else {
            self.exhausted.store(true, Ordering::Relaxed);
            return Poll::Pending;
        };
        let rest = chunk.split_off(chunk.len().min(buffer.remaining()));
        if !rest.is_empty() {
            self.remaining.push_front(rest);
        }
        buffer.put_slice(&chunk);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ChunkedInput {
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

/// Splits `bytes` into chunks of these lengths, repeated.
fn chunked(mut bytes: &[u8], lengths: &[usize]) -> ChunkedInput {
    let mut chunks = VecDeque::new();
    for length in lengths.iter().cycle() {
        if bytes.is_empty() {
            break;
        }
        let (chunk, rest) = bytes.split_at((*length).min(bytes.len()));
        chunks.push_back(chunk.to_vec());
        bytes = rest;
    }
    ChunkedInput { remaining: chunks, exhausted: Arc::default() }
}

/// The bytes passed on by each read of at most `room` bytes, and whether the last read fails.
fn read_all(chunks: ChunkedInput, room: usize) -> (Vec<Vec<u8>>, bool) {
    let (exhausted, read_budget) = (Arc::clone(&chunks.exhausted), ReadBudget::default());
    let mut inbound = Inbound::new(chunks, read_budget.clone(), ResetFlag::default());
    let mut context = Context::from_waker(Waker::noop());
    let (mut reads, mut room) = (Vec::new(), vec![0; room]);
    while !exhausted.load(Ordering::Relaxed) {
        read_budget.refill(&mut context);
        let mut buffer = ReadBuf::new(&mut room);
        match Pin::new(&mut inbound).poll_read(&mut context, &mut buffer) {
            Poll::Ready(Ok(())) => reads.push(buffer.filled().to_vec()),
            Poll::Ready(Err(_)) => return (reads, true),
            Poll::Pending => {}
        }
    }
    (reads, false)
}

/// The bytes passed on, and whether a read fails.
fn passed_on(bytes: &[u8], lengths: &[usize]) -> (Vec<u8>, bool) {
    let (reads, failed) = read_all(chunked(bytes, lengths), 100);
    (reads.concat(), failed)
}

type Field = (Vec<u8>, Vec<u8>);

/// How one field is encoded.
#[derive(Clone, Debug)]
struct Style {
    /// `kind % 3`: a literal without indexing, never indexed, or with indexing. From 2 on, a field
    /// that is in a table is sent as its index instead.
    kind: u8,
    name_by_index: bool,
    name_encoded: bool,
    value_encoded: bool,
}

/// One request.
#[derive(Clone, Debug)]
struct TestRequest {
    authority: Option<Vec<u8>>,
    path: String,
    fields: Vec<(String, String)>,
    styles: Vec<Style>,
    table_size: Option<usize>,
    padding: Option<u8>,
    priority: bool,
    /// Lengths of the fragments that the header block is split into.
    parts: Vec<usize>,
}

/// A client's HPACK encoder, according to RFC 7541.
struct Encoder {
    /// The dynamic table, newest entry first.
    table: VecDeque<Field>,
    max_size: usize,
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
        while size(&self.table) > self.max_size {
            self.table.pop_back();
        }
    }

    fn resize(&mut self, max_size: usize, out: &mut Vec<u8>) {
        self.max_size = max_size;
        self.shrink();
        integer(0x20, 5, max_size, out);
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

    fn block(&mut self, request: &TestRequest) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(max_size) = request.table_size {
            self.resize(max_size, &mut out);
        }
        let mut styles = request.styles.iter().cycle();
        let mut field = |name: &str, value: &[u8]| {
            self.field(name.as_bytes(), value, styles.next().expect("endless"), &mut out);
        };
        field(":method", b"POST");
        field(":path", request.path.as_bytes());
        if let Some(authority) = &request.authority {
            field(":authority", authority);
        }
        field(":scheme", b"http");
        for (name, value) in &request.fields {
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
    let bytes = if encoded { huffman::encode(text) } else { text.to_vec() };
    integer(if encoded { 0x80 } else { 0 }, 7, bytes.len(), out);
    out.extend(bytes);
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8], out: &mut Vec<u8>) {
    out.extend(&(payload.len() as u32).to_be_bytes()[1..]);
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend(payload);
}

/// Writes the frames of one request, with a body of 20 bytes.
fn frames(request: &TestRequest, block: &[u8], stream: u32, out: &mut Vec<u8>) {
    let mut parts: Vec<&[u8]> = Vec::new();
    let mut rest = block;
    for length in &request.parts {
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
        if let Some(padding) = request.padding {
            flags |= 8;
            payload.push(padding);
        }
        if request.priority {
            flags |= 0x20;
            payload.extend([0, 0, 0, 0, 16]);
        }
        payload.extend(*part);
        payload.extend(vec![0; usize::from(request.padding.unwrap_or(0))]);
        frame(1, flags, stream, &payload, out);
    }
    frame(0, 1, stream, &[1; 20], out);
}

fn authority() -> impl Strategy<Value = Option<Vec<u8>>> {
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
    prop_oneof![
        1 => Just(None),
        9 => authorities.prop_map(|text| Some(text.as_bytes().to_vec())),
        1 => prop::collection::vec(any::<u8>(), 0..300).prop_map(Some),
    ]
}

fn fields() -> impl Strategy<Value = Vec<(String, String)>> {
    let names = select(vec!["te", "content-type", "user-agent", "x-a", "x-b"]);
    let values = select(vec!["trailers"]);
    let field = (names, values, "[ -~]{0,40}").prop_map(|(name, fixed, value)| {
        let value = if name == "te" { fixed.to_owned() } else { value.trim().to_owned() };
        (name.to_owned(), value)
    });
    let count = prop_oneof![9 => 0..6_usize, 1 => 30..60_usize];
    count.prop_flat_map(move |count| prop::collection::vec(field.clone(), count))
}

fn style() -> impl Strategy<Value = Style> {
    (0..6_u8, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        |(kind, name_by_index, name_encoded, value_encoded)| Style {
            kind,
            name_by_index,
            name_encoded,
            value_encoded,
        },
    )
}

fn test_request() -> impl Strategy<Value = TestRequest> {
    (
        (authority(), "/[a-z]{0,20}", fields(), prop::collection::vec(style(), 1..9)),
        (
            prop::option::weighted(0.1, select(vec![0, 40, 100, 1000, 4096])),
            prop::option::weighted(0.3, any::<u8>()),
            any::<bool>(),
            prop::collection::vec(0..50_usize, 0..3),
        ),
    )
        .prop_map(
            |((authority, path, fields, styles), (table_size, padding, priority, parts))| {
                TestRequest {
                    authority,
                    path,
                    fields,
                    styles,
                    table_size,
                    padding,
                    priority,
                    parts,
                }
            },
        )
}

/// The path, the authority and the fields of a request.
type Received = (String, Option<String>, Vec<Field>);

async fn read_by_h2(io: ChunkedInput, resets: ResetFlag) -> Vec<Received> {
    let mut builder = h2::server::Builder::new();
    builder.max_concurrent_streams(1000).initial_connection_window_size(1 << 20);
    let (exhausted, read_budget) = (Arc::clone(&io.exhausted), ReadBudget::default());
    let handshake = builder.handshake::<_, Bytes>(Inbound::new(io, read_budget.clone(), resets));
    let mut connection = read_budget.refill_each_poll(handshake).await.expect("a handshake");
    let (mut received, mut open) = (Vec::new(), Vec::new());
    loop {
        let next = poll_fn(|context| {
            read_budget.refill(context);
            Poll::Ready(connection.poll_accept(context))
        });
        let next = match next.await {
            Poll::Ready(Some(next)) => next,
            Poll::Ready(None) => return received,
            Poll::Pending if exhausted.load(Ordering::Relaxed) => return received,
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
        received.push((parts.uri.path().to_owned(), authority, fields));
        open.push((respond, body));
    }
}

/// The expected request. h2 groups fields by name.
fn expected(request: &TestRequest) -> Received {
    let valid = request.authority.as_deref().and_then(|text| Authority::try_from(text).ok());
    let mut map = http::HeaderMap::new();
    for (name, value) in &request.fields {
        let name: http::HeaderName = name.parse().expect("a name");
        map.append(name, value.parse().expect("a value"));
    }
    let fields = map.iter().map(|(n, v)| (n.as_str().into(), v.as_bytes().into())).collect();
    (request.path.clone(), valid.map(|authority| authority.to_string()), fields)
}

fn encode_all(all: &[TestRequest]) -> Vec<u8> {
    let mut encoder = Encoder { table: VecDeque::new(), max_size: 4096 };
    let mut bytes = PREFACE.to_vec();
    for (number, request) in all.iter().enumerate() {
        let block = encoder.block(request);
        frames(request, &block, 2 * number as u32 + 1, &mut bytes);
    }
    bytes
}

/// Tries `PROPTEST_CASES` cases, 256 by default. A failing one is printed.
fn runner() -> TestRunner {
    TestRunner::new(Config { failure_persistence: None, ..Config::default() })
}

fn test_requests() -> impl Strategy<Value = (Vec<TestRequest>, Vec<usize>)> {
    let lengths = prop_oneof![
        prop::collection::vec(1..40_usize, 1..9),
        prop::collection::vec(100..9000_usize, 1..4),
    ];
    (prop::collection::vec(test_request(), 1..60), lengths)
}

#[test]
fn h2_reads_requests_without_invalid_authorities() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runner()
        .run(&test_requests(), |(all, lengths)| {
            let io = chunked(&encode_all(&all), &lengths);
            let received = runtime.block_on(read_by_h2(io, ResetFlag::default()));
            let expected: Vec<Received> = all.iter().map(expected).collect();
            prop_assert_eq!(received, expected);
            Ok(())
        })
        .expect("h2 reads all requests");
}

#[test]
fn valid_requests_pass_unchanged() {
    runner()
        .run(&test_requests(), |(mut all, lengths)| {
            for request in &mut all {
                let valid =
                    request.authority.take().filter(|text| Authority::try_from(&**text).is_ok());
                request.authority = valid;
            }
            let bytes = encode_all(&all);
            prop_assert_eq!(passed_on(&bytes, &lengths), (bytes, false));
            Ok(())
        })
        .expect("no change");
}

#[test]
fn malformed_input_does_no_harm() {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20);
    runner()
        .run(&(test_requests(), changes), |((all, lengths), changes)| {
            let mut bytes = encode_all(&all);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let (out, _) = passed_on(&bytes, &lengths);
            prop_assert!(out.len() <= bytes.len());
            Ok(())
        })
        .expect("no panic");
}

#[test]
fn an_endless_block_is_left_to_h2() {
    let mut bytes = PREFACE.to_vec();
    frame(1, 0, 1, b"\x82", &mut bytes);
    for _ in 0..20 {
        frame(9, 0, 1, b"", &mut bytes);
    }
    assert_eq!(passed_on(&bytes, &[1000]), (bytes.clone(), false));
    assert_eq!(passed_on(&bytes, &[1]), (bytes, false));
}

#[test]
fn malformed_blocks_after_a_removal_end_the_connection() {
    let mut bytes = PREFACE.to_vec();
    frame(1, 4, 1, b"\x41\x03a b", &mut bytes);
    let before = passed_on(&bytes, &[1000]).0;
    frame(1, 4, 3, b"\x80", &mut bytes);
    frame(1, 4, 5, b"\x82\xbe", &mut bytes);
    let (out, failed) = passed_on(&bytes, &[1000]);
    assert!(failed && out.len() <= before.len(), "{out:x?}");
}

#[test]
fn resets_set_the_flag() {
    let resets = ResetFlag::default();
    let mut bytes = PREFACE.to_vec();
    frame(0, 1, 1, b"\0\0\0\x04\x03\0\0\0\x01", &mut bytes);
    frame(1, 5, 1, b"\x82", &mut bytes);
    let mut frames = Frames::default();
    assert!(frames.check(&mut bytes.clone(), &resets).is_ok() && !resets.is_set());
    let mut reset = Vec::new();
    frame(3, 0, 1, &[0, 0, 0, 8], &mut reset);
    assert!(frames.check(&mut reset, &resets).is_ok() && resets.is_set());
    resets.clear();
    assert!(!resets.is_set());
}

/// h2 judges resets of streams that the client opened or can't open, and of a wrong length.
#[test]
fn resets_of_unopened_streams_are_removed() {
    let mut bytes = PREFACE.to_vec();
    frame(1, 5, 3, b"\x82", &mut bytes);
    let mut expected = bytes.clone();
    for (stream, length, removed) in
        [(1, 4, false), (3, 4, false), (5, 4, true), (6, 4, false), (0, 4, false), (7, 5, false)]
    {
        let mut reset = Vec::new();
        frame(3, 0, stream, &[0, 0, 0, 8, 0][..length], &mut reset);
        bytes.extend_from_slice(&reset);
        if !removed {
            expected.extend_from_slice(&reset);
        }
    }
    for size in [1, 7, 1000] {
        assert_eq!(passed_on(&bytes, &[size]), (expected.clone(), false));
    }
}

#[test]
fn control_frames_pass_a_few_at_a_time() {
    let mut bytes = PREFACE.to_vec();
    for number in 0..10 {
        frame(1, 5, 2 * number + 1, b"\x82", &mut bytes);
        for _ in 0..49 {
            frame(4, 0, 0, b"", &mut bytes);
        }
    }
    let (reads, failed) = read_all(chunked(&bytes, &[1 << 14]), 1 << 14);
    assert_eq!((reads.concat(), failed), (bytes, false));
    // 490 and the SETTINGS of the preface.
    assert_eq!(reads.len(), 491_usize.div_ceil(64));
}
