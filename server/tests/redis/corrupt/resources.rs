//! Corrupt values under the keys of a resource: its holders, their orders, the lease from the
//! parent. One part is damaged, and clients continue. Every request is answered, no answer contains
//! NaN, and after the old leases have expired, the store behaves like an undamaged one.

use std::cell::RefCell;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::select;
use tollgate_server::domain::lease::{
    Band, Claim, Grant, Holder, HolderRequest, ParentLease, Rules,
};
use tollgate_server::domain::sharing::SharingAlgorithm;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{LeaseRequest, LeaseStore};

use super::{CorruptedStore, try_cases};
use testkit::START;
use testkit::corrupt_values::{CorruptValue, bytes, corrupt_value, number};

const CLIENTS: [(&str, f64); 3] = [("a", 1000.0), ("b", 50.0), ("c", 10.0)];

const SECOND: i64 = 1_000_000;

/// A change to stored bytes.
#[derive(Clone, Debug)]
enum Change {
    Cut(usize),
    Other(Vec<u8>),
    More(Vec<u8>),
    Number(usize, f64),
}

impl Change {
    fn of(&self, mut value: Vec<u8>) -> Vec<u8> {
        match self {
            Self::Cut(length) => value.truncate(*length % value.len().max(1)),
            Self::Other(other) => value.clone_from(other),
            Self::More(more) => value.extend(more),
            Self::Number(at, number) => {
                let places = (value.len() / 8).max(1);
                let at = 8 * (at % places);
                value.resize(value.len().max(8), 0);
                value[at..at + 8].copy_from_slice(&number.to_le_bytes());
            }
        }
        value
    }
}

#[derive(Clone, Debug)]
enum Damage {
    /// Another value under the key.
    Replaced(&'static str, CorruptValue),
    /// A field of a hash. The fields of `p{r}` are the lease, a band and the number of the freeze.
    Field(&'static str, &'static [u8], Change),
    LostField(&'static [u8]),
    /// An added member of a sorted set.
    Foreign(&'static str, f64),
    /// A removed member of a sorted set.
    Lost(&'static str, &'static str),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        2 => any::<usize>().prop_map(Change::Cut),
        2 => bytes().prop_map(Change::Other),
        1 => bytes().prop_map(Change::More),
        5 => (any::<usize>(), number()).prop_map(|(at, number)| Change::Number(at, number)),
        // Plausible values.
        5 => (any::<usize>(), select(vec![-1e16, -1e9, 0.0, 1.0, 3.0, 4294967296.0, 1e300]))
            .prop_map(|(at, number)| Change::Number(at, number)),
    ]
}

fn damage() -> impl Strategy<Value = Damage> {
    let field = select(vec![
        ("h{r}", &b""[..]),
        ("h{r}", b"a"),
        ("h{r}", b"c"),
        ("p{r}", b""),
        ("p{r}", &[1, 0, 0, 0, 0, 0, 0, 0]),
        ("p{r}", b"n"),
    ]);
    let score = select(vec![f64::NEG_INFINITY, -1.0, 7.0, 50.0, 2e9, f64::INFINITY]);
    let order = || select(vec!["w{r}", "e{r}"]);
    prop_oneof![
        3 => (select(vec!["h{r}", "w{r}", "e{r}", "p{r}"]), corrupt_value())
            .prop_map(|(key, value)| Damage::Replaced(key, value)),
        6 => (field, change()).prop_map(|((key, field), change)| Damage::Field(key, field, change)),
        1 => select(vec![&b""[..], b"a", b"c"]).prop_map(Damage::LostField),
        2 => (order(), score).prop_map(|(key, score)| Damage::Foreign(key, score)),
        2 => (order(), select(vec!["a", "b", "c"])).prop_map(|(key, id)| Damage::Lost(key, id)),
    ]
}

impl Damage {
    fn put(&self, inside: &mut redis::Connection) {
        let done = match self {
            Self::Replaced(key, value) => {
                value.put(inside, key);
                Ok(())
            }
            Self::Field(key, field, change) => {
                let mut get = redis::cmd("HGET");
                let value = get.arg(key).arg(*field).query::<Option<Vec<u8>>>(inside);
                // Without a parent there is no such field.
                value.and_then(|value| match value {
                    Some(value) => {
                        let mut set = redis::cmd("HSET");
                        set.arg(key).arg(*field).arg(change.of(value)).exec(inside)
                    }
                    None => Ok(()),
                })
            }
            Self::LostField(field) => redis::cmd("HDEL").arg("h{r}").arg(*field).exec(inside),
            Self::Foreign(key, score) => {
                redis::cmd("ZADD").arg(key).arg(score).arg("foreign").exec(inside)
            }
            Self::Lost(key, id) => redis::cmd("ZREM").arg(key).arg(*id).exec(inside),
        };
        if let Err(error) = done {
            // Another damage may have replaced the key.
            assert_eq!(error.code(), Some("WRONGTYPE"), "{error}");
        }
    }

    /// Whether the next request must notice the damage.
    fn is_plain(&self) -> bool {
        match self {
            Self::Replaced("h{r}", value) => !matches!(value, CorruptValue::Hash(_)),
            Self::Field("h{r}", b"", Change::Cut(_)) => true,
            Self::Field("h{r}", b"", Change::Number(at, number)) => {
                // All fields but the ends of the threshold, a far time, and a flag.
                ![8, 9, 11, 14].contains(&(at % 16)) && !number.is_finite()
            }
            _ => false,
        }
    }
}

fn rules(algorithm: SharingAlgorithm, from_parent: bool) -> Rules {
    Rules { algorithm: Some(algorithm), capacity: 120.0, lease_s: 60, learning_s: 60, from_parent }
}

async fn ask(
    store: &impl LeaseStore,
    rules: Rules,
    (id, wants): (&str, f64),
    claim: Option<Claim>,
) -> Grant {
    let bands = [Band { priority: 1, subclients: 1, wants }];
    let request =
        HolderRequest { holder: Holder::Client(id), bands: &bands, claim, learn_for_us: 0 };
    store.lease(&[LeaseRequest::new("r", rules, request)]).await.pop().unwrap().unwrap()
}

/// The parent leases the whole capacity.
async fn from_parent(store: &impl LeaseStore, now_s: i64) {
    let Some(demand) = store.freeze("r", Duration::from_secs(2)).await.unwrap() else { return };
    assert!(demand.has.is_finite(), "{demand:?}");
    assert!(demand.bands.iter().all(|band| band.wants.is_finite()), "{demand:?}");
    let lease = ParentLease {
        capacity: 120.0,
        expiry_s: now_s + 60,
        refresh_s: 5,
        safe_capacity: 0.0,
        algorithm: SharingAlgorithm::FairShare,
        lease_s: 60,
    };
    store.thaw("r", demand.number, Some(lease)).await.unwrap();
}

/// All clients ask three times. Returns their last grants.
async fn last_of_three_rounds(
    store: &impl LeaseStore,
    corrupted: &CorruptedStore,
    rules: Rules,
    since: i64,
) -> Vec<f64> {
    let mut last = Vec::new();
    for round in 0..3 {
        let now_s = (since + 5 * round * SECOND) / SECOND;
        corrupted.clock.advance(since + 5 * round * SECOND - corrupted.clock.now().0);
        last.clear();
        for client in CLIENTS {
            last.push(ask(store, rules, client, None).await.has);
        }
        if rules.from_parent {
            from_parent(store, now_s).await;
        }
    }
    last
}

async fn continue_clients(corrupted: &CorruptedStore, rules: Rules) -> Result<(), TestCaseError> {
    let mut held = [0.0; 3];
    for round in 0..3 {
        corrupted.clock.advance(5 * SECOND);
        let now_s = corrupted.clock.now().as_secs();
        if rules.from_parent {
            from_parent(&corrupted.store, now_s).await;
        }
        for (client, held) in CLIENTS.iter().zip(&mut held) {
            let claim = (round > 0).then_some(Claim { capacity: *held, expiry_s: now_s + 30 });
            let grant = ask(&corrupted.store, rules, *client, claim).await;
            prop_assert!(grant.has >= 0.0 && grant.has <= client.1.max(*held), "{grant:?}");
            prop_assert!(grant.expiry_s <= now_s + 60, "{grant:?}");
            prop_assert!(grant.capacity.is_finite() && grant.subclients.is_finite(), "{grant:?}");
            *held = grant.has;
        }
        if round == 1 {
            corrupted.store.release(Holder::Client("b"), &["r"]).await.unwrap();
        }
    }
    Ok(())
}

#[test]
fn a_damaged_resource_is_learned_anew() {
    let corrupted = RefCell::new(CorruptedStore::new());
    let algorithm = select(vec![
        SharingAlgorithm::FairShare,
        SharingAlgorithm::ProportionalShare,
        SharingAlgorithm::Static,
    ]);
    try_cases(200, (algorithm, any::<bool>(), damage()), |(algorithm, parent, damage)| {
        let corrupted = &mut *corrupted.borrow_mut();
        corrupted.reset();
        let before = corrupted.replaced("resource");
        let rules = rules(algorithm, parent);
        corrupted.clock.advance(61 * SECOND);
        corrupted.runtime.block_on(last_of_three_rounds(
            &corrupted.store,
            corrupted,
            rules,
            START.0 + 61 * SECOND,
        ));
        prop_assert_eq!(corrupted.replaced("resource"), before);

        damage.put(&mut corrupted.inside);
        if damage.is_plain() {
            corrupted.runtime.block_on(ask(&corrupted.store, rules, CLIENTS[0], None));
            prop_assert_eq!(corrupted.replaced("resource") - before, 1.0, "noticed at once");
        }
        corrupted.runtime.block_on(continue_clients(corrupted, rules))?;
        prop_assert!(corrupted.replaced("resource") - before <= 2.0, "counted again and again");

        // By then all leases have expired, including learned ones.
        let memory = MemoryStore::with_clock(corrupted.clock.clone());
        // Damage that is only noticed then adds one minute of learning.
        let since = START.0 + 400 * SECOND;
        corrupted.runtime.block_on(last_of_three_rounds(
            &corrupted.store,
            corrupted,
            rules,
            since - 200 * SECOND,
        ));
        corrupted.clock.advance(START.0 - corrupted.clock.now().0);
        corrupted.runtime.block_on(ask(&memory, Rules { lease_s: 1, ..rules }, CLIENTS[0], None));
        let expected =
            corrupted.runtime.block_on(last_of_three_rounds(&memory, corrupted, rules, since));
        let found = corrupted.runtime.block_on(last_of_three_rounds(
            &corrupted.store,
            corrupted,
            rules,
            since,
        ));
        for (expected, found) in expected.iter().zip(&found) {
            prop_assert!((expected - found).abs() < 1e-6, "{expected:?} and {found:?}");
        }
        let healed = corrupted.replaced("resource");
        corrupted.runtime.block_on(last_of_three_rounds(
            &corrupted.store,
            corrupted,
            rules,
            since + 20 * SECOND,
        ));
        prop_assert_eq!(corrupted.replaced("resource"), healed, "healthy afterwards");
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    });
}

/// The first operation after the damage.
#[derive(Clone, Copy, Debug)]
enum First {
    Ask,
    Release(&'static str),
    Freeze,
    Thaw,
}

/// Several parts are damaged at once, and the first operation may be any.
#[test]
fn any_first_operation_succeeds() {
    let corrupted = RefCell::new(CorruptedStore::new());
    let first = select(vec![
        First::Ask,
        First::Release("a"),
        First::Release("nobody"),
        First::Freeze,
        First::Thaw,
    ]);
    let damages = prop::collection::vec(damage(), 1..=3);
    // The old leases are valid, or have expired.
    let later = select(vec![1, 61]);
    try_cases(600, (any::<bool>(), damages, first, later), |(parent, damages, first, later)| {
        let corrupted = &mut *corrupted.borrow_mut();
        corrupted.reset();
        let rules = rules(SharingAlgorithm::FairShare, parent);
        corrupted.clock.advance(61 * SECOND);
        corrupted.runtime.block_on(last_of_three_rounds(
            &corrupted.store,
            corrupted,
            rules,
            START.0 + 61 * SECOND,
        ));
        let demand = corrupted.store.freeze("r", Duration::from_secs(2));
        let demand = corrupted.runtime.block_on(demand).unwrap().unwrap();
        for damage in &damages {
            damage.put(&mut corrupted.inside);
        }
        corrupted.clock.advance(later * SECOND);
        // Twice, as the first time may leave damage behind.
        for _ in 0..2 {
            corrupted.runtime.block_on(async {
                match first {
                    First::Ask => drop(ask(&corrupted.store, rules, CLIENTS[0], None).await),
                    First::Release(id) => {
                        corrupted.store.release(Holder::Client(id), &["r"]).await.unwrap();
                    }
                    First::Freeze => {
                        from_parent(&corrupted.store, corrupted.clock.now().as_secs()).await
                    }
                    First::Thaw => corrupted.store.thaw("r", demand.number, None).await.unwrap(),
                }
            });
        }
        corrupted.runtime.block_on(continue_clients(corrupted, rules))?;
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    });
}

/// Plausible numbers that contradict other keys.
#[test]
fn plausible_numbers_refuse_nobody() {
    let mut corrupted = CorruptedStore::new();
    let rules = rules(SharingAlgorithm::FairShare, true);
    let sums = |at, number| Damage::Field("h{r}", b"", Change::Number(at, number));
    let leased = |at, number| Damage::Field("p{r}", b"", Change::Number(at, number));
    for (damage, lost) in [
        // More uncounted holders than holders.
        (sums(15, 4294967296.0), None),
        (sums(15, 3.0), Some("e{r}")),
        // Keys expire before the epoch, and one must be created.
        (sums(12, -1e16), Some("p{r}")),
        // A negative capacity, or an endless refresh interval.
        (leased(6, -1e9), None),
        (leased(2, 1e300), None),
    ] {
        corrupted.reset();
        corrupted.runtime.block_on(last_of_three_rounds(
            &corrupted.store,
            &corrupted,
            rules,
            START.0 + 61 * SECOND,
        ));
        damage.put(&mut corrupted.inside);
        if let Damage::Field("p{r}", ..) = damage {
            let until = corrupted.clock.now().0 as f64 + 1e9;
            leased(7, until).put(&mut corrupted.inside);
        }
        if let Some(key) = lost {
            redis::cmd("DEL").arg(key).exec(&mut corrupted.inside).unwrap();
        }
        corrupted.clock.advance(SECOND);
        corrupted.runtime.block_on(async {
            for _ in 0..3 {
                corrupted.store.release(Holder::Client("nobody"), &["r"]).await.unwrap();
                corrupted.store.freeze("r", Duration::from_secs(2)).await.unwrap();
            }
            let grant = ask(&corrupted.store, rules, CLIENTS[0], None).await;
            assert!(grant.has >= 0.0 && grant.capacity >= 0.0, "{damage:?}: {grant:?}");
            assert!(grant.parent_refresh_s.is_none_or(|refresh_s| refresh_s < 1 << 30));
        });
        assert_eq!(corrupted.errors(), 0.0, "{damage:?}");
    }
}

/// A release or a renewal leaves damage to the next lease request, which is answered by its claim.
#[test]
fn only_lease_requests_replace_damage() {
    let mut corrupted = CorruptedStore::new();
    corrupted.reset();
    let rules = rules(SharingAlgorithm::FairShare, true);
    corrupted.runtime.block_on(last_of_three_rounds(
        &corrupted.store,
        &corrupted,
        rules,
        START.0 + 61 * SECOND,
    ));
    Damage::Field("h{r}", b"", Change::Cut(100)).put(&mut corrupted.inside);
    corrupted.runtime.block_on(async {
        corrupted.store.release(Holder::Client("a"), &["r"]).await.unwrap();
        let demand = corrupted.store.freeze("r", Duration::from_secs(2)).await.unwrap().unwrap();
        assert!(demand.bands.is_empty(), "somebody may hold leases, nobody knows who: {demand:?}");
        corrupted.store.thaw("r", demand.number, None).await.unwrap();
        assert_eq!(corrupted.replaced("resource"), 0.0);
        let expiry_s = corrupted.clock.now().as_secs() + 60;
        let grant =
            ask(&corrupted.store, rules, CLIENTS[0], Some(Claim { capacity: 60.0, expiry_s }))
                .await;
        assert_eq!(grant.has, 60.0);
        assert!(grant.learning_until.is_some());
        assert_eq!(corrupted.replaced("resource"), 1.0);
    });
}

/// More uncounted holders than Redis can count.
#[test]
fn any_number_of_holders_can_be_listed() {
    let mut corrupted = CorruptedStore::new();
    corrupted.reset();
    let mut sums = [0.0; 16];
    for ghosts in [1e10, 1e18, 9.3e18, f64::MAX, f64::INFINITY] {
        sums[15] = ghosts;
        let bytes: Vec<u8> = sums.iter().flat_map(|number: &f64| number.to_le_bytes()).collect();
        redis::cmd("HSET").arg("h{r}").arg("").arg(bytes).exec(&mut corrupted.inside).unwrap();
        let found = corrupted.runtime.block_on(corrupted.store.leases("r", 100)).unwrap();
        assert!(found.is_some_and(|(_, leases)| leases.items.is_empty()), "{ghosts}");
    }
}

/// Finite parts of a sum may add up to infinity.
#[test]
fn infinite_sums_are_not_listed() {
    let mut corrupted = CorruptedStore::new();
    corrupted.reset();
    for pair in [[0, 1], [0, 3], [2, 5]] {
        let mut sums = [0.0; 16];
        for at in pair {
            sums[at] = f64::MAX;
        }
        let bytes: Vec<u8> = sums.iter().flat_map(|number: &f64| number.to_le_bytes()).collect();
        redis::cmd("HSET").arg("h{r}").arg("").arg(bytes).exec(&mut corrupted.inside).unwrap();
        assert!(
            corrupted.runtime.block_on(corrupted.store.leases("r", 100)).unwrap().is_none(),
            "{pair:?}"
        );
    }
}

/// A damaged resource may be missing in lists until the next lease request. Others are listed.
#[test]
fn undamaged_resources_are_listed() {
    let corrupted = RefCell::new(CorruptedStore::new());
    try_cases(100, (any::<bool>(), damage()), |(parent, damage)| {
        let corrupted = &mut *corrupted.borrow_mut();
        corrupted.reset();
        let rules = rules(SharingAlgorithm::FairShare, parent);
        corrupted.runtime.block_on(async {
            last_of_three_rounds(&corrupted.store, corrupted, rules, START.0 + 61 * SECOND).await;
            let bands = [Band { priority: 1, subclients: 1, wants: 5.0 }];
            let request = HolderRequest {
                holder: Holder::Client("a"),
                bands: &bands,
                claim: None,
                learn_for_us: 0,
            };
            let other = LeaseRequest::new("other", rules, request);
            corrupted.store.lease(&[other]).await.pop().unwrap().unwrap();
        });
        damage.put(&mut corrupted.inside);
        let (one, all) = corrupted.runtime.block_on(async {
            (corrupted.store.leases("r", 100).await, corrupted.store.resources(100).await)
        });
        if let Some((totals, leases)) = one.unwrap() {
            prop_assert!(totals.has.is_finite() && totals.split.wants().is_finite());
            prop_assert!(leases.items.len() <= 5);
        }
        let all = all.unwrap().items;
        prop_assert!(all.iter().any(|(name, _)| name == "other"), "{all:?}");
        prop_assert!(all.iter().all(|(_, totals)| totals.has.is_finite()), "{all:?}");
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    });
}
