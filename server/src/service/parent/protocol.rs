//! What a cluster asks of its parent, and what the parent answers.

use std::future::Future;

use crate::domain::bucket::MAX_SPAN_US;
use crate::domain::lease::{Band, Claim, MAX_BANDS, MAX_SUBCLIENTS, ParentLease};
use crate::domain::time::Micros;
use crate::store::Demand;

/// The maximum length of time accepted from a parent; the limits file has the same maximum.
const MAX_SPAN_S: i64 = (MAX_SPAN_US / 1e6) as i64;

/// A request to the parent for one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct ParentRequest {
    /// The resource's name.
    pub resource: String,
    /// What the cluster has leased out, with the expiry of its own lease; `None`: nothing.
    pub has: Option<Claim>,
    /// What its clients want.
    pub bands: Vec<Band>,
    /// The safe capacity from the parent's last answer. It stays valid if the next answer names
    /// none.
    pub safe_capacity: f64,
}

/// Why a parent gave no answer.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct ParentError {
    /// The error text.
    pub text: String,
    /// Whether the parent may have received the request and acted on it.
    pub heard: bool,
    /// Whether the parent rejected the whole request because of its content, without acting on any
    /// part of it.
    pub refused: bool,
}

/// One answer per request, in the order of the requests.
pub type Answers = Vec<Result<ParentLease, ParentError>>;

/// A client of the parent cluster.
pub trait Parent {
    /// Asks for leases on behalf of the cluster.
    fn ask(
        &self,
        cluster: &str,
        requests: &[ParentRequest],
    ) -> impl Future<Output = Result<Answers, ParentError>>;
}

/// Whether clients may hold leases from before `born`, when the store's state began, that the store
/// does not know. Client leases are no longer than the parent's, which last `lease_s` seconds.
pub(super) fn is_learning(born: Micros, lease_s: i64, now: Micros) -> bool {
    now.0 < born.0.saturating_add(lease_s.saturating_mul(1_000_000))
}

/// The parent's lease after a request that gave none. `held` is the lease in the store, and `last`
/// the last one that the parent gave.
pub(super) fn lease_after(
    error: &ParentError,
    held: Option<ParentLease>,
    last: Option<ParentLease>,
) -> Option<ParentLease> {
    if held.is_none() {
        // The store drops the parent's lease together with the last client lease, and both may have
        // expired at once. The safe capacity remains valid.
        return last.map(|last| ParentLease { capacity: 0.0, ..last });
    }
    // If the parent has not acted, its lease is unchanged.
    if error.heard { None } else { held }
}

pub(super) fn parent_request(
    resource: &str,
    demand: Option<Demand>,
    learning: bool,
    now: Micros,
) -> ParentRequest {
    let Some(demand) = demand else {
        let resource = resource.to_owned();
        return ParentRequest { resource, has: None, bands: Vec::new(), safe_capacity: 0.0 };
    };
    let held = demand.parent.filter(|lease| lease.expiry_s > now.as_secs());
    ParentRequest {
        resource: resource.to_owned(),
        has: match held {
            // The store may have lost its state: all of the parent's last lease may be leased out.
            _ if learning || held.is_none() => Some(Claim::UNKNOWN),
            held => held.map(|lease| Claim { capacity: demand.has, expiry_s: lease.expiry_s }),
        },
        bands: fold_bands(demand.bands),
        safe_capacity: 0.0,
    }
}

/// Limits the times in a parent's lease to a range in which arithmetic can't overflow.
pub(super) fn clamp_times(lease: ParentLease, now: Micros) -> ParentLease {
    ParentLease {
        expiry_s: lease.expiry_s.clamp(0, now.as_secs().saturating_add(MAX_SPAN_S).max(0)),
        refresh_s: lease.refresh_s.clamp(1, MAX_SPAN_S),
        lease_s: lease.lease_s.clamp(1, MAX_SPAN_S),
        ..lease
    }
}

/// Merges bands beyond [`MAX_BANDS`] into the last band kept. The parent refuses a request with
/// more bands, and with it all resources of the batch.
fn fold_bands(mut bands: Vec<Band>) -> Vec<Band> {
    let excess = bands.split_off(bands.len().min(MAX_BANDS));
    if let Some(last) = bands.last_mut() {
        for band in excess {
            last.subclients = last.subclients.saturating_add(band.subclients);
            last.wants += band.wants;
        }
    }
    for band in &mut bands {
        band.subclients = band.subclients.min(MAX_SUBCLIENTS);
    }
    bands
}
