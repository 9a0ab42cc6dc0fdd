//! Leases: a client that makes many calls asks every few seconds for a share of a resource's
//! capacity, and limits itself to it.

mod demand;
mod desk;
mod gauge;
mod keeper;
mod kept;
mod meter;
mod rate;
mod resource;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use desk::LeaseError;
pub use gauge::{Gauge, Place};
pub use rate::RateLimiter;
pub use resource::{Closed, Mode};

use self::desk::{Desk, Handle};
use self::gauge::Places;
use self::keeper::{Caller, Keeper};
use self::rate::Rate;
use self::resource::{Held, Resource, Usage, Watch};
use crate::backend::Backend;
use crate::tasks::Tasks;

/// The leases of one client.
pub(crate) struct Leases {
    caller: Caller<Arc<Backend>>,
    desk: Arc<Desk>,
    tasks: Tasks,
}

impl Leases {
    pub(crate) fn new(backend: Arc<Backend>, client_id: String, tasks: Tasks) -> Self {
        let caller = Caller { lessor: backend, client_id };
        Self { caller, desk: Arc::default(), tasks }
    }

    pub(crate) async fn close(&self) {
        self.desk.close().await;
    }

    fn lease(&self, resource: Resource) -> Result<Handle, LeaseError> {
        if !(1..=1024).contains(&resource.id.len()) {
            return Err(LeaseError::InvalidName);
        }
        let (handle, is_first) = self.desk.add(resource)?;
        if is_first {
            let keeper = Keeper::new(self.caller.clone(), Arc::clone(&self.desk));
            self.tasks.spawn(keeper.run());
        }
        Ok(handle)
    }
}

/// The settings of a lease; see [`Client::lease`](crate::Client::lease).
#[must_use]
pub struct LeaseBuilder<'a> {
    leases: &'a Leases,
    resource: &'a str,
    mode: Mode,
    wants: Option<f64>,
}

impl<'a> LeaseBuilder<'a> {
    pub(crate) fn new(leases: &'a Leases, resource: &'a str) -> Self {
        Self { leases, resource, mode: Mode::default(), wants: None }
    }

    /// What may be used once the lease has run out, and before the first answer.
    pub fn mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// The capacity to ask for; a number below 0 means 0. Without it, as much as is demanded: a
    /// fifth more than the average of the last ten seconds, or what was demanded in the last one if
    /// that is more; and twice as much while callers wait for a rate, or a gauge refuses them.
    pub fn wants(self, wants: f64) -> Self {
        Self { wants: Some(wants), ..self }
    }

    fn lease(&self, wants: Option<f64>, usage: Arc<dyn Usage>) -> Result<Handle, LeaseError> {
        self.leases.lease(Resource::new(self.resource, self.mode, wants, usage))
    }

    /// Limits a rate: the capacity is so much a second.
    pub fn rate_limiter(self) -> Result<RateLimiter, LeaseError> {
        let rate = Arc::new(Rate::new());
        let handle = self.lease(self.wants, Arc::clone(&rate) as _)?;
        Ok(RateLimiter::new(handle, rate))
    }

    /// Limits how much is done at once: the capacity is so many.
    pub fn gauge(self) -> Result<Gauge, LeaseError> {
        let places = Arc::new(Places::default());
        let handle = self.lease(self.wants, Arc::clone(&places) as _)?;
        Ok(Gauge::new(handle, places))
    }

    /// Leaves the use of the capacity to the application, which says what it
    /// [`wants`](Self::wants).
    pub fn capacity(self) -> Result<Capacity, LeaseError> {
        let resource =
            Resource::new(self.resource, self.mode, self.wants.or(Some(0.0)), Arc::new(Unmeasured));
        let seen = resource.capacity();
        let handle = self.leases.lease(resource)?;
        Ok(Capacity { watch: handle.watch(), seen, handle })
    }
}

/// A use that the application says itself.
struct Unmeasured;

impl Usage for Unmeasured {
    fn demand(&self, _: f64) -> f64 {
        0.0
    }

    fn is_short(&self, _: f64) -> bool {
        false
    }

    fn begin_second(&self) {}

    fn before_change(&self, _: &Held, _: Instant) {}
}

/// A leased capacity. The lease is released when this is dropped.
pub struct Capacity {
    handle: Handle,
    watch: Watch,
    /// What [`changed`](Self::changed) has returned last; at first, what may be used without a
    /// lease.
    seen: f64,
}

impl Capacity {
    /// What may be used now.
    pub fn get(&self) -> f64 {
        self.handle.capacity()
    }

    /// Waits until another capacity may be used than this returned last, and returns it. At first,
    /// waits for one other than what [`Mode`] allows before the first answer.
    pub async fn changed(&mut self) -> Result<f64, Closed> {
        loop {
            let now = Instant::now();
            let capacity = self.watch.held(now)?.capacity(now);
            if std::mem::replace(&mut self.seen, capacity) != capacity {
                return Ok(capacity);
            }
            self.watch.changed(now, Duration::MAX).await;
        }
    }

    /// Asks for another capacity from now on.
    pub fn set_wants(&self, wants: f64) {
        self.handle.set_wants(wants);
    }
}
