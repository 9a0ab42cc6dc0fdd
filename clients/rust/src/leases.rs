//! Leases: a client that makes many calls asks every few seconds for a share of a resource's
//! capacity, and limits itself to it.

mod bell;
mod desk;
mod gauge;
mod keeper;
mod meter;
mod rate;
mod resource;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

pub use desk::LeaseError;
pub use gauge::{Gauge, Place};
pub use rate::RateLimiter;
pub use resource::{Closed, Mode};

use self::desk::Desk;
use self::gauge::Places;
use self::keeper::Keeper;
use self::rate::Rate;
use self::resource::{Held, Resource, Wants, Watch};
use crate::backend::Backend;

/// The leases of one client.
pub(crate) struct Leases {
    backend: Arc<Backend>,
    client_id: String,
    desk: Arc<Desk>,
}

impl Leases {
    pub(crate) fn new(backend: Arc<Backend>, client_id: String) -> Self {
        Self { backend, client_id, desk: Arc::default() }
    }

    pub(crate) async fn close(&self) {
        self.desk.close().await;
    }

    fn lease(&self, id: &str, mode: Mode, wants: Wants) -> Result<Arc<Resource>, LeaseError> {
        if !(1..=1024).contains(&id.len()) {
            return Err(LeaseError::InvalidName);
        }
        let after = match (mode, &wants) {
            (Mode::Optimistic, Wants::ByHand(wants)) => *wants,
            _ => 0.0,
        };
        let held = Held { capacity: 0.0, expires: Instant::now(), after, closed: false };
        let (held, _) = watch::channel(held);
        let (id, wants, bell) = (id.to_owned(), Mutex::new(wants), Arc::clone(&self.desk.bell));
        let resource = Arc::new(Resource { id, mode, wants, held, bell });
        if self.desk.add(&resource)? {
            let (backend, client_id) = (Arc::clone(&self.backend), self.client_id.clone());
            let keeper = Keeper { backend, client_id, desk: Arc::clone(&self.desk) };
            tokio::spawn(keeper.run());
        }
        Ok(resource)
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

    /// The capacity to ask for; a number below 0 means 0. Without it, as much as is demanded: the
    /// mean of the last ten seconds, or what was demanded in the last one if that is more.
    pub fn wants(self, wants: f64) -> Self {
        Self { wants: Some(wants), ..self }
    }

    /// Limits a rate: the capacity is so much a second.
    ///
    /// Must be called within a Tokio runtime, as the others.
    pub fn rate_limiter(self) -> Result<RateLimiter, LeaseError> {
        let rate = Arc::new(Rate::new());
        let wants =
            self.wants.map_or_else(|| Wants::Measured(Arc::clone(&rate) as _), Wants::ByHand);
        let resource = self.leases.lease(self.resource, self.mode, wants)?;
        Ok(RateLimiter::new(resource, rate))
    }

    /// Limits how much is done at once: the capacity is so many.
    pub fn gauge(self) -> Result<Gauge, LeaseError> {
        let places = Arc::new(Places::default());
        let wants =
            self.wants.map_or_else(|| Wants::Measured(Arc::clone(&places) as _), Wants::ByHand);
        let resource = self.leases.lease(self.resource, self.mode, wants)?;
        Ok(Gauge::new(resource, places))
    }

    /// Leaves the use of the capacity to the application, which says what it
    /// [`wants`](Self::wants).
    pub fn capacity(self) -> Result<Capacity, LeaseError> {
        let wants = Wants::ByHand(self.wants.unwrap_or(0.0));
        let resource = self.leases.lease(self.resource, self.mode, wants)?;
        Ok(Capacity { watch: resource.watch(), seen: resource.capacity(), resource })
    }
}

/// A leased capacity. The lease is released when this is dropped.
pub struct Capacity {
    resource: Arc<Resource>,
    watch: Watch,
    /// What [`changed`](Self::changed) has returned last.
    seen: f64,
}

impl Capacity {
    /// What may be used now.
    pub fn get(&self) -> f64 {
        self.resource.capacity()
    }

    /// Waits until another capacity may be used than this returned last, and returns it.
    pub async fn changed(&mut self) -> Result<f64, Closed> {
        loop {
            let capacity = self.watch.capacity(Instant::now())?;
            if std::mem::replace(&mut self.seen, capacity) != capacity {
                return Ok(capacity);
            }
            self.watch.changed(Duration::MAX).await;
        }
    }

    /// Asks for another capacity from now on.
    pub fn set_wants(&self, wants: f64) {
        self.resource.set_wants(Wants::ByHand(wants));
    }
}
