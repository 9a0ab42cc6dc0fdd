//! Frames in floods, and connections that are slow on purpose.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::measure::{Field, duration, hold_out};
use super::raw::{
    self, CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, RESET, SETTINGS,
    WINDOW_UPDATE,
};
use testkit::Node;

/// Connections of a flood.
const CONNECTIONS: usize = 200;

/// Floods a port over so many connections with what `next` makes, from the number of the next
/// stream, which it moves on.
fn flood(
    name: &str,
    connections: usize,
    port: fn(&Node) -> std::net::SocketAddr,
    reads: bool,
    next: fn(&mut u32) -> Vec<u8>,
) {
    if duration().is_none() {
        return;
    }
    let field = Field::embedded(&[]);
    let target = port(&field.node);
    let attack =
        move |_: usize, stop: &AtomicBool| raw::crowd(target, connections, stop, reads, next);
    hold_out(name, &field, connections as u64, 1, attack);
}

fn grpc(node: &Node) -> std::net::SocketAddr {
    node.grpc
}

fn http(node: &Node) -> std::net::SocketAddr {
    node.http
}

fn take_id(id: &mut u32) -> u32 {
    *id += 2;
    *id - 2
}

fn window_updates(_: &mut u32) -> Vec<u8> {
    // So small that no window overflows.
    raw::frame(WINDOW_UPDATE, 0, 0, &1_u32.to_be_bytes()).repeat(512)
}

#[test]
fn window_updates_on_the_http_port() {
    flood("WINDOW_UPDATE on the HTTP port", CONNECTIONS, http, true, window_updates);
}

#[test]
fn window_updates_on_the_grpc_port() {
    flood("WINDOW_UPDATE", CONNECTIONS, grpc, true, window_updates);
}

/// Streams that are reset as soon as they are open.
pub fn reset_streams(id: &mut u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..64 {
        let id = take_id(id);
        bytes.extend(raw::frame(HEADERS, END_HEADERS, id, &raw::allow()));
        bytes.extend(raw::frame(RESET, 0, id, &8_u32.to_be_bytes()));
    }
    bytes
}

#[test]
fn rapid_reset() {
    flood("rapid reset", CONNECTIONS, grpc, true, reset_streams);
}

#[test]
fn rapid_reset_on_the_http_port() {
    flood("rapid reset on the HTTP port", CONNECTIONS, http, true, reset_streams);
}

/// Has the node reset streams itself: a window is opened by nothing, which is an error.
fn made_you_reset(id: &mut u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..64 {
        let id = take_id(id);
        bytes.extend(raw::request(id, "flood"));
        bytes.extend(raw::frame(WINDOW_UPDATE, 0, id, &0_u32.to_be_bytes()));
    }
    bytes
}

#[test]
fn resets_that_the_node_is_made_to_send() {
    flood("MadeYouReset", CONNECTIONS, grpc, true, made_you_reset);
}

fn pings(_: &mut u32) -> Vec<u8> {
    raw::frame(PING, 0, 0, &[7; 8]).repeat(512)
}

#[test]
fn ping() {
    flood("PING", CONNECTIONS, grpc, true, pings);
}

#[test]
fn ping_on_the_http_port() {
    flood("PING on the HTTP port", CONNECTIONS, http, true, pings);
}

fn all_settings(_: &mut u32) -> Vec<u8> {
    raw::frame(SETTINGS, 0, 0, &[]).repeat(512)
}

#[test]
fn settings() {
    flood("SETTINGS", CONNECTIONS, grpc, true, all_settings);
}

#[test]
fn settings_whose_acknowledgements_nobody_reads() {
    flood("SETTINGS, unread", CONNECTIONS, grpc, false, all_settings);
}

fn continuations(id: &mut u32) -> Vec<u8> {
    let more = raw::block(&[("x-more", &"x".repeat(100))]);
    let begun = raw::frame(HEADERS, 0, take_id(id), &raw::allow());
    let more = raw::frame(CONTINUATION, 0, *id - 2, &more).repeat(256);
    [begun, more].concat()
}

#[test]
fn continuation() {
    flood("CONTINUATION", CONNECTIONS, grpc, true, continuations);
}

/// One long header goes into the table, and then is named again and again, a byte each.
fn hpack_bomb(id: &mut u32) -> Vec<u8> {
    // Literal with incremental indexing, a new name: length in one byte and value in three.
    let mut block = raw::allow();
    block.extend([0x40, 1, b'x', 0x7f, 0x80 + 41, 0x1e]);
    block.extend(vec![b'x'; 127 + 41 + 0x1e * 128]);
    block.extend(vec![0x80 + 62; 4_000]);
    let id = take_id(id);
    raw::frame(HEADERS, END_HEADERS | END_STREAM, id, &block)
}

#[test]
fn headers_that_unfold() {
    flood("HPACK bomb", CONNECTIONS, grpc, true, hpack_bomb);
}

fn requests(id: &mut u32) -> Vec<u8> {
    (0..64).flat_map(|_| raw::request(take_id(id), "flood")).collect()
}

#[test]
fn answers_that_nobody_reads() {
    flood("answers never read", 50, grpc, false, requests);
}

/// A data frame for a stream that has ended.
fn data_after_the_end(id: &mut u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..64 {
        let id = take_id(id);
        bytes.extend(raw::request(id, "flood"));
        bytes.extend(raw::frame(DATA, END_STREAM, id, &[]));
    }
    bytes
}

#[test]
fn data_after_the_end_of_a_stream() {
    flood("DATA after the end", CONNECTIONS, grpc, true, data_after_the_end);
}

/// A byte a second on each connection.
#[test]
fn requests_of_a_byte_a_second() {
    if duration().is_none() {
        return;
    }
    let field = Field::embedded(&[]);
    let target = field.node.grpc;
    let attack = move |_: usize, stop: &AtomicBool| {
        let (mut turn, mut due) = (0, Instant::now());
        raw::crowd(target, CONNECTIONS, stop, true, |id| {
            if turn % CONNECTIONS == 0 {
                if due > Instant::now() {
                    return Vec::new();
                }
                due += Duration::from_secs(1);
            }
            turn += 1;
            let request = raw::request(1, "flood");
            let at = *id as usize / 2;
            *id += 2;
            request.get(at).map(|byte| vec![*byte]).unwrap_or_default()
        });
    };
    hold_out("a byte a second", &field, CONNECTIONS as u64, 1, attack);
}
