//! Versions of the limits in Redis. Texts may have megabytes, so they have connections of their own: no
//! decision waits behind one.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use redis::{Cmd, Value};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout_at};

use super::cluster::shard::Shard;
use super::connecting::connection::MAX_REPLY;
use super::lanes::job::Redirect;
use super::wire::script;
use super::{Inner, RedisStore, health, keys};
use crate::logging::LogThrottle;
use crate::store::StoreError;
use crate::store::versions::{
    About, Current, KEPT_VERSIONS, MAX_NUMBER, Version, Versions, Written,
};

/// Time limit of a call with a text: shorter than commands wait for an answer.
const TEXT_TIMEOUT: Duration = Duration::from_secs(4);

/// The pause before a call is sent again while its slot is being moved.
const MOVE_PAUSE: Duration = Duration::from_millis(50);

/// Texts of more bytes are stored compressed. Shorter ones stay readable for people.
const MAX_PLAIN: usize = 64 << 10;

/// The longest text as it is stored, in bytes: with what is known of the version it is one reply.
const MAX_STORED: usize = MAX_REPLY - (64 << 10);

/// The first byte of a compressed text. No UTF-8 text has it.
const COMPRESSED: u8 = 0xff;

/// The longest text, in bytes.
const MAX_TEXT: u64 = 16 << 20;

/// Limits the log lines of failed calls, which are repeated.
static FAILURES: LogThrottle = LogThrottle::new();

impl Versions for RedisStore {
    async fn current(&self, asked: u64) -> Result<Current, StoreError> {
        let inner = &*self.0;
        let slot = inner.versions_slot();
        let reply = inner.values(&[slot], None, |_, _| script::current_version(asked)).await.pop();
        let [number, about] = match reply.ok_or(StoreError::Unreachable)?? {
            Value::Nil => return Ok(Current { number: 0, asked: None }),
            Value::Array(parts) => parts.try_into().map_err(|_| StoreError::Refused)?,
            _ => return Err(StoreError::Refused),
        };
        let bytes = |value| match value {
            Value::BulkString(bytes) => Some(bytes),
            _ => None,
        };
        Ok(Current {
            // As in lua/versions.lua, what is no number counts as none.
            number: bytes(number).and_then(|number| read_number(&number)).unwrap_or(0),
            asked: bytes(about)
                .and_then(|about| read_about(&about))
                .filter(|about| about.number == asked),
        })
    }

    async fn version(&self, number: u64) -> Result<Option<Version>, StoreError> {
        let reply = self.0.call_with_text(&script::version(number)).await?;
        let Value::Array(parts) = reply else { return Err(StoreError::Refused) };
        let (about, stored) = match <[Value; 2]>::try_from(parts) {
            Ok([Value::BulkString(about), Value::BulkString(stored)]) => (about, stored),
            Ok([Value::Nil, _] | [_, Value::Nil]) => return Ok(None),
            _ => return Err(StoreError::Refused),
        };
        let about = read_about(&about).filter(|about| about.number == number);
        let text = spawn_blocking(move || unpacked(stored)).await.ok().flatten();
        if let (Some(about), Some(text)) = (about, text) {
            return Ok(Some(Version { about, text }));
        }
        if let Some(held_back) = FAILURES.pass() {
            tracing::warn!(number, held_back, "a version of the limits is damaged in the store");
        }
        Err(StoreError::Refused)
    }

    async fn write(&self, version: &Version) -> Result<Written, StoreError> {
        self.0.put_version(version, true).await
    }

    async fn give_back(&self, version: &Version) -> Result<Written, StoreError> {
        self.0.put_version(version, false).await
    }

    async fn history(&self) -> Result<Vec<About>, StoreError> {
        let current = self.current_number().await?;
        let numbers = current.saturating_sub(KEPT_VERSIONS) + 1..=current;
        if numbers.is_empty() {
            return Ok(Vec::new());
        }
        let slot = self.0.versions_slot();
        let reply = self.0.values(&[slot], None, |_, _| script::abouts(numbers.clone())).await;
        let reply = reply.into_iter().next().ok_or(StoreError::Unreachable)??;
        let Value::Array(parts) = reply else { return Err(StoreError::Refused) };
        let about = |part: &Value| match part {
            Value::BulkString(about) => read_about(about),
            _ => None,
        };
        Ok(parts.iter().rev().filter_map(about).collect())
    }
}

impl Inner {
    fn versions_slot(&self) -> u16 {
        self.router.routes(&self.connector).slot(keys::VERSIONS.as_bytes())
    }

    /// Makes a version the current one: if the current one has the number before, or any lower one.
    async fn put_version(&self, version: &Version, is_next: bool) -> Result<Written, StoreError> {
        let text = Arc::clone(&version.text);
        let stored = spawn_blocking(move || packed(&text)).await;
        // A blocking task fails only while the process exits.
        let stored = stored.map_err(|_| StoreError::Unreachable)?;
        if stored.len() > MAX_STORED {
            return Ok(Written::TooLong);
        }
        let number = version.about.number;
        // Serializing plain values cannot fail.
        let about = serde_json::to_vec(&version.about).map_err(|_| StoreError::Refused)?;
        let cmd = script::put_version(is_next, number, &about, &stored, KEPT_VERSIONS);
        match self.call_with_text(&cmd).await? {
            Value::Int(-1) => Ok(Written::Yes),
            Value::Int(current) => {
                Ok(Written::Conflict(u64::try_from(current).map_err(|_| StoreError::Refused)?))
            }
            _ => Err(StoreError::Refused),
        }
    }

    /// Sends a command about the versions on a connection of its own, and follows redirects.
    async fn call_with_text(&self, cmd: &Cmd) -> Result<Value, StoreError> {
        let called = timeout_at(Instant::now() + TEXT_TIMEOUT, self.call_where_they_are(cmd)).await;
        let (error, detail) = match called {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err((error, detail))) => (error, detail),
            Err(_) => (StoreError::Timeout, format!("after {TEXT_TIMEOUT:?}")),
        };
        if let Some(held_back) = FAILURES.pass() {
            tracing::warn!(%error, detail, held_back, "a version of the limits was not read or written");
        }
        Err(error)
    }

    async fn call_where_they_are(&self, cmd: &Cmd) -> Result<Value, (StoreError, String)> {
        let slot = self.versions_slot();
        let mut asked: Option<Arc<Shard>> = None;
        loop {
            let routes = self.router.routes(&self.connector);
            let lanes = routes
                .lanes(slot)
                .ok_or_else(|| (StoreError::Unreachable, format!("nobody has slot {slot}")))?;
            let reply = match asked.take() {
                Some(shard) => shard.call_asking(cmd).await,
                None => lanes.shard.call(cmd).await,
            };
            let error = match reply {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            match health::redirect(&error) {
                None => return Err(health::classified(error)),
                Some(Redirect::Ask(address)) => {
                    let importing = self.router.lanes_at(&self.connector, lanes, &address, slot);
                    let importing = importing.map_err(|error| (error, address.to_string()))?;
                    asked = Some(Arc::clone(&importing.shard));
                }
                Some(Redirect::TryAgain) => tokio::time::sleep(MOVE_PAUSE).await,
                Some(Redirect::Moved(_) | Redirect::Unknown) => {
                    // A task fails only while the process exits.
                    let _ = self.connector.refresh_aside(routes.version()).await;
                    tokio::time::sleep(MOVE_PAUSE).await;
                }
            }
        }
    }
}

fn read_number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok().filter(|number| *number <= MAX_NUMBER)
}

fn read_about(json: &[u8]) -> Option<About> {
    serde_json::from_slice(json).ok()
}

/// A text as it is stored. Blocks.
fn packed(text: &str) -> Vec<u8> {
    if text.len() <= MAX_PLAIN {
        return text.as_bytes().to_vec();
    }
    let mut encoder = GzEncoder::new(vec![COMPRESSED], Compression::fast());
    // Writing to a vector cannot fail.
    let packed = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    packed.unwrap_or_else(|_| text.as_bytes().to_vec())
}

/// The text that was stored; `None` if it is damaged. Blocks.
fn unpacked(stored: Vec<u8>) -> Option<Arc<str>> {
    let Some(packed) = stored.strip_prefix(&[COMPRESSED]) else {
        return String::from_utf8(stored).ok().map(Into::into);
    };
    let mut text = String::new();
    GzDecoder::new(packed).take(MAX_TEXT + 1).read_to_string(&mut text).ok()?;
    (text.len() as u64 <= MAX_TEXT).then(|| text.into())
}

/// Reads a reply as all that this module reads.
#[cfg(test)]
pub(super) fn read_anything(reply: &Value) {
    if let Value::BulkString(bytes) = reply {
        let _ = (read_number(bytes), read_about(bytes), unpacked(bytes.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_stored_compressed() {
        for length in [0, 1, MAX_PLAIN, MAX_PLAIN + 1, 1 << 20] {
            let text = "size: 100\n".repeat(length / 10 + 1)[..length].to_owned();
            let stored = packed(&text);
            assert_eq!(stored.len() < length, length > MAX_PLAIN, "{length}");
            assert_eq!(unpacked(stored).as_deref(), Some(&*text));
        }
        let mut damaged = packed(&"x".repeat(1 << 20));
        damaged.truncate(20);
        assert_eq!(unpacked(damaged), None);
        assert_eq!(unpacked(vec![b'a', 0xfe]), None);
        assert_eq!(unpacked(packed(&"x".repeat((16 << 20) + 1))), None, "more than the limit");
    }
}
