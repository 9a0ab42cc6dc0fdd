//! Moves the names of a server's register of resources when the slot of the register has moved.
//!
//! The register moves with its slot, but the resources in other slots stay. So each node that
//! notices the move adds the names to the register of the server that now has their resources. That
//! several nodes do so is harmless.

use std::collections::HashMap;

use redis::RedisError;

use super::connector::{Connector, Shards};
use super::shard::Shard;
use super::topology::slot;
use crate::store::redis::keys::{Birth, ResourceKeys, ServerKeys};

/// Names of resources, each with the time at which its keys expire, in s since the epoch.
type Names = Vec<(f64, Vec<u8>)>;

/// A cursor, and names with their scores.
type ScanReply = (u64, Vec<(Vec<u8>, f64)>);

/// The number of names to read or write with one command.
const PAGE: usize = 1000;

impl Connector {
    /// Moves the names out of the registers of retired tags. The next call retries those that fail.
    pub(super) async fn move_retired_registers(&self) {
        let tags = self.retired_tags();
        if tags.is_empty() {
            return;
        }
        let shards = self.shards();
        for tag in tags {
            if move_names(&shards, tag).await.is_some() {
                self.forget_tag(tag);
            }
        }
    }
}

/// Moves the names out of the register with this tag. `None` if a slot has no server, or a server
/// gave no answer.
async fn move_names(shards: &Shards, tag: &str) -> Option<()> {
    let register = ServerKeys::new(tag, Birth::default()).resources;
    let old = &shards.all[shards.topology.master_of(slot(register.as_bytes()))?];
    let mut by_master: HashMap<usize, Names> = HashMap::new();
    for (expires_s, name) in read_names(old, &register).await? {
        let resource = ResourceKeys::new(&String::from_utf8_lossy(&name));
        let place = shards.topology.master_of(slot(&resource.holders))?;
        by_master.entry(place).or_default().push((expires_s, name));
    }
    for (place, names) in by_master {
        let new = &shards.all[place];
        // A server may have this slot as its highest one now. Its own names stay in the register.
        if new.keys.resources == register {
            continue;
        }
        for page in names.chunks(PAGE) {
            let mut add = redis::cmd("ZADD");
            // GT: the later of two expiries counts.
            add.arg(&*new.keys.resources).arg("GT").arg(page);
            let _: u64 = new.query(&add).await.ok()?;
            // Only what was copied: other nodes may add names meanwhile.
            let mut remove = redis::cmd("ZREM");
            remove.arg(&*register);
            for (_, name) in page {
                remove.arg(name);
            }
            let _: u64 = old.query(&remove).await.ok()?;
        }
    }
    Some(())
}

/// The names in a register; none if the key is of another type. `None` if the server gave no answer.
async fn read_names(server: &Shard, register: &str) -> Option<Names> {
    let (mut names, mut cursor) = (Names::new(), 0_u64);
    loop {
        let mut read = redis::cmd("ZSCAN");
        read.arg(register).arg(cursor).arg("COUNT").arg(PAGE);
        let page: Result<ScanReply, RedisError> = server.query(&read).await;
        let page = match page {
            Ok((next, page)) => {
                cursor = next;
                page
            }
            // Nothing of ours.
            Err(error) if error.code() == Some("WRONGTYPE") => return Some(Names::new()),
            Err(_) => return None,
        };
        names.extend(page.into_iter().map(|(name, expires_s)| (expires_s, name)));
        if cursor == 0 {
            return Some(names);
        }
    }
}
