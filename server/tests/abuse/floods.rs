//! Floods of frames, and deliberately slow connections.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::measure::{Target, assert_withstands, duration, try_to_withstand};
use super::raw::{
    self, CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, RESET, SETTINGS,
    WINDOW_UPDATE,
};
use testkit::Node;

/// Connections of a flood.
const CONNECTIONS: usize = 200;

/// How often a flood is tried whose latencies exceed their limits. Sometimes the scheduler keeps all
/// of the node's threads on the CPU that the attackers leave to it, which doubles the latencies.
const TRIES: usize = 3;

/// Floods a port over several connections with the frames of `next`, which gets the next stream id
/// and advances it.
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
    let mut late = Vec::new();
    for _ in 0..TRIES {
        let attacked = Target::embedded(&[]);
        let target = port(&attacked.node);
        let attack =
            move |_: usize, stop: &AtomicBool| raw::crowd(target, connections, stop, reads, next);
        let exceeded = try_to_withstand(name, &attacked, connections as u64, 1, attack);
        if exceeded.is_empty() {
            return;
        }
        println!("{name}: {exceeded:?}");
        late.push(exceeded);
    }
    panic!("{name}: {late:#?}");
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
    // Small increments, so that no window overflows.
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

/// Opens and resets streams.
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

/// Makes the node reset streams, by the error of a window increment of 0.
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
fn settings_without_reading_acknowledgements() {
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

/// A long header in the HPACK table that is referenced many times, by one byte each.
fn hpack_bomb(id: &mut u32) -> Vec<u8> {
    // Literal with incremental indexing and a new name.
    let mut block = raw::allow();
    block.extend([0x40, 1, b'x', 0x7f, 0x80 + 41, 0x1e]);
    block.extend(vec![b'x'; 127 + 41 + 0x1e * 128]);
    block.extend(vec![0x80 + 62; 4_000]);
    let id = take_id(id);
    raw::frame(HEADERS, END_HEADERS | END_STREAM, id, &block)
}

#[test]
fn hpack_bombs() {
    flood("HPACK bomb", CONNECTIONS, grpc, true, hpack_bomb);
}

fn requests(id: &mut u32) -> Vec<u8> {
    (0..64).flat_map(|_| raw::request(take_id(id), "flood")).collect()
}

#[test]
fn answers_that_are_never_read() {
    flood("answers never read", 50, grpc, false, requests);
}

/// Sends a data frame on an ended stream.
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
    let attacked = Target::embedded(&[]);
    let target = attacked.node.grpc;
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
    assert_withstands("a byte a second", &attacked, CONNECTIONS as u64, 1, attack);
}
