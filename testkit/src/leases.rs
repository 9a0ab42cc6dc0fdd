//! Many clients of one resource, and chance that is the same each time.

use tollgate_server::domain::lease::{Band, Grant, Holder, Rules, Wish};
use tollgate_server::domain::sharing::Kind;
use tollgate_server::store::{LeaseAsk, LeaseStore};

/// Numbers that look random (SplitMix64).
pub struct Random(pub u64);

impl Random {
    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 up to `n`, without it.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// From `low` up to `high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * ((self.bits() >> 11) as f64 / (1_u64 << 53) as f64)
    }

    /// In any order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }
}

/// Clients of one resource.
pub struct Crowd {
    /// Of which.
    pub resource: String,
    /// How it is shared.
    pub rules: Rules,
    /// Who they are.
    pub ids: Vec<String>,
    /// What they want, one by one.
    pub bands: Vec<Band>,
    /// By how many seconds their leases differ in length, so that a refresh changes the expiry
    /// also when it comes soon after the last.
    pub spread_s: usize,
}

impl Crowd {
    /// So many who share by that rule and want that, twice as much as there is.
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

    /// What these ask for.
    pub fn asks(&self, who: &[usize], random: &mut Random) -> Vec<LeaseAsk<'_>> {
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
        who.iter().map(ask).collect()
    }

    /// These ask, some at a time.
    pub async fn refresh(
        &self,
        store: &impl LeaseStore,
        who: &[usize],
        random: &mut Random,
    ) -> Vec<Grant> {
        let mut grants = Vec::with_capacity(who.len());
        for some in who.chunks(200) {
            let asks = self.asks(some, random);
            grants.extend(store.lease(&asks).await.into_iter().map(Result::unwrap));
        }
        grants
    }

    /// All ask, in any order.
    pub async fn refresh_all(&self, store: &impl LeaseStore, random: &mut Random) -> Vec<Grant> {
        let mut all: Vec<usize> = (0..self.ids.len()).collect();
        random.shuffle(&mut all);
        self.refresh(store, &all, random).await
    }
}
