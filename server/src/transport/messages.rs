//! Encodes and decodes the messages of `Allow` without copies. The names in a request are borrowed
//! from its bytes, and an answer is encoded directly from the decision. Tests compare both with the
//! generated code.

use bytes::{BufMut as _, Bytes, BytesMut};
use tollgate_proto::quotaservice::{AllowRequest, allow_request};

use super::status_on_wire;
use crate::service::allow::{Answer, Criticality, Query, Status};

/// Bytes of the gRPC prefix of a message: one for the compressed flag, four for the length.
pub(super) const PREFIX: usize = 5;

/// Decodes an [`AllowRequest`]. `None` if it has an unknown field or a varint of more than 9 bytes
/// (a negative number), or is invalid: then the generated code decodes it, and words the error.
pub(super) fn decode_allow(mut bytes: &[u8]) -> Option<Query<'_>> {
    let mut query = Query::default();
    let (mut max_wait_ms, mut has_max_wait) = (0, false);
    while let Some((key, rest)) = bytes.split_first() {
        bytes = rest;
        match key {
            0x0a => query.namespace = string(&mut bytes)?,
            0x12 => query.bucket = string(&mut bytes)?,
            0x18 => query.tokens = varint(&mut bytes)? as i64,
            0x20 => max_wait_ms = varint(&mut bytes)? as i64,
            0x28 => has_max_wait = varint(&mut bytes)? != 0,
            // Field 16: the key has two bytes.
            0x80 => {
                bytes = bytes.strip_prefix(&[0x01])?;
                query.criticality = criticality(varint(&mut bytes)? as i32);
            }
            _ => return None,
        }
    }
    query.max_wait_ms = has_max_wait.then_some(max_wait_ms);
    Some(query)
}

fn criticality(number: i32) -> Criticality {
    match allow_request::Criticality::try_from(number) {
        Ok(allow_request::Criticality::Critical) => Criticality::Critical,
        Ok(allow_request::Criticality::NotCritical) => Criticality::NotCritical,
        Err(_) => Criticality::Unknown,
    }
}

fn string<'a>(bytes: &mut &'a [u8]) -> Option<&'a str> {
    let length = usize::try_from(varint(bytes)?).ok()?;
    let (string, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    std::str::from_utf8(string).ok()
}

/// A varint of up to 9 bytes; `None` if it is longer or cut off.
fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..63).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

/// Counts the length-delimited fields of a message and of the fields one level down. Decoding
/// allocates memory in proportion to this count. For an invalid message the count is arbitrary.
pub(super) fn count_parts(message: &[u8]) -> usize {
    fields(message).map(|field| 1 + fields(field).count()).sum()
}

/// The length-delimited fields of a message, up to the first invalid one.
fn fields(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        loop {
            let kind = varint(&mut bytes)? & 7;
            let length = match kind {
                0 => {
                    varint(&mut bytes)?;
                    continue;
                }
                1 => 8,
                2 => usize::try_from(varint(&mut bytes)?).ok()?,
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

/// The query of a request that the generated code has decoded.
pub(super) fn query(request: &AllowRequest) -> Query<'_> {
    Query {
        namespace: &request.namespace,
        bucket: &request.bucket_name,
        tokens: request.tokens_requested,
        max_wait_ms: request.max_wait_time_override.then_some(request.max_wait_millis_override),
        criticality: criticality(request.criticality),
    }
}

/// Encodes a message with its gRPC prefix.
pub(super) fn encode(message: &impl prost::Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    bytes.extend_from_slice(&message.encode_to_vec());
    bytes.freeze()
}

/// Encodes an answer as an `AllowResponse` with its gRPC prefix.
pub(super) fn encode_allow(answer: &Answer<'_>) -> Bytes {
    let mut length = 0;
    write(answer, &mut length);
    // Exact capacity: otherwise the bytes are moved once more when they become shared.
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    write(answer, &mut bytes);
    bytes.freeze()
}

/// The target of encoding: a buffer, or a byte count.
trait Sink {
    fn put(&mut self, bytes: &[u8]);

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.put(&[value as u8 | 0x80]);
            value >>= 7;
        }
        self.put(&[value as u8]);
    }
}

/// Counts the bytes only.
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

/// Writes the fields in the order of their numbers, without those that have the default value.
fn write(answer: &Answer<'_>, to: &mut impl Sink) {
    let mut field = |key: &[u8], value: u64| {
        if value != 0 {
            to.put(key);
            to.varint(value);
        }
    };
    field(&[0x08], status_on_wire(answer.status) as u64);
    field(&[0x10], answer.tokens_granted as u64);
    field(&[0x18], answer.wait_ms as u64);
    field(&[0x80, 0x01], answer.retry_after_ms as u64);
    if answer.tokens_available != 0.0 {
        to.put(&[0x89, 0x01]);
        to.put(&answer.tokens_available.to_le_bytes());
    }
    if let Some((namespace, name)) = &answer.bucket {
        to.put(&[0x92, 0x01]);
        to.varint((namespace.len() + 1 + name.len()) as u64);
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
    if answer.shadow {
        to.put(&[0xa8, 0x01, 1]);
    }
    let (size, fill_rate) = answer.limit;
    if size != 0 {
        to.put(&[0xb8, 0x01]);
        to.varint(size);
    }
    if fill_rate != 0.0 {
        to.put(&[0xc1, 0x01]);
        to.put(&fill_rate.to_le_bytes());
    }
    if answer.status == Status::Banned {
        to.put(&[0xc8, 0x01, 1]);
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

    fn requests() -> impl Strategy<Value = AllowRequest> {
        let number = || prop_oneof![any::<i64>(), 0..300i64, Just(0)];
        let criticality = prop_oneof![0..3, any::<i32>()];
        (".{0,20}", ".{0,200}", number(), number(), any::<bool>(), criticality).prop_map(
            |(namespace, bucket_name, tokens_requested, max_wait, has_max_wait, criticality)| {
                AllowRequest {
                    namespace,
                    bucket_name,
                    tokens_requested,
                    max_wait_millis_override: max_wait,
                    max_wait_time_override: has_max_wait,
                    settle: false,
                    criticality,
                }
            },
        )
    }

    fn answers() -> impl Strategy<Value = Answer<'static>> {
        let number = || prop_oneof![any::<i64>(), 0..300i64, Just(0)];
        let statuses = [
            Status::Ok,
            Status::Timeout,
            Status::Banned,
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
            (any::<bool>(), 0..=i64::MAX as u64, prop_oneof![any::<f64>(), Just(0.0)]),
        )
            .prop_map(|(numbers, flags, limit)| Answer {
                status: numbers.0,
                tokens_granted: numbers.1,
                wait_ms: numbers.2,
                retry_after_ms: numbers.3,
                tokens_available: flags.0,
                bucket: flags.1.map(|(namespace, name)| (namespace, Cow::Owned(name))),
                soft_limited: flags.2,
                degraded: flags.3,
                shadow: limit.0,
                limit: (limit.1, limit.2),
            })
    }

    #[test]
    fn count_parts_counts_two_levels() {
        let wants = PriorityBandAggregate::default();
        let resource = ServerCapacityResourceRequest {
            resource_id: "id".to_owned(),
            has: Some(Lease::default()),
            wants: vec![wants; 3],
            forgotten: Some(true),
        };
        let request =
            GetServerCapacityRequest { server_id: "me".to_owned(), resource: vec![resource; 2] };
        assert_eq!(count_parts(&request.encode_to_vec()), 1 + 2 * (1 + 1 + 1 + 3));
        let request = ReleaseCapacityRequest {
            client_id: "me".to_owned(),
            resource_id: vec![String::new(); 1000],
        };
        assert_eq!(count_parts(&request.encode_to_vec()), 1001);
    }

    proptest! {
        #[test]
        fn count_parts_of_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            prop_assert!(count_parts(&bytes) <= bytes.len());
        }

        #[test]
        fn requests_decode_as_in_generated_code(request in requests()) {
            let bytes = request.encode_to_vec();
            let negative = request.tokens_requested < 0
                || request.max_wait_millis_override < 0
                || request.criticality < 0;
            match decode_allow(&bytes) {
                Some(decoded) => prop_assert_eq!(decoded, query(&request)),
                None => prop_assert!(negative),
            }
        }

        #[test]
        fn changed_bytes_decode_as_in_generated_code(
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
            if let Some(decoded) = decode_allow(&bytes) {
                let request = AllowRequest::decode(&*bytes);
                prop_assert_eq!(Ok(decoded), request.as_ref().map(query).map_err(Clone::clone));
            }
        }

        #[test]
        fn answers_encode_as_in_generated_code(answer in answers()) {
            let expected = response(&answer).encode_to_vec();
            let encoded = encode_allow(&answer);
            let (prefix, message) = encoded.split_first_chunk::<PREFIX>().expect("a prefix");
            prop_assert_eq!(message, &expected);
            prop_assert_eq!(prefix[0], 0);
            prop_assert_eq!(&prefix[1..], &(expected.len() as u32).to_be_bytes());
        }
    }
}
