//! One script call per request, multiplexed on one connection.

use redis::aio::MultiplexedConnection;
use redis::{Client, RedisResult, cmd};

const SOURCE: &str = include_str!("bucket.lua");

/// Time to fill an empty bucket and to fill one token, both in µs. Buckets in use stay so for
/// longer than any run.
const CAP_US: u64 = 100_000_000_000_000;
const TOKEN_US: u64 = 100_000;

/// The script, loaded into Redis.
pub(super) struct Script {
    connection: MultiplexedConnection,
    sha: String,
}

impl Script {
    /// Connects to the Redis at `url` and loads the script.
    pub(super) async fn load(url: &str) -> RedisResult<Self> {
        let mut connection = Client::open(url)?.get_multiplexed_async_connection().await?;
        let sha = cmd("SCRIPT").arg("LOAD").arg(SOURCE).query_async(&mut connection).await?;
        Ok(Self { connection, sha })
    }

    /// Takes `tokens` from `bucket`. Returns the tokens left; a negative result means that none
    /// were taken.
    pub(super) async fn take(&self, bucket: &str, tokens: i64) -> RedisResult<f64> {
        let mut call = cmd("EVALSHA");
        call.arg(&self.sha).arg(1).arg(bucket).arg(CAP_US).arg(tokens.unsigned_abs() * TOKEN_US);
        let left_us: f64 = call.query_async(&mut self.connection.clone()).await?;
        Ok(left_us / TOKEN_US as f64)
    }
}
