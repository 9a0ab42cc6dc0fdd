//! The headers of a gRPC call, read before any of its message.

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use tonic::Status;
use tonic::metadata::{Ascii, MetadataValue};

use super::super::connection::{MAX_HEADER_BYTES, header_bytes};

/// The compressions that a request may have.
const ENCODINGS: &str = "identity,gzip";

/// Maximum characters of an unknown path that a status repeats.
const MAX_SHOWN_CHARS: usize = 100;

/// The method that a call is to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Allow,
    /// A method of `doorman.Capacity` that needs the right to lease, by its path.
    Lease(&'static str),
    Discovery,
    /// Envoy's `ShouldRateLimit`.
    RateLimit,
    /// A request for hits or about holds, or a settlement, by its path.
    Tenants(&'static str),
    /// The renewal of sessions, of which a call has many.
    KeepAlive,
    Check,
    Watch,
    Reflection,
}

pub(super) const ALLOW: &str = "/quotaservice.QuotaService/Allow";
pub(super) const HEALTH: &str = "/grpc.health.v1.Health/";
pub(super) const CHECK: &str = "/grpc.health.v1.Health/Check";
pub(super) const WATCH: &str = "/grpc.health.v1.Health/Watch";
pub(super) const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

/// The messages of this version are the same as those of `v1`.
const REFLECTION_ALPHA: &str = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

const METHODS: [(&str, Method); 17] = [
    (ALLOW, Method::Allow),
    (RATE_LIMIT, Method::RateLimit),
    ("/doorman.Capacity/GetCapacity", Method::Lease("/doorman.Capacity/GetCapacity")),
    ("/doorman.Capacity/GetServerCapacity", Method::Lease("/doorman.Capacity/GetServerCapacity")),
    ("/doorman.Capacity/ReleaseCapacity", Method::Lease("/doorman.Capacity/ReleaseCapacity")),
    (DISCOVERY, Method::Discovery),
    ("/tollgate.v1.Throttle/Request", Method::Tenants("/tollgate.v1.Throttle/Request")),
    ("/tollgate.v1.Holds/Reserve", Method::Tenants("/tollgate.v1.Holds/Reserve")),
    ("/tollgate.v1.Holds/Release", Method::Tenants("/tollgate.v1.Holds/Release")),
    ("/tollgate.v1.Holds/Transfer", Method::Tenants("/tollgate.v1.Holds/Transfer")),
    ("/tollgate.v1.Holds/EndSession", Method::Tenants("/tollgate.v1.Holds/EndSession")),
    ("/tollgate.v1.Buckets/Settle", Method::Tenants("/tollgate.v1.Buckets/Settle")),
    (KEEP_ALIVE, Method::KeepAlive),
    (CHECK, Method::Check),
    (WATCH, Method::Watch),
    (REFLECTION, Method::Reflection),
    (REFLECTION_ALPHA, Method::Reflection),
];

const RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const DISCOVERY: &str = "/doorman.Capacity/Discovery";
const KEEP_ALIVE: &str = "/tollgate.v1.Holds/KeepAlive";

impl Method {
    /// The method with this path. The error names an unknown path.
    pub(super) fn at(path: &str) -> Result<Self, Status> {
        let found = METHODS.iter().find(|(at, _)| *at == path);
        found.map(|(_, method)| *method).ok_or_else(|| {
            let shown: String = path.chars().take(MAX_SHOWN_CHARS).collect();
            Status::unimplemented(format!("unknown method {shown}"))
        })
    }

    /// The path of the method in tonic's router.
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Allow => ALLOW,
            Self::Lease(path) | Self::Tenants(path) => path,
            Self::RateLimit => RATE_LIMIT,
            Self::Discovery => DISCOVERY,
            Self::KeepAlive => KEEP_ALIVE,
            Self::Check => CHECK,
            Self::Watch => WATCH,
            Self::Reflection => REFLECTION,
        }
    }

    /// Whether calls take a slot. Health and reflection take none, so that operators are answered
    /// even by an overloaded node.
    pub(super) fn is_counted(self) -> bool {
        !matches!(self, Self::Check | Self::Watch | Self::Reflection)
    }
}

/// The deadline and encoding of a call.
pub(super) struct CallHeaders {
    /// Time from the headers to the answer; `None` if the caller sets no deadline.
    pub(super) limit: Option<Duration>,
    /// Whether the message may be compressed.
    pub(super) gzip: bool,
}

impl CallHeaders {
    /// Reads `headers`. An error says why the call can't be served.
    pub(super) fn read(headers: &HeaderMap) -> Result<Self, Status> {
        let length = header_bytes(headers);
        if length > MAX_HEADER_BYTES as usize {
            let text =
                format!("the metadata has {length} bytes: at most {MAX_HEADER_BYTES} are allowed");
            return Err(Status::resource_exhausted(text));
        }
        let limit = headers.get("grpc-timeout").map(timeout).transpose()?;
        let gzip = match headers.get("grpc-encoding").map(HeaderValue::as_bytes) {
            None | Some(b"identity") => false,
            Some(b"gzip") => true,
            Some(_) => return Err(unknown_encoding()),
        };
        Ok(Self { limit, gzip })
    }
}

fn unknown_encoding() -> Status {
    let text = "requests may be compressed with gzip, or not at all: choose one of these as the \
                client's compression";
    let mut status = Status::unimplemented(text);
    let encodings = MetadataValue::<Ascii>::from_static(ENCODINGS);
    status.metadata_mut().insert("grpc-accept-encoding", encodings);
    status
}

/// Parses a `grpc-timeout`: 1 to 8 digits and a unit.
pub(super) fn timeout(value: &HeaderValue) -> Result<Duration, Status> {
    let malformed =
        || Status::internal("grpc-timeout is malformed: 1 to 8 digits and one of H, M, S, m, u, n");
    let (unit, digits) = value.as_bytes().split_last().ok_or_else(malformed)?;
    if !(1..=8).contains(&digits.len()) || !digits.iter().all(u8::is_ascii_digit) {
        return Err(malformed());
    }
    let count = digits.iter().fold(0, |count, digit| count * 10 + u64::from(digit - b'0'));
    Ok(match unit {
        b'H' => Duration::from_secs(count * 3600),
        b'M' => Duration::from_secs(count * 60),
        b'S' => Duration::from_secs(count),
        b'm' => Duration::from_millis(count),
        b'u' => Duration::from_micros(count),
        b'n' => Duration::from_nanos(count),
        _ => return Err(malformed()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(name: &'static str, value: &str) -> Result<CallHeaders, Status> {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().expect("a header"));
        CallHeaders::read(&headers)
    }

    #[test]
    fn timeouts_are_parsed() {
        let read = |text| head("grpc-timeout", text).expect("well-formed").limit;
        assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(read("3M"), Some(Duration::from_secs(180)));
        assert_eq!(read("4S"), Some(Duration::from_secs(4)));
        assert_eq!(read("50m"), Some(Duration::from_millis(50)));
        assert_eq!(read("99999999u"), Some(Duration::from_micros(99_999_999)));
        assert_eq!(read("0n"), Some(Duration::ZERO));
        for wrong in ["", "S", "5", "5x", "abc", "-1S", "123456789S", "1.5S", "+5S"] {
            let status = head("grpc-timeout", wrong).err().expect(wrong);
            assert_eq!(status.code(), tonic::Code::Internal, "{wrong}");
        }
        assert_eq!(CallHeaders::read(&HeaderMap::new()).expect("nothing").limit, None);
    }

    #[test]
    fn unknown_compressions_are_refused_with_the_known_ones() {
        assert!(head("grpc-encoding", "gzip").expect("known").gzip);
        assert!(!head("grpc-encoding", "identity").expect("known").gzip);
        let status = head("grpc-encoding", "deflate").err().expect("unknown");
        assert_eq!(status.code(), tonic::Code::Unimplemented);
        assert_eq!(status.metadata().get("grpc-accept-encoding").expect("the header"), ENCODINGS);
    }

    #[test]
    fn too_much_metadata_is_refused_with_a_text() {
        let overhead = header_bytes(&HeaderMap::from_iter([(
            http::HeaderName::from_static("x"),
            HeaderValue::from_static(""),
        )]));
        let most = MAX_HEADER_BYTES as usize - overhead;
        assert!(head("x", &"y".repeat(most)).is_ok());
        let status = head("x", &"y".repeat(most + 1)).err().expect("too long");
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    }

    #[test]
    fn an_unknown_method_is_named() {
        assert!(METHODS.iter().all(|(path, method)| Method::at(path).ok() == Some(*method)));
        let status = Method::at("/a.B/C").expect_err("unknown");
        assert_eq!(status.message(), "unknown method /a.B/C");
        let status = Method::at(&"é".repeat(2 * MAX_SHOWN_CHARS)).expect_err("unknown");
        assert_eq!(status.message(), format!("unknown method {}", "é".repeat(MAX_SHOWN_CHARS)));
    }
}
