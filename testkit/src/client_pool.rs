//! Many clients of one resource.

use rand::RngExt as _;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use tollgate_server::domain::lease::{Band, Grant, Holder, HolderRequest, Rules};
use tollgate_server::domain::sharing::SharingAlgorithm;
use tollgate_server::store::{LeaseRequest, LeaseStore};

/// Clients of one resource.
pub struct ClientPool {
    /// Resource name.
    pub resource: String,
    /// Sharing rules of the resource.
    pub rules: Rules,
    /// Client ids.
    pub ids: Vec<String>,
    /// Wants of each client.
    pub bands: Vec<Band>,
    /// Range of the lease lengths in seconds: they vary so that a refresh changes the expiry even
    /// shortly after the previous one.
    pub spread_s: usize,
}

impl ClientPool {
    /// `clients` clients whose wants are twice the capacity in total.
    pub fn new(
        algorithm: SharingAlgorithm,
        clients: usize,
        mut wants: impl FnMut() -> f64,
    ) -> Self {
        let band = |wants| Band { priority: 0, subclients: 1, wants };
        let bands: Vec<Band> = (0..clients).map(|_| band(wants())).collect();
        let capacity = bands.iter().map(|band| band.wants).sum::<f64>() / 2.0;
        Self {
            resource: format!("{algorithm:?}/{clients}"),
            rules: Rules {
                algorithm: Some(algorithm),
                capacity,
                lease_s: 300,
                learning_s: 0,
                from_parent: false,
            },
            ids: (0..clients).map(|at| format!("client-{at:06}.example.org")).collect(),
            bands,
            spread_s: 300,
        }
    }

    /// Lease requests of some clients, by index.
    pub fn asks(&self, clients: &[usize], random: &mut SmallRng) -> Vec<LeaseRequest<'_>> {
        let ask = |&at: &usize| {
            let lease_s = self.rules.lease_s + random.random_range(0..self.spread_s.max(1)) as i64;
            let request = HolderRequest {
                holder: Holder::Client(&self.ids[at]),
                bands: std::slice::from_ref(&self.bands[at]),
                claim: None,
                learn_for_us: 0,
            };
            LeaseRequest::new(&self.resource, Rules { lease_s, ..self.rules }, request)
        };
        clients.iter().map(ask).collect()
    }

    /// Refreshes the leases of some clients, by index, 200 per call.
    pub async fn refresh(
        &self,
        store: &impl LeaseStore,
        clients: &[usize],
        random: &mut SmallRng,
    ) -> Vec<Grant> {
        let mut grants = Vec::with_capacity(clients.len());
        for chunk in clients.chunks(200) {
            let asks = self.asks(chunk, random);
            grants.extend(store.lease(&asks).await.into_iter().map(Result::unwrap));
        }
        grants
    }

    /// Refreshes all leases in random order.
    pub async fn refresh_all(&self, store: &impl LeaseStore, random: &mut SmallRng) -> Vec<Grant> {
        let mut all: Vec<usize> = (0..self.ids.len()).collect();
        all.shuffle(random);
        self.refresh(store, &all, random).await
    }
}
