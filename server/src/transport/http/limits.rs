//! `/v1/limits`: the document of the limits.

use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{ConnectInfo, Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use http_body_util::BodyExt as _;
use serde_json::json;
use tokio::task::spawn_blocking;

use super::changes::Change;
use super::connection_context::ConnectionContext;
use super::{ApiState, access_denied, error_response, service_error};
use crate::access::Caller;
use crate::service::documents::{Checked, Document, DocumentError, NewDocument};
use crate::store::look::Looks;
use crate::store::{Administration, LeaseStore};

/// Maximum document, in bytes.
pub(super) const DOCUMENT_LIMIT: usize = 16 << 20;

/// `GET`: the document as it was written, or as JSON with all defaults.
pub(super) async fn show<B: Looks, L: LeaseStore + Administration>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    headers: HeaderMap,
) -> Result<Response, Response> {
    caller.may_see_all().map_err(access_denied)?;
    if wants_json(&headers) {
        let Document { text, version } =
            state.documents.current_as_json().await.map_err(refusal)?;
        return Ok(document_answer(version, "application/json", Bytes::from_owner(Text(text))));
    }
    let Document { text, version } = state.documents.current();
    Ok(document_answer(version, "application/yaml", Bytes::from_owner(Text(text))))
}

fn document_answer(version: u64, content_type: &'static str, text: Bytes) -> Response {
    let headers = [
        (header::ETAG, etag(version)),
        (header::CONTENT_TYPE, content_type.to_owned()),
        (header::VARY, "accept".to_owned()),
    ];
    (headers, text).into_response()
}

/// `GET /v1/limits/versions`: what is known of the versions that the store keeps.
pub(super) async fn history<B: Looks, L: LeaseStore + Administration>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
) -> Result<Response, Response> {
    caller.may_see_all().map_err(access_denied)?;
    let versions = state.documents.history().await.map_err(refusal)?;
    let in_use = state.documents.current().version;
    Ok(Json(json!({ "in_use": in_use, "versions": versions })).into_response())
}

/// `GET /v1/limits/versions/{number}`: one of them, as it was written, or as JSON with all defaults.
pub(super) async fn version<B: Looks, L: LeaseStore + Administration>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    Path(number): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Response> {
    caller.may_see_all().map_err(access_denied)?;
    let number = number.parse();
    let number: u64 =
        number.map_err(|_| error_response(StatusCode::NOT_FOUND, "a version is a number"))?;
    if wants_json(&headers) {
        let text = state.documents.version_as_json(number).await.map_err(refusal)?;
        return Ok(document_answer(number, "application/json", text.into()));
    }
    let found = state.documents.version(number).await.map_err(refusal)?;
    Ok(document_answer(number, "application/yaml", Bytes::from_owner(Text(found.text))))
}

/// A shared text as the bytes of a body, which are not copied.
struct Text(Arc<str>);

impl AsRef<[u8]> for Text {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// Whether JSON is preferred to YAML.
fn wants_json(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut types = accepted.flat_map(|value| value.split(','));
    let wanted = types.find_map(|range| match range.split(';').next().unwrap_or_default().trim() {
        "application/json" => Some(true),
        "application/yaml" | "application/x-yaml" | "text/yaml" | "text/plain" => Some(false),
        _ => None,
    });
    wanted.unwrap_or(false)
}

fn etag(version: u64) -> String {
    format!("\"{version}\"")
}

/// The version in `If-Match`, which a change replaces; `None` without the header.
#[expect(clippy::result_large_err, reason = "the error is the response, sent at once")]
fn replaced_version(headers: &HeaderMap) -> Result<Option<u64>, Response> {
    let mut values = headers.get_all(header::IF_MATCH).iter();
    let (value, other) = match (values.next(), values.next()) {
        (None, _) => return Ok(None),
        (Some(value), other) => (value.to_str().unwrap_or_default().trim(), other),
    };
    let quoted = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
    let number = quoted.unwrap_or(value).parse().ok().filter(|_| other.is_none());
    number.map(Some).ok_or_else(|| {
        let text = "If-Match must be one version, such as \"7\"";
        error_response(StatusCode::BAD_REQUEST, text)
    })
}

/// The query of `PUT`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ChangeQuery {
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    message: String,
}

/// `PUT`: puts a new document in use, or with `dry_run` only says what it would change.
pub(super) async fn put<B: Looks, L: LeaseStore + Administration>(
    State(state): State<Arc<ApiState<B, L>>>,
    ConnectInfo(context): ConnectInfo<ConnectionContext>,
    caller: Caller,
    query: Result<Query<ChangeQuery>, QueryRejection>,
    request: Request,
) -> Result<Response, Response> {
    // Admission has checked this before it read the body.
    caller.may_administer().map_err(access_denied)?;
    let Query(query) = query.map_err(|error| error_response(error.status(), &error.body_text()))?;
    let change = Change::of(&request, &context, &caller);
    let (head, body) = request.into_parts();
    let text = document(body).await?;
    if query.dry_run {
        let checked = state.documents.check(text).await.map_err(refusal)?;
        return Ok(answer(checked).await);
    }
    state.documents.check_owner().map_err(refusal)?;
    let replaces = replaced_version(&head.headers)?.ok_or_else(|| {
        let text = "If-Match must name the version that the change replaces: see ETag of GET";
        error_response(StatusCode::PRECONDITION_REQUIRED, text)
    })?;
    let author = change.author(query.message)?;
    let new = NewDocument { text, replaces, author };
    made(change, async move { state.documents.replace(new).await }).await
}

/// The text in a body that admission has read.
async fn document(body: Body) -> Result<String, Response> {
    let bytes = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    String::from_utf8(bytes.into()).map_err(|_| {
        error_response(StatusCode::UNPROCESSABLE_ENTITY, "the document is not UTF-8 text")
    })
}

/// The query of a rollback.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RollbackQuery {
    to: u64,
    #[serde(default)]
    message: String,
}

/// `POST /v1/limits/rollback`: makes a new version with the text of an older one.
pub(super) async fn roll_back<B: Looks, L: LeaseStore + Administration>(
    State(state): State<Arc<ApiState<B, L>>>,
    ConnectInfo(context): ConnectInfo<ConnectionContext>,
    caller: Caller,
    query: Result<Query<RollbackQuery>, QueryRejection>,
    request: Request,
) -> Result<Response, Response> {
    caller.may_administer().map_err(access_denied)?;
    let Query(RollbackQuery { to, message }) =
        query.map_err(|error| error_response(error.status(), &error.body_text()))?;
    let replaces = replaced_version(request.headers())?;
    let change = Change::of(&request, &context, &caller);
    let author = change.author(message)?;
    made(change, async move { state.documents.roll_back(to, replaces, author).await }).await
}

async fn made(
    change: Change,
    replace: impl Future<Output = Result<Checked, DocumentError>> + Send + 'static,
) -> Result<Response, Response> {
    let what = |Checked { version, differences, .. }: &Checked| {
        let differences = differences.len();
        format!("the limits have version {version}: {differences} values differ")
    };
    Ok(answer(change.make(replace, refusal, what).await?).await)
}

/// The differences may have megabytes.
async fn answer(checked: Checked) -> Response {
    let write = move || ([(header::ETAG, etag(checked.version))], Json(&checked)).into_response();
    spawn_blocking(write).await.unwrap_or_else(|_| super::stopping())
}

fn refusal(error: DocumentError) -> Response {
    let text = error.to_string();
    match error {
        DocumentError::Faulty(faults) => {
            let faults = faults.0.iter().map(|fault| {
                json!({ "line": fault.line, "path": fault.path, "text": fault.to_string() })
            });
            let body = json!({ "error": text, "faults": faults.collect::<Vec<_>>() });
            (StatusCode::UNPROCESSABLE_ENTITY, Json(body)).into_response()
        }
        DocumentError::InFile(_) => error_response(StatusCode::FORBIDDEN, &text),
        DocumentError::NoVersions(_) | DocumentError::NoVersion(_) => {
            error_response(StatusCode::NOT_FOUND, &text)
        }
        DocumentError::Conflict(current) => {
            let body = json!({ "error": text, "version": current });
            (StatusCode::CONFLICT, [(header::ETAG, etag(current))], Json(body)).into_response()
        }
        DocumentError::TooLong => error_response(StatusCode::PAYLOAD_TOO_LARGE, &text),
        DocumentError::Service(error) => service_error(&error),
        DocumentError::Stopping => super::stopping(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_known_type_counts() {
        for (accept, expected) in [
            (&[][..], false),
            (&["*/*"], false),
            (&["application/json"], true),
            (&["text/html, application/json;q=0.9, */*"], true),
            (&["application/yaml, application/json"], false),
            (&["text/html", "application/json"], true),
        ] {
            let mut headers = HeaderMap::new();
            for value in accept {
                headers.append(header::ACCEPT, value.parse().expect("a value"));
            }
            assert_eq!(wants_json(&headers), expected, "{accept:?}");
        }
    }
}
