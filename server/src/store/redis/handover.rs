//! What becomes of a server's register of resources when the slot that it is in has moved.
//!
//! The register goes with the slot, the resources stay. So their names are put into the register
//! that their server has now, by every node that sees it: doing it twice does no harm.

use std::collections::HashMap;

use super::connector::{Connector, Shards};
use super::keys::{Birth, ResourceKeys, ServerKeys};
use super::topology::slot;

/// Each with the second at which its keys expire.
type Names = Vec<(f64, Vec<u8>)>;

/// Names in one command.
const PAGE: usize = 1000;

impl Connector {
    /// Moves the names out of registers that were a server's and are no more. What fails is tried
    /// again at the next call.
    pub(super) async fn hand_over(&self) {
        let retired = self.retired();
        if retired.is_empty() {
            return;
        }
        let shards = self.shards();
        for tag in retired {
            if move_names(&shards, tag).await.is_some() {
                self.handed_over(tag);
            }
        }
    }
}

/// `None`: somebody did not answer.
async fn move_names(shards: &Shards, tag: &str) -> Option<()> {
    let keys = ServerKeys::new(tag, Birth::default());
    let old = &shards.all[shards.topology.master_of(slot(keys.resources.as_bytes()))?];
    let (mut names, mut cursor) = (Names::new(), 0_u64);
    loop {
        let mut read = redis::cmd("ZSCAN");
        read.arg(&*keys.resources).arg(cursor).arg("COUNT").arg(PAGE);
        let page: Vec<(Vec<u8>, f64)>;
        (cursor, page) = old.ask(&read).await?;
        names.extend(page.into_iter().map(|(name, expires_s)| (expires_s, name)));
        if cursor == 0 {
            break;
        }
    }
    let mut of_each: HashMap<usize, Names> = HashMap::new();
    for (expires_s, name) in names {
        let resource = ResourceKeys::new(&String::from_utf8_lossy(&name));
        let place = shards.topology.master_of(slot(&resource.holders))?;
        of_each.entry(place).or_default().push((expires_s, name));
    }
    for (place, names) in of_each {
        let shard = &shards.all[place];
        for page in names.chunks(PAGE) {
            let mut add = redis::cmd("ZADD");
            // The later moment counts.
            add.arg(&*shard.keys.resources).arg("GT").arg(page);
            let _: u64 = shard.ask(&add).await?;
        }
    }
    // Another server may have that slot as its last one, and use the same keys.
    if shards.all.iter().all(|shard| shard.master.tag != tag) {
        let mut forget = redis::cmd("UNLINK");
        forget.arg(&*keys.resources);
        let _: u64 = old.ask(&forget).await?;
    }
    Some(())
}
