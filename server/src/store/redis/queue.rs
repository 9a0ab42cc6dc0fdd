//! What waits for a lane: in the order of arrival, bounded, and fair between owners.
//!
//! As long as all that wait fit into one batch there is nothing to be fair about. When they
//! don't, the batch is shared out like a capacity: each group gets what it has waiting up to a
//! level, the highest at which the batch is not exceeded (max-min fairness), and what a group gets
//! is shared out between its members in the same way. A full queue is shared out likewise: a job of
//! a group that has less than an equal share of the queue replaces the latest job of the group that
//! has most; within a group the same holds between members; any other job is turned away.
//!
//! Whoever comes while a batch is in flight waits for all of it. So while one group has most of
//! what waits and another one is asked for now and then, batches are small: the one pays with some of its
//! rate for the other's wait.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hashbrown::HashMap;
use tokio::sync::Notify;

/// The most in a batch while one group floods: a round trip of these takes a third of the time of
/// a full one, and a decision in it a tenth more.
const SMALL: usize = 32;

/// Whoever has asked within this time may ask again at any moment.
const LATELY_MS: u64 = 200;

/// Whom a job is counted for. Both parts are hashes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Owner {
    /// What is asked: a namespace, or a template of resources.
    pub(super) group: u64,
    /// Who asks, or what for, within the group.
    pub(super) member: u64,
}

/// What waits, and belongs to somebody.
pub(super) trait Owned {
    /// Whom it is counted for.
    fn owner(&self) -> Owner;
}

/// The queue of one lane.
pub(super) struct Queue<T> {
    inner: Mutex<Inner<T>>,
    /// How many wait, for those who want to know without the lock.
    len: AtomicUsize,
    arrived: Notify,
    most: AtomicUsize,
    /// How many make up a batch.
    batch: AtomicUsize,
    company: Arc<Company>,
    /// See [`Queue::is_flooded`].
    flooded: AtomicBool,
}

/// Whether several groups are asked for at one server. All of a node's queues for that server know it together:
/// the batches of each wait for those of the others there.
pub(super) struct Company {
    since: Instant,
    /// One of those whose batch was the last one; 0: there was none yet.
    last: AtomicU64,
    /// When there were several, in ms of `since`; 0: not yet.
    seen_ms: AtomicU64,
}

impl Company {
    pub(super) fn new() -> Self {
        let (last, seen_ms) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { since: Instant::now(), last, seen_ms }
    }

    /// In ms, beginning at 1.
    fn now_ms(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }

    /// So many groups wait, of which this is one.
    fn see(&self, group: u64, groups: usize, now_ms: u64) {
        let last = self.last.load(Ordering::Relaxed);
        if last != group {
            self.last.store(group, Ordering::Relaxed);
        }
        if groups > 1 || (last != group && last != 0) {
            self.seen_ms.store(now_ms, Ordering::Relaxed);
        }
    }

    /// There have been several within [`LATELY_MS`].
    fn lately(&self, now_ms: u64) -> bool {
        match self.seen_ms.load(Ordering::Relaxed) {
            0 => false,
            seen_ms => now_ms.saturating_sub(seen_ms) <= LATELY_MS,
        }
    }
}

struct Inner<T> {
    items: VecDeque<T>,
    counts: Counts,
    closed: bool,
}

/// How many jobs wait for each group and each member of one.
#[derive(Default)]
struct Counts {
    groups: HashMap<u64, Group>,
    members: HashMap<Owner, usize>,
}

#[derive(Clone, Copy, Default)]
struct Group {
    waiting: usize,
    /// How many members have something waiting.
    members: usize,
}

impl Counts {
    fn add(&mut self, owner: Owner) {
        let group = self.groups.entry(owner.group).or_default();
        let waiting = self.members.entry(owner).or_default();
        group.waiting += 1;
        group.members += usize::from(*waiting == 0);
        *waiting += 1;
    }

    fn remove(&mut self, owner: Owner) {
        let Some(waiting) = self.members.get_mut(&owner) else { return };
        *waiting -= 1;
        let last = *waiting == 0;
        if last {
            self.members.remove(&owner);
        }
        if let Some(group) = self.groups.get_mut(&owner.group) {
            group.waiting -= 1;
            group.members -= usize::from(last);
            if group.waiting == 0 {
                self.groups.remove(&owner.group);
            }
        }
    }

    fn clear(&mut self) {
        self.groups.clear();
        self.members.clear();
    }

    /// The group that has most waiting, and how many those are.
    fn greediest_group(&self) -> Option<(u64, usize)> {
        let waiting = self.groups.iter().map(|(&group, counts)| (group, counts.waiting));
        waiting.max_by_key(|(_, waiting)| *waiting)
    }

    /// The member of a group that has most waiting, and how many those are.
    fn greediest_member(&self, group: u64) -> Option<(Owner, usize)> {
        let members = self.members.iter().filter(|(owner, _)| owner.group == group);
        members.map(|(&owner, &waiting)| (owner, waiting)).max_by_key(|(_, waiting)| *waiting)
    }

    /// Whose latest job has to go for one of `owner`; `None`: that one is turned away itself.
    fn loser(&self, owner: Owner, most: usize) -> Option<Owner> {
        let own = self.groups.get(&owner.group).copied().unwrap_or_default();
        if own.waiting < most / self.groups.len().max(1) {
            let (group, _) = self.greediest_group()?;
            if group != owner.group {
                return self.greediest_member(group).map(|(member, _)| member);
            }
        }
        let waiting = self.members.get(&owner).copied().unwrap_or_default();
        if waiting >= own.waiting / own.members.max(1) {
            return None;
        }
        // To replace one of equals would only change which of them is turned away.
        let (member, has) = self.greediest_member(owner.group)?;
        (has > waiting + 1).then_some(member)
    }

    /// How a batch of `most` is shared out.
    fn shares(&self, most: usize) -> Shares {
        let group_level = level(self.groups.values().map(|group| group.waiting), most);
        let mut waiting: HashMap<u64, Vec<usize>> = HashMap::new();
        for (owner, &count) in &self.members {
            if self.groups.get(&owner.group).is_some_and(|group| group.waiting > group_level) {
                waiting.entry(owner.group).or_default().push(count);
            }
        }
        let share = |counts: Vec<usize>| Share { taken: 0, level: level(counts, group_level) };
        let groups = waiting.into_iter().map(|(group, counts)| (group, share(counts))).collect();
        Shares { group_level, groups, members: HashMap::new() }
    }
}

/// What of a batch goes to whom. The levels are rounded up, for what division leaves over.
struct Shares {
    group_level: usize,
    /// The groups that have more than that.
    groups: HashMap<u64, Share>,
    /// How much their members have taken.
    members: HashMap<Owner, usize>,
}

/// What a group has taken, and the most that each of its members may.
struct Share {
    taken: usize,
    level: usize,
}

impl Shares {
    /// Takes one more for `owner`, if its group and itself have not had their shares.
    fn take(&mut self, owner: Owner) -> bool {
        let Some(group) = self.groups.get_mut(&owner.group) else { return true };
        let taken = self.members.entry(owner).or_default();
        if group.taken >= self.group_level || *taken >= group.level {
            return false;
        }
        group.taken += 1;
        *taken += 1;
        true
    }
}

impl<T: Owned> Queue<T> {
    /// An empty one for at most `most`, of which up to `batch` travel together.
    pub(super) fn new(most: usize, batch: usize, company: Arc<Company>) -> Self {
        let inner = Inner { items: VecDeque::new(), counts: Counts::default(), closed: false };
        let (inner, len) = (Mutex::new(inner), AtomicUsize::new(0));
        let (most, batch) = (AtomicUsize::new(most), AtomicUsize::new(batch));
        let flooded = AtomicBool::new(false);
        Self { inner, len, arrived: Notify::new(), most, batch, company, flooded }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds one. Gives back who has to go for lack of room, which may be the same.
    pub(super) fn push(&self, item: T) -> Option<T> {
        let mut inner = self.lock();
        if inner.closed {
            return Some(item);
        }
        let (mut gone, owner) = (None, item.owner());
        let most = self.most.load(Ordering::Relaxed);
        if inner.items.len() >= most {
            match inner.make_room(owner, most) {
                Some(other) => gone = Some(other),
                None => return Some(item),
            }
        }
        inner.counts.add(owner);
        inner.items.push_back(item);
        self.len.store(inner.items.len(), Ordering::Relaxed);
        drop(inner);
        self.arrived.notify_one();
        gone
    }

    /// How many travel together at the moment.
    pub(super) fn batch(&self) -> usize {
        let batch = self.batch.load(Ordering::Relaxed);
        if self.is_flooded() { batch.min(SMALL) } else { batch }
    }

    /// From here on, up to `batch` travel together.
    pub(super) fn resize(&self, batch: usize) {
        self.batch.store(batch, Ordering::Relaxed);
    }

    /// No more than so many may wait from here on; those that do stay.
    pub(super) fn bound(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// A whole batch waits already; may be out of date at once.
    pub(super) fn is_full(&self) -> bool {
        self.len() >= self.batch.load(Ordering::Relaxed)
    }

    /// How many wait; may be out of date at once.
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// One group has most of what waits while others are asked for, too; may be out of date at once.
    pub(super) fn is_flooded(&self) -> bool {
        self.flooded.load(Ordering::Relaxed)
    }

    /// Nothing more is taken in; what waits is still given out.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_one();
    }

    /// Moves as many as travel together into `batch`, as soon as there are any; `false`: there
    /// will be no more. Loses nothing when it is dropped.
    pub(super) async fn take(&self, batch: &mut Vec<T>) -> bool {
        loop {
            {
                let mut inner = self.lock();
                if !inner.items.is_empty() {
                    let flooded = inner.is_flooded(&self.company);
                    self.flooded.store(flooded, Ordering::Relaxed);
                    inner.take(batch, self.batch());
                    self.len.store(inner.items.len(), Ordering::Relaxed);
                    return true;
                }
                if inner.closed {
                    return false;
                }
            }
            self.arrived.notified().await;
        }
    }
}

impl<T: Owned> Inner<T> {
    /// One group has three quarters of what waits, and another one has been asked for lately.
    fn is_flooded(&self, company: &Company) -> bool {
        let Some(first) = self.items.front() else { return false };
        let now_ms = company.now_ms();
        company.see(first.owner().group, self.counts.groups.len(), now_ms);
        let waiting = self.items.len();
        let most = || self.counts.greediest_group().map_or(0, |(_, waiting)| waiting);
        waiting > SMALL && company.lately(now_ms) && 4 * most() >= 3 * waiting
    }

    /// Takes out the one that has to go for one of `owner`, if there is one.
    fn make_room(&mut self, owner: Owner, most: usize) -> Option<T> {
        let loser = self.counts.loser(owner, most)?;
        let at = self.items.iter().rposition(|item| item.owner() == loser)?;
        self.counts.remove(loser);
        self.items.remove(at)
    }

    fn take(&mut self, batch: &mut Vec<T>, most: usize) {
        if self.items.len() <= most {
            batch.extend(self.items.drain(..));
            self.counts.clear();
            return;
        }
        let mut shares = self.counts.shares(most);
        let mut left = VecDeque::with_capacity(self.items.len());
        for item in std::mem::take(&mut self.items) {
            let owner = item.owner();
            if batch.len() < most && shares.take(owner) {
                self.counts.remove(owner);
                batch.push(item);
            } else {
                left.push_back(item);
            }
        }
        self.items = left;
    }
}

/// The lowest level at which owners with so many each fill a batch.
fn level(counts: impl IntoIterator<Item = usize>, most: usize) -> usize {
    let mut counts: Vec<usize> = counts.into_iter().collect();
    counts.sort_unstable();
    let (mut room, mut owners) = (most, counts.len());
    for count in counts {
        if count * owners >= room {
            return room.div_ceil(owners);
        }
        room -= count;
        owners -= 1;
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An owner, and a number of its own.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Item(u64, usize);

    impl Owned for Item {
        fn owner(&self) -> Owner {
            Owner { group: self.0, member: 0 }
        }
    }

    /// A member of a group, and a number of its own.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Of(u64, u64, usize);

    impl Owned for Of {
        fn owner(&self) -> Owner {
            Owner { group: self.0, member: self.1 }
        }
    }

    fn queue<T>(most: usize, items: impl IntoIterator<Item = T>) -> Queue<T>
    where
        T: Owned + PartialEq + std::fmt::Debug,
    {
        let queue = Queue::new(most, most, Arc::new(Company::new()));
        for item in items {
            assert_eq!(queue.push(item), None);
        }
        queue
    }

    async fn taken<T: Owned>(queue: &Queue<T>, most: usize) -> Vec<T> {
        let mut batch = Vec::new();
        queue.resize(most);
        assert!(queue.take(&mut batch).await);
        batch
    }

    #[tokio::test]
    async fn what_fits_is_taken_in_its_order() {
        let items = [Item(1, 0), Item(2, 0), Item(1, 1)];
        let queue = queue(10, items);
        assert_eq!(taken(&queue, 3).await, items);
        queue.push(Item(1, 2));
        assert_eq!(taken(&queue, 3).await, [Item(1, 2)]);
    }

    #[tokio::test]
    async fn a_flood_leaves_room_for_others() {
        let queue = queue(1000, (0..500).map(|n| Item(1, n)));
        queue.push(Item(2, 0));
        queue.push(Item(3, 0));
        queue.push(Item(3, 1));
        let batch = taken(&queue, 64).await;
        assert_eq!(batch.len(), SMALL);
        let of = |owner| batch.iter().filter(|item| item.0 == owner).count();
        assert_eq!([of(1), of(2), of(3)], [29, 1, 2]);
        assert!(batch[..29].iter().map(|item| item.1).eq(0..29), "in order");
        assert_eq!(taken(&queue, 64).await[0], Item(1, 29));
    }

    #[tokio::test]
    async fn batches_are_small_while_one_floods_and_others_ask() {
        let queue = queue(1000, (0..500).map(|n| Item(1, n)));
        assert_eq!(taken(&queue, 100).await.len(), 100, "it is alone");
        assert!(!queue.is_flooded());

        queue.push(Item(2, 0));
        let batch = taken(&queue, 100).await;
        assert_eq!(batch.len(), SMALL);
        assert!(batch.contains(&Item(2, 0)) && queue.is_flooded());
        assert_eq!(taken(&queue, 100).await.len(), SMALL, "the other may come again");
    }

    #[test]
    fn who_asks_lately_is_company() {
        let company = Company::new();
        company.see(1, 1, 5);
        assert!(!company.lately(5), "there is nobody else");
        company.see(2, 1, 6);
        assert!(company.lately(6) && company.lately(6 + LATELY_MS));
        assert!(!company.lately(7 + LATELY_MS));
        company.see(2, 1, 1000);
        assert!(!company.lately(1000), "the same one again");
        company.see(2, 2, 2000);
        assert!(company.lately(2000));
    }

    #[tokio::test]
    async fn several_floods_share_alike() {
        let items = (0..100).flat_map(|n| (0..3).map(move |owner| Item(owner, n)));
        let queue = queue(1000, items);
        let batch = taken(&queue, 64).await;
        for owner in 0..3 {
            let of = batch.iter().filter(|item| item.0 == owner).count();
            assert!((21..=22).contains(&of), "{of}");
        }
    }

    #[tokio::test]
    async fn a_full_queue_turns_away_who_has_most_of_it() {
        let queue = queue(10, (0..10).map(|n| Item(1, n)));
        assert_eq!(queue.push(Item(1, 10)), Some(Item(1, 10)));
        assert_eq!(queue.push(Item(2, 0)), Some(Item(1, 9)));
        for n in 1..5 {
            assert_eq!(queue.push(Item(2, n)), Some(Item(1, 9 - n)));
        }
        assert_eq!(queue.push(Item(2, 5)), Some(Item(2, 5)), "both have half");
        assert_eq!(taken(&queue, 10).await.len(), 10);
        assert_eq!(queue.push(Item(1, 10)), None);
    }

    #[tokio::test]
    async fn a_bound_that_shrinks_turns_away_who_comes() {
        let queue = queue(10, (0..10).map(|n| Item(1, n)));
        queue.bound(4);
        assert_eq!(queue.push(Item(1, 10)), Some(Item(1, 10)));
        assert_eq!(queue.push(Item(2, 0)), Some(Item(1, 9)), "the others still get theirs");
        assert_eq!(taken(&queue, 20).await.len(), 10);
        queue.bound(5);
        assert!((0..5).all(|n| queue.push(Item(1, n)).is_none()));
        assert!(queue.push(Item(1, 5)).is_some());
    }

    #[tokio::test]
    async fn it_is_full_when_a_batch_waits() {
        let queue = queue(10, (0..4).map(|n| Item(1, n)));
        assert!(!queue.is_full());
        queue.resize(4);
        assert!(queue.is_full());
        assert_eq!(taken(&queue, 3).await.len(), 3);
        assert!(!queue.is_full());
    }

    #[tokio::test]
    async fn a_closed_one_gives_out_what_it_has() {
        let queue = queue(10, [Item(1, 0)]);
        queue.close();
        assert_eq!(queue.push(Item(1, 1)), Some(Item(1, 1)));
        assert_eq!(taken(&queue, 10).await, [Item(1, 0)]);
        assert!(!queue.take(&mut Vec::new()).await);
    }

    /// A group of many members is one group, and each of its members has its share of that.
    #[tokio::test]
    async fn a_batch_is_shared_between_groups_and_then_between_their_members() {
        let many = (0..300).map(|n| Of(1, n as u64 % 100, n));
        let one = (0..100).map(|n| Of(2, 0, n));
        let queue = queue(1000, many.chain(one).chain([Of(2, 1, 0), Of(3, 0, 0)]));
        let batch = taken(&queue, 101).await;
        let of =
            |group, member| batch.iter().filter(|item| item.0 == group && item.1 == member).count();
        assert_eq!([of(2, 0), of(2, 1), of(3, 0)], [49, 1, 1]);
        assert_eq!((0..100).map(|member| of(1, member)).sum::<usize>(), 50);
        assert!((0..100).all(|member| of(1, member) <= 1));
        let inner = queue.lock();
        assert_eq!(inner.items.len(), 301);
        assert_eq!(inner.counts.members.values().sum::<usize>(), 301);
        assert_eq!(inner.counts.groups.values().map(|group| group.waiting).sum::<usize>(), 301);
        assert_eq!((inner.counts.groups[&1].members, inner.counts.groups[&2].members), (100, 1));
    }

    #[tokio::test]
    async fn members_of_a_full_group_share_its_part() {
        let queue = queue(10, (0..10).map(|n| Of(1, 0, n)));
        assert_eq!(queue.push(Of(1, 1, 0)), Some(Of(1, 0, 9)), "another member");
        assert_eq!(queue.push(Of(1, 0, 10)), Some(Of(1, 0, 10)), "it has most");
        assert_eq!(queue.push(Of(2, 0, 0)), Some(Of(1, 0, 8)), "another group");
        for n in 1..4 {
            assert_eq!(queue.push(Of(1, 1, n)), Some(Of(1, 0, 8 - n)), "below the average");
        }
        assert_eq!(queue.push(Of(1, 1, 4)), Some(Of(1, 1, 4)), "both have as many");
    }

    #[tokio::test]
    async fn equals_do_not_replace_each_other() {
        let queue = queue(10, (0..10).map(|n| Of(1, n, 0)));
        assert_eq!(queue.push(Of(1, 10, 0)), Some(Of(1, 10, 0)));
    }

    #[test]
    fn levels() {
        assert_eq!(level([500, 1, 2].into_iter(), 64), 61);
        assert_eq!(level([100, 100, 100].into_iter(), 64), 22);
        assert_eq!(level([1, 1, 1].into_iter(), 64), 64);
        assert_eq!(level([40, 40].into_iter(), 64), 32);
    }
}
