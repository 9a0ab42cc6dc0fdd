//! Moves the names of a server's register of resources when the slot of the register has moved.
//!
//! The register moves with its slot, but the resources in other slots stay. So each node that
//! notices the move adds the names to the register of the server that now has their resources. That
//! several nodes do so is harmless.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use redis::RedisError;

use super::connector::{Connector, Shards};
use super::shard::Shard;
use super::topology::slot;
use crate::store::redis::keys::{Birth, ResourceKeys, ServerKeys};

/// When the keys of a resource expire, in s since the epoch, and its name.
type Entry = (f64, Vec<u8>);

/// A cursor, and names with their scores.
type ScanReply = (u64, Vec<(Vec<u8>, f64)>);

/// The number of names to read with one command, about.
const PAGE: usize = 1000;

impl Connector {
    /// Moves the names out of the registers of retired tags. Whether all are moved: the next call
    /// retries the others, and reads all that is left in their registers.
    pub(super) async fn move_retired_registers(&self) -> bool {
        let tags = self.retired_tags();
        if tags.is_empty() {
            return true;
        }
        let shards = self.shards();
        let mut all_moved = true;
        for tag in tags {
            match move_names(&shards, tag).await {
                Some(()) => self.forget_tag(tag),
                None => all_moved = false,
            }
        }
        all_moved
    }
}

/// Moves the names out of the register with this tag, a page at a time. `None` if the register's slot
/// has no server, or some names could not be moved.
async fn move_names(shards: &Shards, tag: &str) -> Option<()> {
    let register = ServerKeys::new(tag, Birth::default()).resources;
    let old = &shards.all[shards.topology.master_of(slot(register.as_bytes()))?];
    let (mut cursor, mut failed) = (0_u64, HashSet::new());
    loop {
        let (next, names) = read_page(old, &register, cursor).await?;
        let mut by_master: HashMap<Option<usize>, Vec<Entry>> = HashMap::new();
        for (name, expires_s) in names {
            let resource = ResourceKeys::new(&String::from_utf8_lossy(&name));
            let place = shards.topology.master_of(slot(&resource.holders));
            by_master.entry(place).or_default().push((expires_s, name));
        }
        for (place, names) in by_master {
            if failed.contains(&place) {
                continue;
            }
            let new = place.map(|place| &shards.all[place]);
            if move_page(old, &register, new, &names).await.is_none() {
                failed.insert(place);
            }
        }
        cursor = next;
        if cursor == 0 {
            return failed.is_empty().then_some(());
        }
    }
}

/// Moves names to the register of the server that has their resources. `None` if there is none, or a
/// server gave no answer.
async fn move_page(
    old: &Shard,
    register: &str,
    new: Option<&Arc<Shard>>,
    names: &[Entry],
) -> Option<()> {
    let new = new?;
    // A server may have this slot as its highest one now. Its own names stay in the register.
    if *new.keys.resources == *register {
        return Some(());
    }
    let mut add = redis::cmd("ZADD");
    // GT: the later of two expiries counts.
    add.arg(&*new.keys.resources).arg("GT").arg(names);
    let _: u64 = new.query(&add).await.ok()?;
    // Only what was copied: other nodes may add names meanwhile.
    let mut remove = redis::cmd("ZREM");
    remove.arg(register);
    for (_, name) in names {
        remove.arg(name);
    }
    let _: u64 = old.query(&remove).await.ok()?;
    Some(())
}

/// Some names of a register, and where the next ones are; none if the key is of another type. `None`
/// if the server gave no answer.
async fn read_page(server: &Shard, register: &str, cursor: u64) -> Option<ScanReply> {
    let mut read = redis::cmd("ZSCAN");
    read.arg(register).arg(cursor).arg("COUNT").arg(PAGE);
    let page: Result<ScanReply, RedisError> = server.query(&read).await;
    match page {
        Ok(page) => Some(page),
        // Nothing of ours.
        Err(error) if error.code() == Some("WRONGTYPE") => Some((0, Vec::new())),
        Err(_) => None,
    }
}
