//! Permits in Redis: keys with an expiry. The value is the number of tokens, 8 bytes little-endian; empty once
//! used.

use std::time::Duration;

use redis::{Cmd, Value};

use super::owner::Owner;
use super::wire::script;
use super::{RedisStore, keys};
use crate::store::permits::{PermitKey, PermitStore, PermitUse};
use crate::store::{BucketRequest, StoreError};

/// The group of owners in the queues that permits count for, apart from decisions. No namespace has a space in its
/// name.
const PERMITS: &str = "permits of buckets";

impl PermitStore for RedisStore {
    async fn record_permit(
        &self,
        permit: &PermitKey<'_>,
        tokens: u64,
        within: Duration,
    ) -> Result<(), StoreError> {
        let key = keys::permit(permit.bucket, permit.id);
        let cmd = script::set_for(&key, &tokens.to_le_bytes(), within);
        self.call_for_permit(permit, &key, &cmd).await.map(drop)
    }

    async fn use_permit(&self, permit: &PermitKey<'_>) -> Result<PermitUse, StoreError> {
        let key = keys::permit(permit.bucket, permit.id);
        let reply = self.call_for_permit(permit, &key, &script::empty_and_get(&key)).await?;
        read_use_reply(&reply).ok_or(StoreError::Refused)
    }
}

impl RedisStore {
    async fn call_for_permit(
        &self,
        permit: &PermitKey<'_>,
        key: &[u8],
        cmd: &Cmd,
    ) -> Result<Value, StoreError> {
        let slot = self.0.router.routes(&self.0.connector).slot(key);
        let BucketRequest { namespace, caller, .. } = *permit.bucket;
        let member = caller.map_or_else(|| self.0.hash(namespace), |caller| caller.number());
        let owner = Owner { group: self.0.hash(PERMITS), member };
        let reply = self.0.values_of(|_| owner, &[slot], None, |_, _| cmd.clone()).await.pop();
        reply.unwrap_or(Err(StoreError::Unreachable))
    }
}

/// The reply to [`script::empty_and_get`]. A value that is not tollgate's is no permit. `None` if the command
/// can't have made the reply.
pub(super) fn read_use_reply(reply: &Value) -> Option<PermitUse> {
    match reply {
        Value::Nil => Some(PermitUse::Unknown),
        Value::BulkString(value) if value.is_empty() => Some(PermitUse::Again),
        Value::BulkString(value) => {
            let tokens = value.as_slice().try_into().ok().map(u64::from_le_bytes);
            let tokens = tokens.filter(|tokens| i64::try_from(*tokens).is_ok());
            Some(tokens.map_or(PermitUse::Unknown, PermitUse::First))
        }
        _ => None,
    }
}
