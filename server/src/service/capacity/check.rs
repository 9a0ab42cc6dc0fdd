//! Validates requests for leases, and converts their wants into bands.

use std::collections::HashSet;

use smallvec::SmallVec;

use super::CapacityRequest;
use crate::domain::lease::{Band, Claim, Holder, MAX_BANDS, MAX_SUBCLIENTS};
pub use crate::domain::names::MAX_ID_BYTES;
use crate::service::Error;

/// The maximum number of resources in one request.
pub const MAX_RESOURCES: usize = 10_000;

/// The maximum number of characters of a name that an error text quotes.
const MAX_QUOTED_CHARS: usize = 100;

/// The wants as bands: one per priority, each with at least one subclient. Entries without clients
/// and wants are dropped.
pub(super) fn bands(request: &CapacityRequest<'_>) -> Result<SmallVec<[Band; 1]>, Error> {
    let mut bands = SmallVec::<[Band; 1]>::new();
    let asked = request.wants.iter().filter(|wants| wants.clients > 0 || wants.wants > 0.0);
    for wants in asked {
        // Adding 0 turns -0 into 0.
        let (clients, amount) = (wants.clients.max(1), wants.wants + 0.0);
        match bands.iter().position(|band| band.priority == wants.priority) {
            Some(at) => {
                let band = &mut bands[at];
                let clients = i64::from(band.subclients).saturating_add(clients);
                band.subclients = cap_subclients(clients);
                band.wants += amount;
            }
            None if bands.len() < MAX_BANDS => bands.push(Band {
                priority: wants.priority,
                subclients: cap_subclients(clients),
                wants: amount,
            }),
            None => {
                let resource = quoted(request.resource);
                return Err(Error::Invalid(format!(
                    "resource {resource}: wants has more than {MAX_BANDS} priorities"
                )));
            }
        }
    }
    if bands.is_empty() {
        bands.push(Band { priority: 0, subclients: 1, wants: 0.0 });
    }
    limit_subclients(&mut bands, request.most_clients.min(MAX_SUBCLIENTS) as usize);
    Ok(bands)
}

/// Reduces the number of subclients in all bands together to `max`, starting with the last band. Each
/// band keeps at least one. If there are more than `max` bands, the wants of the excess
/// bands are added to the last band kept, so the sum of wants stays the same.
fn limit_subclients(bands: &mut SmallVec<[Band; 1]>, max: usize) {
    let kept = bands.len().min(max.max(1));
    let excess_wants: f64 = bands[kept..].iter().map(|band| band.wants).sum();
    bands.truncate(kept);
    bands[kept - 1].wants += excess_wants;
    let mut remaining = max.max(1);
    for (index, band) in bands.iter_mut().enumerate() {
        let needed_later = kept - 1 - index;
        let clients = (band.subclients as usize).min(remaining - needed_later);
        (band.subclients, remaining) = (clients as u32, remaining - clients);
    }
}

fn cap_subclients(clients: i64) -> u32 {
    u32::try_from(clients).unwrap_or(u32::MAX).min(MAX_SUBCLIENTS)
}

pub(super) fn check_holder(holder: Holder<'_>) -> Result<(), Error> {
    let field = match holder {
        Holder::Client(_) => "client_id",
        Holder::Server(_) => "server_id",
    };
    check_id(field, holder.id())
}

/// A name quoted for an error text, truncated to [`MAX_QUOTED_CHARS`].
fn quoted(name: &str) -> String {
    match name.char_indices().nth(MAX_QUOTED_CHARS) {
        Some((end, _)) => format!("{:?}…", &name[..end]),
        None => format!("{name:?}"),
    }
}

pub(in super::super) fn check_id(field: &str, id: &str) -> Result<(), Error> {
    match id.len() {
        0 => Err(Error::Invalid(format!("{field} is empty"))),
        length if length > MAX_ID_BYTES => Err(Error::Invalid(format!(
            "{field} is {length} bytes long, at most {MAX_ID_BYTES} are allowed"
        ))),
        _ => Ok(()),
    }
}

pub(crate) fn check_count(resources: usize) -> Result<(), Error> {
    if resources <= MAX_RESOURCES {
        return Ok(());
    }
    let text = format!("resource: {resources} in one request, at most {MAX_RESOURCES} are allowed");
    Err(Error::Invalid(text))
}

pub(super) fn check_resources<'a>(
    resources: impl ExactSizeIterator<Item = &'a str> + Clone,
) -> Result<(), Error> {
    let count = resources.len();
    check_count(count)?;
    resources.clone().try_for_each(|resource| check_id("resource_id", resource))?;
    if count < 2 {
        return Ok(());
    }
    let mut seen = HashSet::with_capacity(count);
    match resources.into_iter().find(|resource| !seen.insert(*resource)) {
        Some(name) => Err(Error::Invalid(format!(
            "resource_id {} occurs more than once: name each resource once",
            quoted(name)
        ))),
        None => Ok(()),
    }
}

pub(super) fn check_request(
    holder: Holder<'_>,
    request: &CapacityRequest<'_>,
) -> Result<(), Error> {
    let resource = request.resource;
    let amount = |field: &str, value: f64| {
        if value.is_finite() && value >= 0.0 {
            return Ok(());
        }
        let rule = "must be a finite number of at least 0";
        let resource = quoted(resource);
        Err(Error::Invalid(format!("{field} of resource {resource} {rule}, not {value}")))
    };
    for wants in &request.wants {
        amount("wants", wants.wants)?;
        if wants.clients < 0 {
            let text = format!("num_clients of resource {} is {}", quoted(resource), wants.clients);
            return Err(Error::Invalid(text + ", less than 0"));
        }
    }
    let sum: f64 = request.wants.iter().map(|wants| wants.wants).sum();
    if !sum.is_finite() {
        let text = format!("the sum of the wants of resource {} is not finite", quoted(resource));
        return Err(Error::Invalid(text));
    }
    match (holder, request.has) {
        (_, None) | (Holder::Server(_), Some(Claim::UNKNOWN)) => {}
        (_, Some(has)) => amount("has.capacity", has.capacity)?,
    }
    // `bands` fails if there are too many priorities. The whole request is refused before the store
    // decides about any of its resources.
    if request.wants.len() > MAX_BANDS {
        bands(request)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::capacity::PriorityWants;

    /// The (priority, clients, wants) bands of a request that wants 10 for each entry of `clients`.
    fn bands_of(clients: &[i64], most_clients: u32) -> Vec<(i64, u32, f64)> {
        let wants = (0..).zip(clients);
        let wants =
            wants.map(|(priority, &clients)| PriorityWants { priority, clients, wants: 10.0 });
        let request =
            CapacityRequest { resource: "r", wants: wants.collect(), has: None, most_clients };
        let bands = bands(&request).unwrap();
        bands.iter().map(|band| (band.priority, band.subclients, band.wants)).collect()
    }

    #[test]
    fn clients_beyond_the_maximum_do_not_count() {
        let max = MAX_SUBCLIENTS;
        for (clients, most_clients, expected) in [
            (&[3, 4][..], 7, &[(0, 3, 10.0), (1, 4, 10.0)][..]),
            (&[3, 4], 6, &[(0, 3, 10.0), (1, 3, 10.0)]),
            (&[3, 4], 3, &[(0, 2, 10.0), (1, 1, 10.0)]),
            // Wants are never reduced.
            (&[3, 4, 5], 2, &[(0, 1, 10.0), (1, 1, 20.0)]),
            (&[3, 4, 5], 1, &[(0, 1, 30.0)]),
            (&[i64::MAX, i64::MAX], max, &[(0, max - 1, 10.0), (1, 1, 10.0)]),
            (&[i64::MAX], u32::MAX, &[(0, max, 10.0)]),
        ] {
            assert_eq!(bands_of(clients, most_clients), expected, "{clients:?}, {most_clients}");
        }
    }
}
