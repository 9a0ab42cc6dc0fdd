//! The header `grpc-timeout`: up to eight digits and a unit.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};

const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// From the finest, for the most exact value that eight digits can hold.
const UNITS: [(char, Duration); 6] = [
    ('n', Duration::from_nanos(1)),
    ('u', Duration::from_micros(1)),
    ('m', Duration::from_millis(1)),
    ('S', Duration::from_secs(1)),
    ('M', Duration::from_secs(60)),
    ('H', Duration::from_secs(60 * 60)),
];

const LARGEST: u128 = 99_999_999;

/// The timeout of a call. `None` if it has none, or a malformed one, which is left to its service.
pub(super) fn get(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(GRPC_TIMEOUT)?.to_str().ok()?;
    UNITS.iter().find_map(|(name, unit)| {
        let digits = text.strip_suffix(*name)?;
        let is_number = digits.len() <= 8 && digits.bytes().all(|digit| digit.is_ascii_digit());
        is_number.then(|| digits.parse().ok()).flatten().map(|number| unit.saturating_mul(number))
    })
}

/// Sets the timeout of a call, rounded down: it is never longer than the caller said.
pub(super) fn set(headers: &mut HeaderMap, timeout: Duration) {
    let numbers = UNITS.iter().map(|(name, unit)| (timeout.as_nanos() / unit.as_nanos(), name));
    // No timeout that was in such a header is too long for hours.
    let text = numbers.into_iter().find(|(number, _)| *number <= LARGEST);
    let text = text.map(|(number, name)| format!("{number}{name}"));
    if let Some(value) = text.and_then(|text| HeaderValue::try_from(text).ok()) {
        headers.insert(GRPC_TIMEOUT, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(GRPC_TIMEOUT, HeaderValue::from_str(text).unwrap());
        get(&headers)
    }

    #[test]
    fn each_unit_is_read_and_anything_else_is_none() {
        let seconds = Duration::from_secs;
        let read_as = [("3H", seconds(10_800)), ("2M", seconds(120)), ("0S", seconds(0))];
        for (text, timeout) in read_as {
            assert_eq!(read(text), Some(timeout), "{text}");
        }
        assert_eq!(read("99999999m"), Some(Duration::from_millis(99_999_999)));
        assert_eq!(read("5u"), Some(Duration::from_micros(5)));
        assert_eq!(read("5n"), Some(Duration::from_nanos(5)));
        for text in ["", "S", "5", "5s", "+5S", "-5S", "5.5S", "123456789S", "5 S", "5SS"] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(get(&HeaderMap::new()), None);
    }

    #[test]
    fn what_is_set_is_read_back_rounded_down() {
        let set_as = |timeout| {
            let mut headers = HeaderMap::new();
            set(&mut headers, timeout);
            let text = headers[GRPC_TIMEOUT].to_str().unwrap().to_owned();
            assert!(get(&headers).is_some_and(|read| read <= timeout), "{text}");
            text
        };
        assert_eq!(set_as(Duration::from_nanos(99_999_999)), "99999999n");
        assert_eq!(set_as(Duration::from_nanos(100_000_999)), "100000u");
        assert_eq!(set_as(Duration::from_millis(100_000)), "100000m");
        assert_eq!(set_as(Duration::from_secs(99_999_999)), "99999999S");
        assert_eq!(set_as(Duration::from_secs(100_000_059)), "1666667M");
        assert_eq!(set_as(Duration::from_secs(99_999_999 * 60 * 60)), "99999999H");
    }
}
