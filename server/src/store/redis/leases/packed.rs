//! Encodes the arguments of `lua/lease.lua` and `lua/parent.lua`, and decodes their replies. The
//! scripts describe the formats.

use redis::Value;
use smallvec::SmallVec;

use crate::domain::lease::{Band, Grant, Holder, MAX_SUBCLIENTS, ParentLease, Presence, Totals};
use crate::domain::sharing::{SharingAlgorithm, Side, Split};
use crate::domain::sum::Sum;
use crate::domain::time::Micros;
use crate::metrics::Corrupt;
use crate::store::{Demand, LeaseView};

/// First byte of a holder that is a lower cluster: no client id begins with it, as it is not UTF-8.
const SERVER: u8 = 254;

/// More than the number of holders that any resource has.
const MANY: usize = 10_000_000_000;

/// Numbers as the scripts read them: doubles, little-endian.
pub(super) fn packed<const N: usize>(numbers: [f64; N]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn unpacked<const N: usize>(bytes: &[u8]) -> Option<[f64; N]> {
    let mut numbers = [0.0; N];
    for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(8)) {
        *number = f64::from_le_bytes(bytes.try_into().ok()?);
    }
    (bytes.len() >= 8 * N).then_some(numbers)
}

/// The field of a holder in the hash of a resource's leases.
pub(super) fn holder_field(holder: Holder<'_>) -> Vec<u8> {
    match holder {
        Holder::Client(id) => id.as_bytes().to_vec(),
        Holder::Server(id) => [&[SERVER], id.as_bytes()].concat(),
    }
}

/// The number that the scripts have for an algorithm.
pub(super) fn algorithm_number(algorithm: SharingAlgorithm) -> f64 {
    SharingAlgorithm::ALL.iter().position(|&one| one == algorithm).unwrap_or_default() as f64
}

fn algorithm(number: f64) -> Option<SharingAlgorithm> {
    SharingAlgorithm::ALL.get(number as usize).copied()
}

pub(super) fn encode_bands(bands: &[Band]) -> Vec<u8> {
    let encode = |band: &Band| {
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&band.priority.to_le_bytes());
        bytes[8..12].copy_from_slice(&band.subclients.to_le_bytes());
        bytes[12..].copy_from_slice(&band.wants.to_le_bytes());
        bytes
    };
    bands.iter().flat_map(encode).collect()
}

/// The reply of `lua/lease.lua` to a request, and the kinds of corrupt values that it has replaced.
pub(super) fn grant(reply: &Value) -> Option<(Grant, SmallVec<[Corrupt; 3]>)> {
    let Value::BulkString(bytes) = reply else { return None };
    if bytes.is_empty() {
        let grant = Grant { presence: Presence::Refused, ..Grant::default() };
        return Some((grant, SmallVec::new()));
    }
    let [has, expiry, learning, capacity, number, refresh, subclients] = unpacked(bytes)?;
    if [has, capacity, subclients].iter().any(|number| !(number.is_finite() && *number >= 0.0)) {
        return None;
    }
    let [.., replaced] = unpacked::<8>(bytes).unwrap_or_default();
    let corrupt = [(1, Corrupt::Resource), (2, Corrupt::Server), (4, Corrupt::Server)];
    let corrupt = corrupt.into_iter().filter(|(bit, _)| replaced as u8 & bit != 0);
    let grant = Grant {
        has,
        expiry_s: expiry as i64,
        learning_until: (learning > 0.0).then_some(Micros(learning as i64)),
        capacity,
        algorithm: algorithm(number),
        parent_refresh_s: (refresh >= 0.0).then_some(refresh as i64),
        subclients,
        presence: if replaced as u8 & 8 != 0 { Presence::Created } else { Presence::Known },
    };
    Some((grant, corrupt.map(|(_, kind)| kind).collect()))
}

pub(super) fn totals(sums: &[u8]) -> Option<Totals> {
    let [above, above_lo, above_n, below, below_lo, below_n, rest @ ..] = unpacked::<15>(sums)?;
    let [has, _, _, _, count, _, _, born, _] = rest;
    let side = |parts, subclients| Side { wants: Sum::from_parts(parts), subclients };
    let split =
        Split { below: side([below, below_lo], below_n), above: side([above, above_lo], above_n) };
    // Sums of finite numbers may overflow.
    if ![split.wants(), split.subclients(), has].iter().all(|number| number.is_finite()) {
        return None;
    }
    Some(Totals {
        split,
        has: has.max(0.0),
        holders: count as u64,
        born: Some(Micros(born as i64)),
        parent: None,
    })
}

/// The number of holders that are still in the list by expiry, but not in the sums any more. Bounded,
/// so that indexes computed from a corrupt value don't overflow.
pub(super) fn ghosts(sums: &[u8]) -> usize {
    unpacked::<16>(sums).map_or(0, |[.., ghosts]| (ghosts as usize).min(MANY))
}

pub(super) fn parent_lease(bytes: &[u8]) -> Option<ParentLease> {
    let [capacity, expiry, refresh, safe_capacity, number, length] = unpacked(bytes)?;
    if !(capacity.is_finite() && safe_capacity.is_finite()) {
        return None;
    }
    Some(ParentLease {
        capacity,
        expiry_s: expiry as i64,
        refresh_s: refresh as i64,
        safe_capacity,
        algorithm: algorithm(number)?,
        lease_s: length as i64,
    })
}

/// A lease as it is stored.
pub(super) fn view(field: &[u8], value: &[u8]) -> Option<LeaseView> {
    let (has, rest) = value.split_first_chunk::<8>()?;
    let (expiry, bands) = rest.split_first_chunk::<4>()?;
    let (mut wants, mut subclients) = (0.0, 0.0);
    for band in bands.chunks_exact(20) {
        subclients += f64::from(u32::from_le_bytes(*band[8..].first_chunk()?));
        wants += f64::from_le_bytes(*band[12..].first_chunk()?);
    }
    let server = field.first() == Some(&SERVER);
    let id = if server { &field[1..] } else { field };
    Some(LeaseView {
        id: String::from_utf8_lossy(id).into_owned(),
        server,
        wants,
        has: f64::from_le_bytes(*has),
        subclients,
        expiry_s: i64::from(u32::from_le_bytes(*expiry)),
    })
}

/// What `lua/parent.lua` replies to the freeze with this number.
pub(super) fn demand(reply: &Value, number: u64) -> Option<Demand> {
    let Value::Array(parts) = reply else { return None };
    let [Value::BulkString(sums), Value::Array(upstream)] = parts.as_slice() else { return None };
    let totals = totals(sums)?;
    let mut demand = Demand { has: totals.has, number, ..Demand::default() };
    let mut banded = 0.0;
    for pair in upstream.chunks_exact(2) {
        let [Value::BulkString(name), Value::BulkString(value)] = pair else { return None };
        match <&[u8; 8]>::try_from(name.as_slice()) {
            Err(_) if name.is_empty() => demand.parent = parent_lease(value),
            // The number.
            Err(_) => {}
            Ok(priority) => {
                let [wants, _, subclients] = unpacked(value)?;
                banded += subclients;
                demand.bands.push(Band {
                    priority: i64::from_le_bytes(*priority),
                    subclients: (subclients as u32).min(MAX_SUBCLIENTS),
                    wants: wants.max(0.0),
                });
            }
        }
    }
    if banded != totals.split.subclients() || demand.bands.iter().any(|b| !b.wants.is_finite()) {
        // Nodes without a parent have kept these leases, or somebody has written here who is no
        // node: what is known is only the whole.
        demand.bands.clear();
        let subclients = (totals.split.subclients() as u32).clamp(1, MAX_SUBCLIENTS);
        demand.bands.push(Band { priority: 0, subclients, wants: totals.split.wants().max(0.0) });
    }
    demand.bands.sort_by_key(|band| band.priority);
    Some(demand)
}

pub(super) fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        _ => None,
    }
}

/// Reads a reply as each kind there is: what is read must be numbers.
#[cfg(test)]
pub(in super::super) fn read_anything(reply: &Value) {
    if let Some((grant, _)) = grant(reply) {
        assert!([grant.has, grant.capacity, grant.subclients].iter().all(|n| n.is_finite()));
    }
    if let Some(demand) = demand(reply, 1) {
        assert!(demand.has.is_finite());
        assert!(demand.bands.iter().all(|band| band.wants.is_finite() && band.wants >= 0.0));
        assert!(demand.bands.iter().all(|band| band.subclients <= MAX_SUBCLIENTS));
    }
    if let Some(bytes) = bytes(reply) {
        if let Some(totals) = totals(bytes) {
            assert!(totals.has.is_finite() && totals.split.subclients().is_finite());
        }
        if let Some(lease) = parent_lease(bytes) {
            assert!(lease.capacity.is_finite() && lease.safe_capacity.is_finite());
        }
        assert!(ghosts(bytes) <= MANY);
        if let Some(view) = view(bytes, bytes) {
            assert!(!view.server || bytes[0] == SERVER);
        }
    }
}
