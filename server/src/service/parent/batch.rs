//! One batch of requests to the parent: each resource is frozen before, and thawed with the answer.

use std::time::Duration;

use super::protocol::{
    Answers, Parent, ParentError, ParentRequest, clamp_times, is_learning, lease_after,
    parent_request,
};
use super::{MAX_BATCH, RENEWER_TTL, Renewal, RenewalState};
use crate::domain::lease::ParentLease;
use crate::domain::time::Micros;
use crate::logging::Sanitized;
use crate::store::{LeaseStore, StoreError};

/// How long a freeze lasts if the node that asked the parent stops before the answer. Much longer
/// than another node needs to take over and ask.
const FREEZE: Duration = Duration::from_secs(60);

/// How long to wait before a retry if the parent gave no answer.
const RETRY_US: i64 = 1_000_000;

/// How long to wait before a retry if the parent refused a resource.
const REFUSED_RETRY_US: i64 = 10_000_000;

/// One resource in a request to the parent.
struct Asked<'r> {
    resource: &'r str,
    /// The number of the freeze; `None` if nobody wants the resource: then it is not frozen.
    freeze_number: Option<u64>,
    /// The parent's lease, as the store has it.
    held: Option<ParentLease>,
}

impl<S: LeaseStore> Renewal<S> {
    /// Asks the parent for one batch of resources. After an error that may concern one resource
    /// only, goes on with the others, and returns it at the end.
    pub(super) async fn renew(
        &mut self,
        parent: &impl Parent,
        resources: &[String],
        born: Micros,
        now: Micros,
    ) -> Result<(), StoreError> {
        if !self.store.take_renewal(&self.node, RENEWER_TTL).await? {
            return Ok(());
        }
        let (frozen, mut refused) = self.freeze_all(resources, born, now).await?;
        if frozen.is_empty() {
            return refused;
        }
        let (batch, requests): (Vec<Asked<'_>>, Vec<ParentRequest>) = frozen.into_iter().unzip();
        let answers = match parent.ask(&self.cluster, &requests).await {
            Ok(answers) if answers.len() == requests.len() => answers,
            Ok(_) => {
                let text = "it answered for other resources than asked".to_owned();
                vec![Err(ParentError { text, heard: true, refused: false }); requests.len()]
            }
            Err(error) => vec![Err(error); requests.len()],
        };
        self.report(&requests, &answers);
        for (asked, answer) in batch.iter().zip(&answers) {
            match self.take_answer(asked, answer, batch.len(), now).await {
                Err(StoreError::Refused) => refused = Err(StoreError::Refused),
                taken => taken?,
            }
        }
        refused
    }

    /// Freezes resources, and returns what to ask the parent. If the store refuses one, goes on
    /// with the others, and returns the error beside them.
    async fn freeze_all<'r>(
        &mut self,
        resources: &'r [String],
        born: Micros,
        now: Micros,
    ) -> Result<(Vec<(Asked<'r>, ParentRequest)>, Result<(), StoreError>), StoreError> {
        let mut frozen = Vec::with_capacity(resources.len());
        let mut refused = Ok(());
        for resource in resources {
            match self.freeze(resource, born, now).await {
                Ok(asked) => frozen.extend(asked),
                Err(StoreError::Refused) => {
                    refused = Err(StoreError::Refused);
                    if let Some(state) = self.resources.get_mut(resource) {
                        state.due = Micros(now.0.saturating_add(RETRY_US));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok((frozen, refused))
    }

    /// Freezes a resource, and returns what to ask the parent. `None` if the store still lists the
    /// name, but all leases are gone, and the parent was never asked for it.
    async fn freeze<'r>(
        &self,
        resource: &'r str,
        born: Micros,
        now: Micros,
    ) -> Result<Option<(Asked<'r>, ParentRequest)>, StoreError> {
        let demand = self.store.freeze(resource, FREEZE).await?;
        let state = self.resources.get(resource);
        if demand.is_none() && state.is_none() {
            return Ok(None);
        }
        let freeze_number = demand.as_ref().map(|demand| demand.number);
        let held = demand.as_ref().and_then(|demand| demand.parent);
        let last = held.or(state.and_then(|state| state.lease));
        let learning = is_learning(born, last.map_or(0, |lease| lease.lease_s), now);
        let safe_capacity = last.map_or(0.0, |lease| lease.safe_capacity);
        let wants = parent_request(resource, demand, learning, now);
        let request = ParentRequest { safe_capacity, ..wants };
        Ok(Some((Asked { resource, freeze_number, held }, request)))
    }

    /// Tells the store the parent's answer for one resource of a batch of `batch_size`, and
    /// schedules the next request.
    async fn take_answer(
        &mut self,
        asked: &Asked<'_>,
        answer: &Result<ParentLease, ParentError>,
        batch_size: usize,
        now: Micros,
    ) -> Result<(), StoreError> {
        let Asked { resource, freeze_number, held } = *asked;
        let lease = answer.as_ref().ok().map(|lease| clamp_times(*lease, now));
        let last_lease = self.resources.get(resource).and_then(|state| state.lease);
        let thawed = match freeze_number {
            Some(number) => {
                let new_lease = match answer {
                    Ok(_) => lease,
                    Err(error) => lease_after(error, held, last_lease),
                };
                self.store.thaw(resource, number, new_lease).await
            }
            // A resource without demand was not frozen.
            None => Ok(()),
        };
        if !matches!(thawed, Ok(()) | Err(StoreError::Refused)) {
            return thawed;
        }
        let denied = answer.as_ref().is_err_and(|error| error.refused);
        let is_thawed = thawed.is_ok();
        self.schedule(asked, lease, denied, batch_size, is_thawed, now);
        thawed
    }

    /// Schedules the next request for a resource after one that gave `lease`, or that the parent
    /// `denied`. `is_thawed`: whether the store accepted the answer.
    fn schedule(
        &mut self,
        asked: &Asked<'_>,
        lease: Option<ParentLease>,
        denied: bool,
        batch_size: usize,
        is_thawed: bool,
        now: Micros,
    ) {
        let Asked { resource, freeze_number, held } = *asked;
        let last_lease = self.resources.get(resource).and_then(|state| state.lease);
        // Drop the state of a resource without demand once its lease is given back or refused, or
        // if it never had one. Otherwise keep it, also past the lease's expiry, for the safe
        // capacity.
        let is_over = lease.is_some() || denied && batch_size == 1 || last_lease.is_none();
        if freeze_number.is_none() && is_over {
            self.resources.remove(resource);
            return;
        }
        let pause_us = match lease {
            _ if !is_thawed => RETRY_US,
            Some(lease) => lease.refresh_s * 1_000_000,
            None if denied && batch_size == 1 => REFUSED_RETRY_US,
            // Retry in a smaller batch in the next round.
            None if denied => 0,
            None => RETRY_US,
        };
        let batch_limit = match lease {
            Some(_) => MAX_BATCH,
            None if denied => (batch_size / 2).max(1),
            None => self.batch_limit(resource),
        };
        let state = RenewalState {
            due: Micros(now.0.saturating_add(pause_us)),
            lease: lease.or(held).or(last_lease),
            failed: lease.is_none(),
            batch_limit,
        };
        self.resources.insert(resource.to_owned(), state);
    }

    /// Logs errors among the answers, and updates `answered`.
    fn report(&mut self, requests: &[ParentRequest], answers: &Answers) {
        let errors = || {
            let pairs = requests.iter().zip(answers);
            pairs.filter_map(|(request, answer)| Some((request, answer.as_ref().err()?)))
        };
        if answers.iter().any(Result::is_ok) {
            self.answered = Some(true);
        } else if errors().any(|(_, error)| !error.refused)
            // The parent refuses every resource.
            || self.resources.values().all(|state| state.failed)
        {
            self.answered = self.answered.or(Some(false));
        }
        if let Some((_, error)) = errors().find(|(_, error)| !error.refused) {
            if let Some(held_back) = self.failures.pass() {
                tracing::warn!(
                    error = %Sanitized(error), held_back,
                    advice = "see that the parent runs, and that --parent names it",
                    "no lease from the parent: the last one holds until it expires"
                );
            }
        } else if let ([request], Some((_, error))) = (requests, errors().next())
            && let Some(held_back) = self.failures.pass()
        {
            tracing::warn!(
                error = %Sanitized(error), resource = %Sanitized(&request.resource), held_back,
                advice = "see what the parent's access file allows this cluster, and what its \
                          clients want of the resource",
                "the parent refuses a resource: it is asked for again every ten seconds"
            );
        }
    }
}
