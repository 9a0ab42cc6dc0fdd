//! What is wrong with a request for leases, and its wants as the store takes them.

use std::collections::HashSet;

use smallvec::SmallVec;

use super::Request;
use crate::domain::lease::{Band, Claim, Holder, MAX_BANDS, MAX_SUBCLIENTS};
pub use crate::domain::names::MAX_ID_BYTES;
use crate::service::Error;

/// The most resources in one request.
pub const MAX_RESOURCES: usize = 10_000;

/// The most characters of a name that an answer repeats to say what is wrong.
const SHOWN: usize = 100;

/// The wants as the store takes them: each priority once, and nobody without a client.
pub(super) fn bands(request: &Request<'_>) -> Result<SmallVec<[Band; 1]>, Error> {
    let mut bands = SmallVec::<[Band; 1]>::new();
    let asked = request.wants.iter().filter(|wants| wants.clients > 0 || wants.wants > 0.0);
    for wants in asked {
        // Adding 0 turns -0 into 0.
        let (clients, amount) = (wants.clients.max(1), wants.wants + 0.0);
        match bands.iter().position(|band| band.priority == wants.priority) {
            Some(at) => {
                let band = &mut bands[at];
                let clients = i64::from(band.subclients).saturating_add(clients);
                band.subclients = limited(clients);
                band.wants += amount;
            }
            None if bands.len() < MAX_BANDS => bands.push(Band {
                priority: wants.priority,
                subclients: limited(clients),
                wants: amount,
            }),
            None => {
                let resource = shown(request.resource);
                return Err(Error::Invalid(format!(
                    "resource {resource}: wants has more than {MAX_BANDS} priorities"
                )));
            }
        }
    }
    if bands.is_empty() {
        bands.push(Band { priority: 0, subclients: 1, wants: 0.0 });
    }
    count_at_most(&mut bands, request.most_clients.min(MAX_SUBCLIENTS) as usize);
    Ok(bands)
}

/// Cuts the clients of all priorities together down to `most`, from the last priority on. Each
/// priority keeps one; where there are more priorities than that, the wants of those beyond count as
/// the last one's. What they want together stays the same.
fn count_at_most(bands: &mut SmallVec<[Band; 1]>, most: usize) {
    let kept = bands.len().min(most.max(1));
    let beyond: f64 = bands[kept..].iter().map(|band| band.wants).sum();
    bands.truncate(kept);
    bands[kept - 1].wants += beyond;
    let mut left = most.max(1);
    for (at, band) in bands.iter_mut().enumerate() {
        let needed_later = kept - 1 - at;
        let clients = (band.subclients as usize).min(left - needed_later);
        (band.subclients, left) = (clients as u32, left - clients);
    }
}

fn limited(clients: i64) -> u32 {
    u32::try_from(clients).unwrap_or(u32::MAX).min(MAX_SUBCLIENTS)
}

pub(super) fn check_holder(holder: Holder<'_>) -> Result<(), Error> {
    let field = match holder {
        Holder::Client(_) => "client_id",
        Holder::Server(_) => "server_id",
    };
    check_id(field, holder.id())
}

/// A name as a part of an answer: in quotes, and not all of it where it is long.
fn shown(name: &str) -> String {
    match name.char_indices().nth(SHOWN) {
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
        Some(twice) => Err(Error::Invalid(format!("resource_id {} is there twice", shown(twice)))),
        None => Ok(()),
    }
}

pub(super) fn check(holder: Holder<'_>, request: &Request<'_>) -> Result<(), Error> {
    let resource = request.resource;
    let amount = |field: &str, value: f64| {
        if value.is_finite() && value >= 0.0 {
            return Ok(());
        }
        let rule = "must be a finite number of at least 0";
        let resource = shown(resource);
        Err(Error::Invalid(format!("{field} of resource {resource} {rule}, not {value}")))
    };
    for wants in &request.wants {
        amount("wants", wants.wants)?;
        if wants.clients < 0 {
            let field = if matches!(holder, Holder::Server(_)) { "num_clients" } else { "clients" };
            let text = format!("{field} of resource {} is {}", shown(resource), wants.clients);
            return Err(Error::Invalid(text + ", less than 0"));
        }
    }
    let all: f64 = request.wants.iter().map(|wants| wants.wants).sum();
    if !all.is_finite() {
        let text = format!("wants of resource {} add up to no finite number", shown(resource));
        return Err(Error::Invalid(text));
    }
    match (holder, request.has) {
        (_, None) | (Holder::Server(_), Some(Claim::UNKNOWN)) => {}
        (_, Some(has)) => amount("has.capacity", has.capacity)?,
    }
    // Before anything of the request is decided; few enough entries can't be too many.
    if request.wants.len() > MAX_BANDS {
        bands(request)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::capacity::PriorityWants;

    /// The priorities, clients and wants that count of a request for these clients.
    fn counted(clients: &[i64], most_clients: u32) -> Vec<(i64, u32, f64)> {
        let wants = (0..).zip(clients);
        let wants =
            wants.map(|(priority, &clients)| PriorityWants { priority, clients, wants: 10.0 });
        let request = Request { resource: "r", wants: wants.collect(), has: None, most_clients };
        let bands = bands(&request).unwrap();
        bands.iter().map(|band| (band.priority, band.subclients, band.wants)).collect()
    }

    #[test]
    fn more_clients_than_may_be_spoken_for_do_not_count() {
        let most = MAX_SUBCLIENTS;
        for (clients, may, expected) in [
            (&[3, 4][..], 7, &[(0, 3, 10.0), (1, 4, 10.0)][..]),
            (&[3, 4], 6, &[(0, 3, 10.0), (1, 3, 10.0)]),
            (&[3, 4], 3, &[(0, 2, 10.0), (1, 1, 10.0)]),
            // What they want is never cut.
            (&[3, 4, 5], 2, &[(0, 1, 10.0), (1, 1, 20.0)]),
            (&[3, 4, 5], 1, &[(0, 1, 30.0)]),
            (&[i64::MAX, i64::MAX], most, &[(0, most - 1, 10.0), (1, 1, 10.0)]),
            (&[i64::MAX], u32::MAX, &[(0, most, 10.0)]),
        ] {
            assert_eq!(counted(clients, may), expected, "{clients:?} of {may}");
        }
    }
}
