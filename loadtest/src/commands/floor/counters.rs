//! Envoy's protocol with one counter a descriptor: INCRBY and EXPIRE in a pipeline, as Envoy's rate limit
//! service decides a request.

use std::time::SystemTime;

use redis::aio::MultiplexedConnection;
use redis::{Client, RedisResult, pipe};
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitService;
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::{Request, Response, Status};

/// The limit of every descriptor, in an hour.
const LIMIT: u32 = 1_000_000_000;

const HOUR_S: u64 = 3600;

/// A connection to Redis, shared by all requests.
pub(super) struct Counters(MultiplexedConnection);

impl Counters {
    /// Connects to the Redis at `url`.
    pub(super) async fn connect(url: &str) -> RedisResult<Self> {
        Ok(Self(Client::open(url)?.get_multiplexed_async_connection().await?))
    }

    async fn count(&self, request: &RateLimitRequest) -> RedisResult<Vec<u32>> {
        let hits = request.hits_addend.max(1);
        let now_s = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        let mut pipe = pipe();
        for descriptor in &request.descriptors {
            let mut key = format!("{}_", request.domain);
            for entry in &descriptor.entries {
                key += &format!("{}_{}_", entry.key, entry.value);
            }
            key += &(now_s - now_s % HOUR_S).to_string();
            pipe.incr(&key, hits).expire(&key, HOUR_S as i64).ignore();
        }
        pipe.query_async(&mut self.0.clone()).await
    }
}

#[tonic::async_trait]
impl RateLimitService for Counters {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let counts = self.count(request.get_ref()).await;
        let counts = counts.map_err(|error| Status::unavailable(error.to_string()))?;
        let limit =
            RateLimit { requests_per_unit: LIMIT, unit: Unit::Hour.into(), ..RateLimit::default() };
        let code = |count: u32| if count > LIMIT { Code::OverLimit } else { Code::Ok };
        let status = |count: &u32| DescriptorStatus {
            code: code(*count).into(),
            current_limit: Some(limit.clone()),
            limit_remaining: LIMIT.saturating_sub(*count),
            ..DescriptorStatus::default()
        };
        let most = counts.iter().copied().max().unwrap_or_default();
        Ok(Response::new(RateLimitResponse {
            overall_code: code(most).into(),
            statuses: counts.iter().map(status).collect(),
            ..RateLimitResponse::default()
        }))
    }
}
