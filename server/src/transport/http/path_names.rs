//! Names in a path.

use axum::http::{StatusCode, Uri};
use axum::response::Response;
use percent_encoding::percent_decode_str;

use super::error_response;

/// The two names in a path that begins with `prefix`; `form` says which, such as `NAMESPACE/BUCKET`. The second
/// may have slashes, as such or as `%2F`, the first only as `%2F`. The names are decoded once, and not validated.
#[expect(clippy::result_large_err, reason = "the error is the response, sent at once")]
pub(super) fn names(uri: &Uri, prefix: &str, form: &str) -> Result<(String, String), Response> {
    let bad = |text: &str| error_response(StatusCode::BAD_REQUEST, text);
    let path = uri.path().strip_prefix(prefix).unwrap_or_default();
    let (first, second) = path
        .split_once('/')
        .ok_or_else(|| bad(&format!("the path needs two names: {prefix}{form}")))?;
    let decoded = |part: &str| decoded(part).map_err(bad);
    Ok((decoded(first)?, decoded(second)?))
}

/// The one name in a path that begins with `prefix`. It may have slashes as `%2F`. It is decoded once, and not
/// validated.
#[expect(clippy::result_large_err, reason = "the error is the response, sent at once")]
pub(super) fn name(uri: &Uri, prefix: &str) -> Result<String, Response> {
    let path = uri.path().strip_prefix(prefix).unwrap_or_default();
    let name = match path.contains('/') {
        true => Err("a / in the name must be written as %2F"),
        false => decoded(path),
    };
    name.map_err(|text| error_response(StatusCode::BAD_REQUEST, text))
}

fn decoded(part: &str) -> Result<String, &'static str> {
    let is_hex = |at: usize| part.as_bytes().get(at).is_some_and(u8::is_ascii_hexdigit);
    if part.match_indices('%').any(|(at, _)| !is_hex(at + 1) || !is_hex(at + 2)) {
        return Err("a name in the path has a % without two hexadecimal digits");
    }
    let name = percent_decode_str(part).decode_utf8();
    Ok(name.map_err(|_| "a name in the path is not UTF-8 text")?.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded_once() {
        for (path, expected) in [
            ("shop/cart", Ok(("shop", "cart"))),
            ("shop/a/b", Ok(("shop", "a/b"))),
            ("shop/a%2Fb", Ok(("shop", "a/b"))),
            ("a%2fb/c", Ok(("a/b", "c"))),
            ("shop/%252F", Ok(("shop", "%2F"))),
            ("shop/..", Ok(("shop", ".."))),
            ("shop/%E2%82%AC", Ok(("shop", "€"))),
            ("shop/%00", Ok(("shop", "\0"))),
            ("shop/", Ok(("shop", ""))),
            ("/cart", Ok(("", "cart"))),
            ("shop", Err(StatusCode::BAD_REQUEST)),
            ("", Err(StatusCode::BAD_REQUEST)),
            ("shop/%", Err(StatusCode::BAD_REQUEST)),
            ("shop/%2", Err(StatusCode::BAD_REQUEST)),
            ("shop/%+1", Err(StatusCode::BAD_REQUEST)),
            ("shop/%FF", Err(StatusCode::BAD_REQUEST)),
        ] {
            let uri: Uri = format!("/v1/buckets/{path}").parse().expect("a path");
            let found = names(&uri, "/v1/buckets/", "").map_err(|refused| refused.status());
            let expected = expected.map(|(a, b): (&str, &str)| (a.to_owned(), b.to_owned()));
            assert_eq!(found, expected, "{path}");
        }
    }
}
