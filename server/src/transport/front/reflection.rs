//! Server reflection. What tonic's service leaves out is added around it: both versions, whose
//! messages are the same, an error as the answer to one question instead of the end of the stream,
//! and bounds on messages that do not end.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Response};
use http_body_util::BodyExt as _;
use prost::Message as _;
use tokio::sync::Semaphore;
use tonic::service::Routes;
use tonic::{Code, Status};
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ErrorResponse, ServerReflectionRequest, ServerReflectionResponse};

use super::super::budget::Held;
use super::super::connection::{Answering, Received};
use super::super::messages::PREFIX;
use super::body::{Bounds, announced, drained, inflated, place, too_long, unwrapped};
use super::head::{Head, Method};
use super::{GRPC, GRPC_STATUS, OK, asked, too_late};

/// Answers questions until the caller ends the call or its deadline is over. `unfinished` bounds
/// the questions that have begun and not ended. `held` counts what was read and not answered.
pub(super) async fn reflect(
    routes: &Routes,
    head: Head,
    body: Received,
    answering: Answering,
    unfinished: &Semaphore,
    held: Held,
) {
    let mut response = Response::new(());
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    let Some(mut sending) = answering.begin(response) else { return };
    let mut questions =
        Questions { body, gzip: head.gzip, buffer: BytesMut::new(), unfinished, held };
    let answered = async {
        while let Some(question) = questions.next().await? {
            let answer = answered(routes, question).await?;
            if sending.message(answer).await.is_none() {
                return Ok(());
            }
        }
        Ok(())
    };
    let limit = head.limit.unwrap_or(Duration::MAX);
    let ended: Result<(), Status> =
        tokio::time::timeout(limit, answered).await.unwrap_or_else(|_| Err(too_late()));
    let mut trailers = HeaderMap::new();
    match ended {
        Ok(()) => drop(trailers.insert(GRPC_STATUS, OK)),
        // It fails only for what is no header, and a status is one.
        Err(status) => drop(status.add_header(&mut trailers)),
    }
    sending.end(trailers);
    drained(questions.body).await;
}

/// The messages of a call, one after the other.
struct Questions<'a> {
    body: Received,
    gzip: bool,
    buffer: BytesMut,
    unfinished: &'a Semaphore,
    held: Held,
}

impl Questions<'_> {
    /// The next one with its prefix; `None` if the caller asks no more.
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        while self.buffer.is_empty() {
            if !self.more().await? {
                return Ok(None);
            }
        }
        if let Some(question) = self.split()? {
            return Ok(Some(question));
        }
        let unfinished = self.unfinished;
        let _place = place(unfinished)?;
        let rest = async {
            loop {
                if let Some(question) = self.split()? {
                    return Ok(Some(question));
                }
                if !self.more().await? {
                    return Err(Status::internal("the message is shorter than it says"));
                }
            }
        };
        let rest = tokio::time::timeout(Bounds::SMALL.within, rest).await;
        rest.unwrap_or_else(|_| Err(Status::deadline_exceeded("the message does not end")))
    }

    /// Waits for more bytes; `false`: there are none.
    async fn more(&mut self) -> Result<bool, Status> {
        match self.body.data().await {
            None => Ok(false),
            Some(Err(error)) => Err(Status::cancelled(error.to_string())),
            Some(Ok(data)) => {
                self.buffer.extend_from_slice(&data);
                self.held.set(self.buffer.len());
                self.body.release(data.len());
                Ok(true)
            }
        }
    }

    fn split(&mut self) -> Result<Option<Bytes>, Status> {
        let Some(length) = announced(&self.buffer) else { return Ok(None) };
        if length > Bounds::SMALL.longest {
            return Err(too_long(Bounds::SMALL.longest));
        }
        if self.buffer.len() < PREFIX + length {
            return Ok(None);
        }
        let question = self.buffer.split_to(PREFIX + length).freeze();
        self.held.set(self.buffer.len());
        inflated(question, self.gzip, Bounds::SMALL).map(Some)
    }
}

/// Asks tonic's service one question. Its error is an answer, too.
async fn answered(routes: &Routes, question: Bytes) -> Result<Bytes, Status> {
    let request = ServerReflectionRequest::decode(unwrapped(question.clone())?)
        .map_err(|error| Status::internal(error.to_string()))?;
    let response = asked(routes, Method::Reflection, question, None).await;
    let (head, body) = response.into_parts();
    let body = body.collect().await?;
    let ended = body.trailers().or(Some(&head.headers)).and_then(Status::from_header_map);
    let answer = body.to_bytes();
    match ended {
        Some(status) if status.code() != Code::Ok => Ok(error(request, &status)),
        _ => Ok(answer),
    }
}

/// That a question has no answer, on the wire.
fn error(request: ServerReflectionRequest, status: &Status) -> Bytes {
    let answer = ServerReflectionResponse {
        valid_host: request.host.clone(),
        original_request: Some(request),
        message_response: Some(MessageResponse::ErrorResponse(ErrorResponse {
            error_code: status.code().into(),
            error_message: status.message().to_owned(),
        })),
    };
    let length = answer.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    answer.encode_raw(&mut bytes);
    bytes.freeze()
}
