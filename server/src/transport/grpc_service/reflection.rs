//! Server reflection. Adds what tonic's service lacks: both versions of the protocol, whose
//! messages are the same; an error as the answer to one request instead of the end of the stream;
//! and limits on unfinished messages.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::Response;
use http::header::CONTENT_TYPE;
use http_body_util::BodyExt as _;
use prost::Message as _;
use tokio::sync::Semaphore;
use tonic::service::Routes;
use tonic::{Code, Status};
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ErrorResponse, ServerReflectionRequest, ServerReflectionResponse};

use super::super::budget::{Account, HeldBytes};
use super::super::connection::{RequestBody, Responder};
use super::super::messages::PREFIX;
use super::body::{
    MessageLimits, decompressed, drain, message_length, too_long, unfinished_slot, without_prefix,
};
use super::call::ConnectionState;
use super::head::{CallHeaders, Method};
use super::response::{GRPC, deadline_exceeded, trailers};
use super::router::call_router;

/// Answers requests until the client ends the call, its deadline passes, or it takes longer than
/// `send_timeout` to read an answer. `state` limits the unfinished messages of the connection, and
/// counts the bytes read but not answered.
pub(super) async fn reflect(
    routes: &Routes,
    head: CallHeaders,
    body: RequestBody,
    responder: Responder,
    send_timeout: Duration,
    state: &ConnectionState,
) {
    let mut response = Response::new(());
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    let Some(mut stream) = responder.begin(response) else { return };
    let mut messages = Messages {
        body,
        gzip: head.gzip,
        buffer: BytesMut::new(),
        unfinished: &state.unfinished,
        account: &state.incoming,
        held: state.incoming.count(0),
    };
    let answer_all = async {
        while let Some(message) = messages.next().await? {
            let answer = answer_message(routes, message).await?;
            let sent = tokio::time::timeout(send_timeout, stream.message(answer)).await;
            if sent.map_err(|_| deadline_exceeded())?.is_none() {
                return Ok(());
            }
        }
        Ok(())
    };
    let limit = head.limit.unwrap_or(Duration::MAX);
    let ended: Result<(), Status> =
        tokio::time::timeout(limit, answer_all).await.unwrap_or_else(|_| Err(deadline_exceeded()));
    stream.end(trailers(ended));
    drain(messages.body).await;
}

/// Reads the messages of a call one by one.
struct Messages<'a> {
    body: RequestBody,
    gzip: bool,
    buffer: BytesMut,
    unfinished: &'a Semaphore,
    account: &'a Account,
    held: HeldBytes,
}

impl Messages<'_> {
    /// The next message with its gRPC prefix, decompressed; `None` at the end of the call.
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        while self.buffer.is_empty() {
            if !self.read_more().await? {
                return Ok(None);
            }
        }
        if let Some(message) = self.split_message()? {
            return Ok(Some(message));
        }
        let unfinished = self.unfinished;
        let _slot = unfinished_slot(unfinished)?;
        let rest = async {
            loop {
                if let Some(message) = self.split_message()? {
                    return Ok(Some(message));
                }
                if !self.read_more().await? {
                    return Err(Status::internal("the message is shorter than it says"));
                }
            }
        };
        let rest = tokio::time::timeout(MessageLimits::SMALL.timeout, rest).await;
        rest.unwrap_or_else(|_| {
            Err(Status::deadline_exceeded("the message was not received completely in time"))
        })
    }

    /// Waits for more bytes; `false` at the end of the call.
    async fn read_more(&mut self) -> Result<bool, Status> {
        match self.body.data().await {
            None => Ok(false),
            Some(Err(error)) => Err(Status::cancelled(error.to_string())),
            Some(Ok(data)) => {
                self.buffer.extend_from_slice(&data);
                self.held.set(self.buffer.len());
                self.account.wait_for_room().await;
                self.body.release();
                Ok(true)
            }
        }
    }

    fn split_message(&mut self) -> Result<Option<Bytes>, Status> {
        let Some(length) = message_length(&self.buffer) else { return Ok(None) };
        if length > MessageLimits::SMALL.max_bytes {
            return Err(too_long(MessageLimits::SMALL.max_bytes));
        }
        if self.buffer.len() < PREFIX + length {
            return Ok(None);
        }
        let message = self.buffer.split_to(PREFIX + length).freeze();
        self.held.set(self.buffer.len());
        decompressed(message, self.gzip, MessageLimits::SMALL).map(Some)
    }
}

/// Answers one request with tonic's service. Its errors become an answer too.
async fn answer_message(routes: &Routes, message: Bytes) -> Result<Bytes, Status> {
    let request = ServerReflectionRequest::decode(without_prefix(message.clone())?)
        .map_err(|error| Status::internal(error.to_string()))?;
    let response = call_router(routes, Method::Reflection, message, None).await;
    let (head, body) = response.into_parts();
    let body = body.collect().await?;
    let ended = body.trailers().or(Some(&head.headers)).and_then(Status::from_header_map);
    let answer = body.to_bytes();
    match ended {
        Some(status) if status.code() != Code::Ok => Ok(error_response(request, &status)),
        _ => Ok(answer),
    }
}

/// An `ErrorResponse` to `request`, with its gRPC prefix.
fn error_response(request: ServerReflectionRequest, status: &Status) -> Bytes {
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
