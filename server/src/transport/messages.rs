//! The messages of `Allow` without copies: the names of a request stay in the bytes that came,
//! and an answer is written straight from what was decided. What they look like on the wire is
//! what the generated code makes of them, which the tests hold this to.

use bytes::{BufMut as _, Bytes, BytesMut};
use tollgate_proto::quotaservice::AllowRequest;

use super::status_on_wire;
use crate::service::allow::{Answer, Query};

/// Bytes before each message: whether it is compressed, and its length.
pub(super) const PREFIX: usize = 5;

/// The fields of an [`AllowRequest`], as long as there is nothing unusual about them: no field
/// that this version does not know, no negative number, none in more bytes than it needs. What
/// is unusual is left to the generated code, as is saying what is wrong with it.
pub(super) fn read(mut bytes: &[u8]) -> Option<Query<'_>> {
    let mut query = Query { namespace: "", bucket: "", tokens: 0, max_wait_ms: None };
    let (mut max_wait_ms, mut says) = (0, false);
    while let Some((key, rest)) = bytes.split_first() {
        bytes = rest;
        match key {
            0x0a => query.namespace = text(&mut bytes)?,
            0x12 => query.bucket = text(&mut bytes)?,
            0x18 => query.tokens = number(&mut bytes)? as i64,
            0x20 => max_wait_ms = number(&mut bytes)? as i64,
            0x28 => says = number(&mut bytes)? != 0,
            _ => return None,
        }
    }
    query.max_wait_ms = says.then_some(max_wait_ms);
    Some(query)
}

fn text<'a>(bytes: &mut &'a [u8]) -> Option<&'a str> {
    let length = usize::try_from(number(bytes)?).ok()?;
    let (text, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    std::str::from_utf8(text).ok()
}

/// A varint of up to 9 bytes.
fn number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..63).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

/// How many parts a message has: fields with a length, in itself and in those one level down. What
/// decoding allocates is in proportion to them. A message that does not decode may have any number.
pub(super) fn parts(message: &[u8]) -> usize {
    fields(message).map(|field| 1 + fields(field).count()).sum()
}

/// The fields with a length, up to where a message does not make sense.
fn fields(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        loop {
            let kind = number(&mut bytes)? & 7;
            let length = match kind {
                0 => {
                    number(&mut bytes)?;
                    continue;
                }
                1 => 8,
                2 => usize::try_from(number(&mut bytes)?).ok()?,
                5 => 4,
                _ => return None,
            };
            let (field, rest) = bytes.split_at_checked(length)?;
            bytes = rest;
            if kind == 2 {
                return Some(field);
            }
        }
    })
}

/// The query of a request that the generated code has read.
pub(super) fn query(request: &AllowRequest) -> Query<'_> {
    Query {
        namespace: &request.namespace,
        bucket: &request.bucket_name,
        tokens: request.tokens_requested,
        max_wait_ms: request.max_wait_time_override.then_some(request.max_wait_millis_override),
    }
}

/// An answer as an `AllowResponse` on the wire, with its prefix.
pub(super) fn written(answer: &Answer<'_>) -> Bytes {
    let mut length = 0;
    write(answer, &mut length);
    // Exactly as much as is needed: else it is moved once more to be shared.
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    write(answer, &mut bytes);
    bytes.freeze()
}

/// What a message is written to, or measured with.
trait Sink {
    fn put(&mut self, bytes: &[u8]);

    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.put(&[number as u8 | 0x80]);
            number >>= 7;
        }
        self.put(&[number as u8]);
    }
}

/// How long it would be.
impl Sink for usize {
    fn put(&mut self, bytes: &[u8]) {
        *self += bytes.len();
    }
}

impl Sink for BytesMut {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Writes the fields in the order of their numbers, but for those that say nothing.
fn write(answer: &Answer<'_>, to: &mut impl Sink) {
    let mut number = |key: &[u8], number: u64| {
        if number != 0 {
            to.put(key);
            to.number(number);
        }
    };
    number(&[0x08], status_on_wire(answer.status) as u64);
    number(&[0x10], answer.tokens_granted as u64);
    number(&[0x18], answer.wait_ms as u64);
    number(&[0x80, 0x01], answer.retry_after_ms as u64);
    if answer.tokens_available != 0.0 {
        to.put(&[0x89, 0x01]);
        to.put(&answer.tokens_available.to_le_bytes());
    }
    if let Some((namespace, name)) = &answer.bucket {
        to.put(&[0x92, 0x01]);
        to.number((namespace.len() + 1 + name.len()) as u64);
        to.put(namespace.as_bytes());
        to.put(b":");
        to.put(name.as_bytes());
    }
    if answer.soft_limited {
        to.put(&[0x98, 0x01, 1]);
    }
    if answer.degraded {
        to.put(&[0xa0, 0x01, 1]);
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use proptest::prelude::*;
    use prost::Message as _;
    use tollgate_proto::doorman::{
        GetServerCapacityRequest, Lease, PriorityBandAggregate, ReleaseCapacityRequest,
        ServerCapacityResourceRequest,
    };

    use super::super::response;
    use super::*;
    use crate::service::allow::Status;

    fn requests() -> impl Strategy<Value = AllowRequest> {
        let number = || prop_oneof![any::<i64>(), 0..300i64, Just(0)];
        (".{0,20}", ".{0,200}", number(), number(), any::<bool>()).prop_map(
            |(namespace, bucket_name, tokens_requested, max_wait_millis_override, says)| {
                AllowRequest {
                    namespace,
                    bucket_name,
                    tokens_requested,
                    max_wait_millis_override,
                    max_wait_time_override: says,
                }
            },
        )
    }

    fn answers() -> impl Strategy<Value = Answer<'static>> {
        let number = || prop_oneof![any::<i64>(), 0..300i64, Just(0)];
        let statuses = [
            Status::Ok,
            Status::Timeout,
            Status::NoBucket,
            Status::TooManyBuckets,
            Status::TooManyTokens,
            Status::Invalid,
            Status::ServerError,
        ];
        let bucket = prop::option::of((prop_oneof![Just("aé"), Just("")], ".{0,200}"));
        (
            (prop::sample::select(statuses.to_vec()), number(), number(), number()),
            (any::<f64>(), bucket, any::<bool>(), any::<bool>()),
        )
            .prop_map(|(numbers, others)| Answer {
                status: numbers.0,
                tokens_granted: numbers.1,
                wait_ms: numbers.2,
                retry_after_ms: numbers.3,
                tokens_available: others.0,
                bucket: others.1.map(|(namespace, name)| (namespace, Cow::Owned(name))),
                soft_limited: others.2,
                degraded: others.3,
            })
    }

    #[test]
    fn parts_of_two_levels_are_counted() {
        let wants = PriorityBandAggregate::default();
        let resource = ServerCapacityResourceRequest {
            resource_id: "id".to_owned(),
            has: Some(Lease::default()),
            wants: vec![wants; 3],
            forgotten: Some(true),
        };
        let request =
            GetServerCapacityRequest { server_id: "me".to_owned(), resource: vec![resource; 2] };
        assert_eq!(parts(&request.encode_to_vec()), 1 + 2 * (1 + 1 + 1 + 3));
        let request = ReleaseCapacityRequest {
            client_id: "me".to_owned(),
            resource_id: vec![String::new(); 1000],
        };
        assert_eq!(parts(&request.encode_to_vec()), 1001);
    }

    proptest! {
        #[test]
        fn parts_of_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            prop_assert!(parts(&bytes) <= bytes.len());
        }

        #[test]
        fn requests_as_the_generated_code_reads_them(request in requests()) {
            let bytes = request.encode_to_vec();
            let negative = request.tokens_requested < 0 || request.max_wait_millis_override < 0;
            match read(&bytes) {
                Some(read) => prop_assert_eq!(read, query(&request)),
                None => prop_assert!(negative),
            }
        }

        #[test]
        fn bytes_as_the_generated_code_reads_them(
            request in requests(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            length in any::<prop::sample::Index>(),
        ) {
            let mut bytes = request.encode_to_vec();
            bytes.push(0);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(length.index(bytes.len() + 1));
            if let Some(read) = read(&bytes) {
                let request = AllowRequest::decode(&*bytes);
                prop_assert_eq!(Ok(read), request.as_ref().map(query).map_err(Clone::clone));
            }
        }

        #[test]
        fn answers_as_the_generated_code_writes_them(answer in answers()) {
            let expected = response(&answer).encode_to_vec();
            let written = written(&answer);
            let (prefix, message) = written.split_first_chunk::<PREFIX>().expect("a prefix");
            prop_assert_eq!(message, &expected);
            prop_assert_eq!(prefix[0], 0);
            prop_assert_eq!(&prefix[1..], &(expected.len() as u32).to_be_bytes());
        }
    }
}
