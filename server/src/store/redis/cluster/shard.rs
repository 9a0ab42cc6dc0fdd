//! One server of the store, with its keys, its health, and connections for what is not urgent.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, FromRedisValue, RedisError, Value};

use super::topology::Master;
use crate::store::redis::connecting::connection::{Address, Connection, Spares};
use crate::store::redis::health::ServerHealth;
use crate::store::redis::keys::ServerKeys;

/// The time limit of [`Shard::query`].
const QUERY_TIMEOUT: Duration = Duration::from_millis(250);

/// A master, with its keys, health and connections for heartbeats.
pub(crate) struct Shard {
    pub(crate) master: Master,
    pub(crate) keys: ServerKeys,
    pub(crate) health: Arc<ServerHealth>,
    /// Connections for heartbeats and other requests that are not urgent. Lanes have their own
    /// connections, because the thread that makes a connection also drives it.
    pub(super) spares: Spares,
    /// Locked while a heartbeat is in flight: the first by one with the long time limits, the second
    /// by one with the short ones.
    pub(super) in_flight: [Arc<tokio::sync::Mutex<()>>; 2],
}

impl Shard {
    /// Creates the shard of a master at this address.
    pub(super) fn new(
        master: Master,
        keys: ServerKeys,
        health: Arc<ServerHealth>,
        address: Address,
    ) -> Arc<Self> {
        let (spares, in_flight) = (Spares::new(address), Default::default());
        Arc::new(Self { master, keys, health, spares, in_flight })
    }

    /// Sends a command on a connection of its own, without a time limit.
    pub(crate) async fn call(&self, cmd: &Cmd) -> Result<Value, RedisError> {
        let mut connection = self.spares.connect().await?;
        cmd.query_async(&mut connection.redis).await
    }

    /// The same for a key whose slot this server is about to get.
    pub(crate) async fn call_asking(&self, cmd: &Cmd) -> Result<Value, RedisError> {
        let mut connection = self.spares.connect().await?;
        let _: Value = redis::cmd("ASKING").query_async(&mut connection.redis).await?;
        cmd.query_async(&mut connection.redis).await
    }

    /// Sends a command that is not urgent, and may be executed twice: again if an idle connection
    /// breaks. Fails with [`io::ErrorKind::TimedOut`] after [`QUERY_TIMEOUT`].
    pub(crate) async fn query<T: FromRedisValue>(&self, cmd: &Cmd) -> Result<T, RedisError> {
        let reply = async {
            if let Some(idle) = self.spares.idle() {
                match self.query_on(idle, cmd).await {
                    Err(error) if error.is_io_error() => {}
                    reply => return reply,
                }
            }
            self.query_on(self.spares.connect().await?, cmd).await
        };
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("after {QUERY_TIMEOUT:?}"));
        tokio::time::timeout(QUERY_TIMEOUT, reply).await.map_err(late)?
    }

    /// Keeps the connection if the server executes the command.
    async fn query_on<T: FromRedisValue>(
        &self,
        mut connection: Connection,
        cmd: &Cmd,
    ) -> Result<T, RedisError> {
        let reply = cmd.query_async(&mut connection.redis).await?;
        self.spares.keep(connection);
        Ok(reply)
    }
}
