//! A hostile HTTP/2 client: handmade frames, sent whatever the node answers.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RESET: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const ACK: u8 = 1;
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;

/// One frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// A header block of literals.
pub fn block(headers: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in headers {
        block.push(0);
        for text in [name, value] {
            assert!(text.len() < 127);
            block.push(text.len() as u8);
            block.extend(text.as_bytes());
        }
    }
    block
}

/// Headers of an `Allow` request.
pub fn allow() -> Vec<u8> {
    block(&[
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/quotaservice.QuotaService/Allow"),
        (":authority", "node"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ])
}

/// A request message for bucket `b` of a namespace.
pub fn message(namespace: &str) -> Vec<u8> {
    let mut message = vec![0x0a, namespace.len() as u8];
    message.extend(namespace.as_bytes());
    message.extend([0x12, 1, b'b']);
    let mut framed = vec![0, 0, 0, 0, message.len() as u8];
    framed.extend(message);
    framed
}

/// One whole request.
pub fn request(stream: u32, namespace: &str) -> Vec<u8> {
    let mut bytes = frame(HEADERS, END_HEADERS, stream, &allow());
    bytes.extend(frame(DATA, END_STREAM, stream, &message(namespace)));
    bytes
}

/// Connection preface with empty SETTINGS.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// [`PREFACE`] as a vector.
pub fn preface() -> Vec<u8> {
    PREFACE.to_vec()
}

/// Connects to the node.
pub fn connect(node: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(node).unwrap();
    stream.set_nodelay(true).unwrap();
    // Short enough to notice a close while nothing can be written.
    stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    stream
}

/// A connection of [`crowd`].
struct Member {
    stream: TcpStream,
    left: Vec<u8>,
    /// Next stream id.
    id: u32,
}

impl Member {
    fn new(node: SocketAddr) -> Option<Self> {
        let stream = TcpStream::connect_timeout(&node, Duration::from_secs(1)).ok()?;
        stream.set_nonblocking(true).ok()?;
        Some(Self { stream, left: preface(), id: 1 })
    }

    /// Writes and reads what is possible. Returns whether there was any progress, or an error if
    /// the node has closed the connection.
    fn turn(
        &mut self,
        reads: bool,
        next: &mut impl FnMut(&mut u32) -> Vec<u8>,
    ) -> Result<bool, ()> {
        if self.left.is_empty() {
            self.left = next(&mut self.id);
        }
        let mut done = false;
        match self.stream.write(&self.left) {
            Ok(count) => {
                self.left.drain(..count);
                done |= count > 0;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return Err(()),
        }
        if reads {
            match self.stream.read(&mut [0; 1 << 14]) {
                Ok(0) => return Err(()),
                Ok(_) => done = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return Err(()),
            }
        }
        Ok(done)
    }
}

/// Connections that take turns to send the bytes of `next`, after a preface, until stopped. Closed
/// connections are reopened.
pub fn crowd(
    node: SocketAddr,
    connections: usize,
    stop: &AtomicBool,
    reads: bool,
    mut next: impl FnMut(&mut u32) -> Vec<u8>,
) {
    let mut members: Vec<Option<Member>> = (0..connections).map(|_| Member::new(node)).collect();
    while !stop.load(Ordering::Relaxed) {
        let mut idle = true;
        for place in &mut members {
            match place.as_mut().map(|member| member.turn(reads, &mut next)) {
                Some(Ok(done)) => idle &= !done,
                Some(Err(())) | None => *place = Member::new(node),
            }
        }
        if idle {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Sends the bytes of `next` until the node closes the connection. Returns the time; `None` after
/// `limit`. With `reads`, responses are read and discarded.
pub fn send_on(
    stream: &mut TcpStream,
    limit: Duration,
    reads: bool,
    mut next: impl FnMut() -> Vec<u8>,
) -> Option<Duration> {
    let (started, mut left) = (Instant::now(), Vec::new());
    let mut buffer = vec![0; 1 << 16];
    stream.set_nonblocking(true).unwrap();
    while started.elapsed() < limit {
        if left.is_empty() {
            left = next();
        }
        let mut idle = left.is_empty();
        match stream.write(&left) {
            Ok(count) => drop(left.drain(..count)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => idle = true,
            Err(_) => return Some(started.elapsed()),
        }
        if reads {
            match stream.read(&mut buffer) {
                Ok(0) => return Some(started.elapsed()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return Some(started.elapsed()),
            }
        }
        if idle {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    None
}
