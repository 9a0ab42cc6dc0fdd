//! The size of request headers.

use http::{HeaderMap, HeaderName, HeaderValue};

/// Maximum size of a request's headers, in bytes.
pub(in crate::transport) const MAX_HEADER_BYTES: u32 = 16 << 10;

/// Bytes that a header takes beside its name and value (RFC 9113, 6.5.2).
const HEADER_OVERHEAD: usize = 32;

/// The size of `headers` in bytes, as HTTP/2 counts it.
pub(in crate::transport) fn header_bytes(headers: &HeaderMap) -> usize {
    let bytes = |(name, value): (&HeaderName, &HeaderValue)| {
        name.as_str().len() + value.len() + HEADER_OVERHEAD
    };
    headers.iter().map(bytes).sum()
}
