//! Many clients of one resource, and a deterministic random generator.

use tollgate_server::domain::lease::{Band, Grant, Holder, Rules, Wish};
use tollgate_server::domain::sharing::Kind;
use tollgate_server::store::{LeaseAsk, LeaseStore};

/// Deterministic random numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// A number in `low..high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * ((self.bits() >> 11) as f64 / (1_u64 << 53) as f64)
    }

    /// Shuffles `items`.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }
}

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
    pub fn new(kind: Kind, clients: usize, mut wants: impl FnMut() -> f64) -> Self {
        let band = |wants| Band { priority: 0, subclients: 1, wants };
        let bands: Vec<Band> = (0..clients).map(|_| band(wants())).collect();
        let capacity = bands.iter().map(|band| band.wants).sum::<f64>() / 2.0;
        Self {
            resource: format!("{kind:?}/{clients}"),
            rules: Rules {
                kind: Some(kind),
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
    pub fn asks(&self, clients: &[usize], random: &mut Random) -> Vec<LeaseAsk<'_>> {
        let ask = |&at: &usize| {
            let lease_s = self.rules.lease_s + random.below(self.spread_s.max(1)) as i64;
            let wish = Wish {
                holder: Holder::Client(&self.ids[at]),
                bands: std::slice::from_ref(&self.bands[at]),
                claim: None,
                learn_for_us: 0,
            };
            LeaseAsk::new(&self.resource, Rules { lease_s, ..self.rules }, wish)
        };
        clients.iter().map(ask).collect()
    }

    /// Refreshes the leases of some clients, by index, 200 per call.
    pub async fn refresh(
        &self,
        store: &impl LeaseStore,
        clients: &[usize],
        random: &mut Random,
    ) -> Vec<Grant> {
        let mut grants = Vec::with_capacity(clients.len());
        for chunk in clients.chunks(200) {
            let asks = self.asks(chunk, random);
            grants.extend(store.lease(&asks).await.into_iter().map(Result::unwrap));
        }
        grants
    }

    /// Refreshes all leases in random order.
    pub async fn refresh_all(&self, store: &impl LeaseStore, random: &mut Random) -> Vec<Grant> {
        let mut all: Vec<usize> = (0..self.ids.len()).collect();
        random.shuffle(&mut all);
        self.refresh(store, &all, random).await
    }
}
