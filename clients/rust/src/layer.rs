//! A `tower` layer: each request takes tokens before the inner service is called.

mod answer;
mod timeout;

use std::borrow::Cow;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};
use http_body_util::{Either, Full};
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use self::answer::NoToken;
use crate::client::Client;
use crate::request::Request;

/// The body of a response: the layer's own, or that of the inner service.
pub type QuotaBody<B> = Either<Full<Bytes>, B>;

/// Takes a token before each request, for servers (axum, tonic, hyper) and for tonic's channels.
///
/// A request that gets none is answered in place of the inner service, in the form of gRPC if its
/// `content-type` is `application/grpc…`:
///
/// | | HTTP | gRPC |
/// |---|---|---|
/// | refused | 429 with `Retry-After` | `RESOURCE_EXHAUSTED` with a `google.rpc.RetryInfo` |
/// | no node decides, and there is no fallback | 503 | `UNAVAILABLE` |
/// | the bucket's name is invalid | 400 | `INVALID_ARGUMENT` |
/// | nothing is left of the call's timeout | | `DEADLINE_EXCEEDED` |
///
/// `Retry-After` and `RetryInfo` are left out where nobody knows when to try again.
///
/// A gRPC call waits no longer than its timeout (`grpc-timeout`), the question included, and goes on
/// with what is left of it. A stream counts as one call. If the future is dropped before the inner
/// service is called, tokens that were granted are lost.
///
/// A server:
///
/// ```
/// use axum::Router;
/// use axum::routing::get;
/// use tollgate_client::{Bucket, Client, QuotaLayer};
///
/// fn app(client: Client) -> Router {
///     let quota = QuotaLayer::new(client, |_| Some(Bucket::new("web", "requests")));
///     Router::new().route("/", get(|| async { "hello" })).layer(quota)
/// }
/// ```
///
/// A channel, with a bucket for each method:
///
/// ```
/// use std::time::Duration;
/// use tollgate_client::{Bucket, Client, QuotaLayer};
/// use tonic::transport::Channel;
/// use tonic_health::pb::health_client::HealthClient;
/// use tower::ServiceBuilder;
///
/// # async fn example(client: Client, channel: Channel) -> Result<(), tonic::Status> {
/// let quota = QuotaLayer::new(client, |call| Some(Bucket::new("db", call.uri().path().to_owned())))
///     .max_wait(Duration::from_secs(1));
/// let mut health = HealthClient::new(ServiceBuilder::new().layer(quota).service(channel));
/// # health.check(tonic_health::pb::HealthCheckRequest::default()).await?;
/// # Ok(())
/// # }
/// ```
pub struct QuotaLayer<F> {
    client: Client,
    bucket_of: Arc<F>,
    max_wait: Duration,
}

impl<F> QuotaLayer<F> {
    /// `bucket_of` says which bucket a request takes a token of; `None` if it takes none.
    pub fn new<B>(client: Client, bucket_of: F) -> Self
    where
        F: Fn(&http::Request<B>) -> Option<Bucket>,
    {
        Self { client, bucket_of: Arc::new(bucket_of), max_wait: Duration::ZERO }
    }

    /// The longest wait for a token. Without it, a request that would have to wait is refused.
    ///
    /// A request that waits already has its place in the inner service. Where those are few, as in a
    /// channel of tonic (1024, see its `buffer_size`), requests beyond them wait until one is free,
    /// in addition to this.
    pub fn max_wait(self, max_wait: Duration) -> Self {
        Self { max_wait, ..self }
    }
}

impl<F> Clone for QuotaLayer<F> {
    fn clone(&self) -> Self {
        let Self { client, bucket_of, max_wait } = self;
        Self { client: client.clone(), bucket_of: Arc::clone(bucket_of), max_wait: *max_wait }
    }
}

impl<F, S> Layer<S> for QuotaLayer<F> {
    type Service = QuotaService<F, S>;

    fn layer(&self, inner: S) -> Self::Service {
        QuotaService { layer: self.clone(), inner }
    }
}

/// A bucket of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    namespace: Cow<'static, str>,
    bucket: Cow<'static, str>,
}

impl Bucket {
    /// The bucket `bucket` of `namespace`. Where users choose a name, the limits need
    /// `max_dynamic_buckets`: each name makes a bucket.
    pub fn new(
        namespace: impl Into<Cow<'static, str>>,
        bucket: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { namespace: namespace.into(), bucket: bucket.into() }
    }
}

/// A service behind a [`QuotaLayer`].
pub struct QuotaService<F, S> {
    layer: QuotaLayer<F>,
    inner: S,
}

impl<F, S: Clone> Clone for QuotaService<F, S> {
    fn clone(&self) -> Self {
        Self { layer: self.layer.clone(), inner: self.inner.clone() }
    }
}

impl<F, S, B, R> Service<http::Request<B>> for QuotaService<F, S>
where
    F: Fn(&http::Request<B>) -> Option<Bucket>,
    S: Service<http::Request<B>, Response = http::Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    type Response = http::Response<QuotaBody<R>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        // This request goes to the service that `poll_ready` has found ready; its clone may not be.
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        let bucket = (self.layer.bucket_of)(&request);
        let QuotaLayer { client, max_wait, .. } = &self.layer;
        let (client, max_wait) = (client.clone(), *max_wait);
        Box::pin(async move {
            if let Some(bucket) = bucket
                && let Err(why) = take(&client, &bucket, max_wait, request.headers_mut()).await
            {
                return Ok(answer::to(request.headers(), &why).map(Either::Left));
            }
            Ok(inner.call(request).await?.map(Either::Right))
        })
    }
}

/// Takes a token for a request with these headers. Lowers the timeout of a gRPC call by the time
/// that it took.
async fn take(
    client: &Client,
    bucket: &Bucket,
    max_wait: Duration,
    headers: &mut HeaderMap,
) -> Result<(), NoToken> {
    let start = Instant::now();
    let request = Request::new(&bucket.namespace, &bucket.bucket);
    let Some(timeout) = grpc_type(headers).and_then(|_| timeout::get(headers)) else {
        client.acquire(request.max_wait(max_wait)).await?;
        return Ok(());
    };
    // The answer and the wait together take no longer than the timeout.
    let deadline = client.deadline(None).min(timeout);
    let request = request.deadline(deadline).max_wait(max_wait.min(timeout - deadline));
    client.acquire(request).await?;
    let left = timeout.saturating_sub(start.elapsed());
    if left.is_zero() {
        return Err(NoToken::Late);
    }
    timeout::set(headers, left);
    Ok(())
}

/// The content type, if it is one of gRPC.
fn grpc_type(headers: &HeaderMap) -> Option<&HeaderValue> {
    headers.get(CONTENT_TYPE).filter(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}
