//! The jobs that wait for a lane: bounded in number, and fair between owners.
//!
//! As long as all that wait fit into one batch, they are sent in the order of their arrival.
//! Otherwise jobs are taken in turns: one of each group, and within a group one of each member. If
//! the queue is full, a job of a group that has less than an equal share of the queue replaces the
//! latest job of the group that has the most; within a group the same holds between members; any
//! other job is rejected.
//!
//! A job that arrives while a batch is in flight waits for the whole batch. So while one group has
//! most of the jobs and others also send some, batches are about few keys: the one group pays with
//! some of its rate for the waits of the others.

use std::collections::VecDeque;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use hashbrown::{HashMap, HashSet};
use tokio::sync::Notify;

use crate::store::redis::owner::{Owner, Queued};

/// The most keys in a batch while one group floods: a round trip for these takes a third of the time
/// of a full one, and a decision in it a tenth more.
const FEW_KEYS: usize = 32;

/// How long a group counts as active after its last job.
const LATELY_MS: u64 = 200;

/// The queue of one lane.
pub(crate) struct Queue<T> {
    inner: Mutex<Inner<T>>,
    /// The length, readable without the lock.
    len: AtomicUsize,
    arrived: Notify,
    capacity: AtomicUsize,
    /// The number of jobs in a full batch.
    batch: AtomicUsize,
    active_groups: Arc<ActiveGroups>,
    /// See [`Queue::is_flooded`].
    flooded: AtomicBool,
}

/// Whether several groups are active on one server. Shared by all queues of the node for it, as their
/// batches delay each other. Internal commands make no group active.
pub(crate) struct ActiveGroups {
    created: Instant,
    /// The group recorded last; 0 if there was none yet.
    last: AtomicU64,
    /// When several groups were active, in ms since `created`; 0 if never.
    several_ms: AtomicU64,
}

impl ActiveGroups {
    pub(crate) fn new() -> Self {
        let (last, several_ms) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { created: Instant::now(), last, several_ms }
    }

    /// The time since `created` in ms, beginning at 1.
    fn now_ms(&self) -> u64 {
        u64::try_from(self.created.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }

    /// Records that jobs of `group` wait; `several`: jobs of other groups, too.
    fn record(&self, group: u64, several: bool, now_ms: u64) {
        let last = self.last.load(Ordering::Relaxed);
        if last != group {
            self.last.store(group, Ordering::Relaxed);
        }
        if several || (last != group && last != 0) {
            self.several_ms.store(now_ms, Ordering::Relaxed);
        }
    }

    /// Whether several groups were active within [`LATELY_MS`].
    fn several_lately(&self, now_ms: u64) -> bool {
        match self.several_ms.load(Ordering::Relaxed) {
            0 => false,
            several_ms => now_ms.saturating_sub(several_ms) <= LATELY_MS,
        }
    }
}

struct Inner<T> {
    /// Jobs in the order of their arrival, which came after those of `sorted`. While all that wait
    /// fit into one batch, none of them is sorted.
    arrived: VecDeque<T>,
    sorted: Sorted<T>,
    closed: bool,
}

/// Jobs by owner, given out in turns: one of each group, and within a group one of each member.
struct Sorted<T> {
    len: usize,
    groups: HashMap<u64, Group<T>>,
    /// The groups that have jobs, in the order of their turns.
    turns: VecDeque<u64>,
}

struct Group<T> {
    len: usize,
    members: HashMap<u64, VecDeque<T>>,
    /// The members that have jobs, in the order of their turns.
    turns: VecDeque<u64>,
}

impl<T: Queued> Sorted<T> {
    fn new() -> Self {
        Self { len: 0, groups: HashMap::new(), turns: VecDeque::new() }
    }

    fn push(&mut self, item: T) {
        let owner = item.owner();
        let group = self.groups.entry(owner.group).or_insert_with(|| {
            self.turns.push_back(owner.group);
            Group { len: 0, members: HashMap::new(), turns: VecDeque::new() }
        });
        let member = group.members.entry(owner.member).or_insert_with(|| {
            group.turns.push_back(owner.member);
            VecDeque::new()
        });
        member.push_back(item);
        group.len += 1;
        self.len += 1;
    }

    /// Takes out the first job of whose turn it is.
    fn pop(&mut self) -> Option<T> {
        let turn = self.turns.pop_front()?;
        let group = self.groups.get_mut(&turn)?;
        let item = group.pop()?;
        self.len -= 1;
        if group.len > 0 {
            self.turns.push_back(turn);
        } else {
            self.groups.remove(&turn);
        }
        Some(item)
    }

    /// Takes out the latest job of an owner.
    fn pop_latest(&mut self, owner: Owner) -> Option<T> {
        let group = self.groups.get_mut(&owner.group)?;
        let member = group.members.get_mut(&owner.member)?;
        let item = member.pop_back()?;
        if member.is_empty() {
            group.members.remove(&owner.member);
            group.turns.retain(|turn| *turn != owner.member);
        }
        group.len -= 1;
        self.len -= 1;
        if group.len == 0 {
            self.groups.remove(&owner.group);
            self.turns.retain(|turn| *turn != owner.group);
        }
        Some(item)
    }

    /// The group that has the most jobs, and their number.
    fn greediest_group(&self) -> Option<(u64, usize)> {
        let groups = self.groups.iter().map(|(&id, group)| (id, group.len));
        groups.max_by_key(|(_, len)| *len)
    }

    /// The owner whose latest job makes room for one of `owner`; `None` if the new job is rejected.
    fn victim(&self, owner: Owner, capacity: usize) -> Option<Owner> {
        let own = self.groups.get(&owner.group);
        if own.map_or(0, |group| group.len) < capacity / self.groups.len().max(1) {
            let (group, _) = self.greediest_group()?;
            if group != owner.group {
                let (member, _) = self.groups.get(&group)?.greediest_member()?;
                return Some(Owner { group, member });
            }
        }
        let own = own?;
        let waiting = own.members.get(&owner.member).map_or(0, VecDeque::len);
        // In a flood of invented names each member has one job.
        let members = own.members.len();
        if own.len == members || waiting >= own.len / members.max(1) {
            return None;
        }
        // Replacing a job of an equal would only change which of them is rejected.
        let (member, len) = own.greediest_member()?;
        (len > waiting + 1).then_some(Owner { group: owner.group, member })
    }
}

impl<T> Group<T> {
    fn pop(&mut self) -> Option<T> {
        let turn = self.turns.pop_front()?;
        let member = self.members.get_mut(&turn)?;
        let item = member.pop_front()?;
        self.len -= 1;
        if member.is_empty() {
            self.members.remove(&turn);
        } else {
            self.turns.push_back(turn);
        }
        Some(item)
    }

    /// The member that has the most jobs, and their number.
    fn greediest_member(&self) -> Option<(u64, usize)> {
        let members = self.members.iter().map(|(&id, jobs)| (id, jobs.len()));
        members.max_by_key(|(_, len)| *len)
    }
}

impl<T: Queued> Queue<T> {
    /// An empty queue for at most `capacity` jobs, sent in batches of up to `batch`.
    pub(crate) fn new(capacity: usize, batch: usize, active_groups: Arc<ActiveGroups>) -> Self {
        let inner = Inner { arrived: VecDeque::new(), sorted: Sorted::new(), closed: false };
        let (inner, len) = (Mutex::new(inner), AtomicUsize::new(0));
        let (capacity, batch) = (AtomicUsize::new(capacity), AtomicUsize::new(batch));
        let flooded = AtomicBool::new(false);
        Self { inner, len, arrived: Notify::new(), capacity, batch, active_groups, flooded }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job. Returns the job that is rejected for lack of room, which may be this one. A closed
    /// queue rejects all jobs.
    pub(crate) fn push(&self, item: T) -> Option<T> {
        let mut inner = self.lock();
        if inner.closed {
            return Some(item);
        }
        let (mut rejected, owner) = (None, item.owner());
        let capacity = self.capacity.load(Ordering::Relaxed);
        if inner.len() >= capacity {
            match inner.make_room(owner, capacity) {
                Some(victim) => rejected = Some(victim),
                None => return Some(item),
            }
        }
        inner.arrived.push_back(item);
        self.len.store(inner.len(), Ordering::Relaxed);
        drop(inner);
        self.arrived.notify_one();
        rejected
    }

    /// Sets the batch size.
    pub(crate) fn set_batch(&self, batch: usize) {
        self.batch.store(batch, Ordering::Relaxed);
    }

    /// Sets the capacity; waiting jobs stay.
    pub(crate) fn set_capacity(&self, capacity: usize) {
        self.capacity.store(capacity, Ordering::Relaxed);
    }

    /// Whether a full batch waits. May be out of date at once.
    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.batch.load(Ordering::Relaxed)
    }

    /// The number of waiting jobs. May be out of date at once.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Whether one group had most of the jobs when the last batch was taken, while others were
    /// active, too.
    pub(crate) fn is_flooded(&self) -> bool {
        self.flooded.load(Ordering::Relaxed)
    }

    /// Closes the queue: rejects new jobs. Waiting jobs can still be taken.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_one();
    }

    /// Closes the queue, and takes out the waiting jobs.
    pub(crate) fn close_and_drain(&self) -> Vec<T> {
        let mut inner = self.lock();
        inner.closed = true;
        inner.sort();
        let jobs = std::iter::from_fn(|| inner.sorted.pop()).collect();
        self.len.store(0, Ordering::Relaxed);
        jobs
    }

    /// Opens a closed queue. Returns whether it was closed.
    pub(crate) fn reopen(&self) -> bool {
        std::mem::take(&mut self.lock().closed)
    }

    /// Waits for jobs and moves a batch into `batch`. `false` once closed and empty. Cancel safe.
    pub(crate) async fn take(&self, batch: &mut Vec<T>) -> bool {
        loop {
            {
                let mut inner = self.lock();
                if inner.len() > 0 {
                    let now_ms = self.active_groups.now_ms();
                    inner.record_groups(&self.active_groups, now_ms);
                    let is_flooded =
                        self.active_groups.several_lately(now_ms) && inner.is_dominated();
                    self.flooded.store(is_flooded, Ordering::Relaxed);
                    let size = self.batch.load(Ordering::Relaxed);
                    inner.take(batch, size, if is_flooded { FEW_KEYS } else { size });
                    self.len.store(inner.len(), Ordering::Relaxed);
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

impl<T: Queued> Inner<T> {
    fn len(&self) -> usize {
        self.arrived.len() + self.sorted.len
    }

    fn sort(&mut self) {
        for item in self.arrived.drain(..) {
            self.sorted.push(item);
        }
    }

    /// Records which groups have waiting jobs.
    fn record_groups(&self, active_groups: &ActiveGroups, now_ms: u64) {
        let sorted = self.sorted.turns.iter().copied();
        let arrived = self.arrived.iter().map(|item| item.owner().group);
        let mut groups = sorted.chain(arrived).filter(|group| *group != Owner::INTERNAL.group);
        if let Some(first) = groups.next() {
            active_groups.record(first, groups.any(|group| group != first), now_ms);
        }
    }

    /// Whether there are many jobs, and one group has three quarters of them.
    fn is_dominated(&mut self) -> bool {
        if self.len() <= FEW_KEYS {
            return false;
        }
        self.sort();
        let most = self.sorted.greediest_group().map_or(0, |(_, len)| len);
        4 * most >= 3 * self.sorted.len
    }

    /// Takes out the job that makes room for one of `owner`, if there is one.
    fn make_room(&mut self, owner: Owner, capacity: usize) -> Option<T> {
        self.sort();
        let victim = self.sorted.victim(owner, capacity)?;
        self.sorted.pop_latest(victim)
    }

    /// Takes out up to `max` jobs, about up to `max_keys` keys.
    fn take(&mut self, batch: &mut Vec<T>, max: usize, max_keys: usize) {
        if self.sorted.len == 0 && self.arrived.len() <= max.min(max_keys) {
            batch.extend(self.arrived.drain(..));
            return;
        }
        self.sort();
        if max_keys >= max {
            batch.extend(std::iter::from_fn(|| self.sorted.pop()).take(max));
            return;
        }
        let (mut keys, mut others) = (HashSet::new(), 0);
        while batch.len() < max && keys.len() + others < max_keys {
            let Some(job) = self.sorted.pop() else { return };
            match job.key() {
                Some(key) => _ = keys.insert(keys.hasher().hash_one(key)),
                None => others += 1,
            }
            batch.push(job);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An owner, and a number of its own.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Item(u64, usize);

    impl Queued for Item {
        fn owner(&self) -> Owner {
            Owner { group: self.0, member: 0 }
        }

        fn key(&self) -> Option<&[u8]> {
            None
        }
    }

    /// A member of a group, and a number of its own.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Of(u64, u64, usize);

    impl Queued for Of {
        fn owner(&self) -> Owner {
            Owner { group: self.0, member: self.1 }
        }

        fn key(&self) -> Option<&[u8]> {
            None
        }
    }

    fn queue<T>(most: usize, items: impl IntoIterator<Item = T>) -> Queue<T>
    where
        T: Queued + PartialEq + std::fmt::Debug,
    {
        let queue = Queue::new(most, most, Arc::new(ActiveGroups::new()));
        for item in items {
            assert_eq!(queue.push(item), None);
        }
        queue
    }

    async fn taken<T: Queued>(queue: &Queue<T>, most: usize) -> Vec<T> {
        let mut batch = Vec::new();
        queue.set_batch(most);
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
        assert_eq!(batch.len(), FEW_KEYS);
        let of = |owner| batch.iter().filter(|item| item.0 == owner).count();
        assert_eq!([of(1), of(2), of(3)], [29, 1, 2]);
        let of_first = batch.iter().filter(|item| item.0 == 1).map(|item| item.1);
        assert!(of_first.eq(0..29), "in order");
        assert_eq!(taken(&queue, 64).await[0], Item(1, 29));
    }

    /// All of one owner are about the same key.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct About(u64, usize);

    impl Queued for About {
        fn owner(&self) -> Owner {
            Owner { group: self.0, member: 0 }
        }

        fn key(&self) -> Option<&[u8]> {
            Some(b"the only key")
        }
    }

    #[tokio::test]
    async fn a_flood_of_one_key_has_large_batches() {
        let queue = queue(1000, (0..500).map(|n| About(1, n)));
        queue.push(About(2, 0));
        assert_eq!(taken(&queue, 100).await.len(), 100);
        assert!(queue.is_flooded());
    }

    #[tokio::test]
    async fn batches_are_small_while_one_floods_and_others_ask() {
        let queue = queue(1000, (0..500).map(|n| Item(1, n)));
        assert_eq!(taken(&queue, 100).await.len(), 100, "it is alone");
        assert!(!queue.is_flooded());

        queue.push(Item(2, 0));
        let batch = taken(&queue, 100).await;
        assert_eq!(batch.len(), FEW_KEYS);
        assert!(batch.contains(&Item(2, 0)) && queue.is_flooded());
        assert_eq!(taken(&queue, 100).await.len(), FEW_KEYS, "the other may come again");
    }

    #[test]
    fn a_group_stays_active_for_a_while() {
        let active = ActiveGroups::new();
        active.record(1, false, 5);
        assert!(!active.several_lately(5), "there is nobody else");
        active.record(2, false, 6);
        assert!(active.several_lately(6) && active.several_lately(6 + LATELY_MS));
        assert!(!active.several_lately(7 + LATELY_MS));
        active.record(2, false, 1000);
        assert!(!active.several_lately(1000), "the same one again");
        active.record(2, true, 2000);
        assert!(active.several_lately(2000));
    }

    #[tokio::test]
    async fn internal_commands_are_no_other_group() {
        let queue = queue(1000, (0..500).map(|n| Item(7, n)));
        let internal = Item(Owner::INTERNAL.group, 0);
        queue.push(internal);
        assert!(taken(&queue, 100).await.contains(&internal));
        assert!(!queue.is_flooded());
        assert_eq!(taken(&queue, 100).await.len(), 100);
        queue.push(Item(2, 0));
        taken(&queue, 100).await;
        assert!(queue.is_flooded());
    }

    #[tokio::test]
    async fn a_closed_queue_can_be_drained_and_opened_again() {
        let queue = queue(10, [Item(1, 0)]);
        assert!(!queue.reopen(), "it is open");
        assert_eq!(queue.close_and_drain(), [Item(1, 0)]);
        assert_eq!(queue.push(Item(1, 1)), Some(Item(1, 1)));
        assert!(queue.reopen() && queue.len() == 0);
        assert_eq!(queue.push(Item(1, 2)), None);
        assert_eq!(taken(&queue, 10).await, [Item(1, 2)]);
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
    async fn a_full_queue_rejects_jobs_of_the_group_that_has_most() {
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
    async fn a_capacity_that_shrinks_rejects_new_jobs() {
        let queue = queue(10, (0..10).map(|n| Item(1, n)));
        queue.set_capacity(4);
        assert_eq!(queue.push(Item(1, 10)), Some(Item(1, 10)));
        assert_eq!(queue.push(Item(2, 0)), Some(Item(1, 9)), "the others still get theirs");
        assert_eq!(taken(&queue, 20).await.len(), 10);
        queue.set_capacity(5);
        assert!((0..5).all(|n| queue.push(Item(1, n)).is_none()));
        assert!(queue.push(Item(1, 5)).is_some());
    }

    #[tokio::test]
    async fn it_is_full_when_a_batch_waits() {
        let queue = queue(10, (0..4).map(|n| Item(1, n)));
        assert!(!queue.is_full());
        queue.set_batch(4);
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
        assert_eq!((inner.len(), inner.sorted.len), (301, 301));
        assert_eq!(inner.sorted.groups.values().map(|group| group.len).sum::<usize>(), 301);
        let members = |group| inner.sorted.groups[&group].members.len();
        assert_eq!((members(1), members(2)), (100, 1));
    }

    /// Where the waiting jobs are in memory.
    fn places(queue: &Queue<Of>) -> HashMap<usize, *const Of> {
        let inner = queue.lock();
        let groups = inner.sorted.groups.values();
        let jobs = groups.flat_map(|group| group.members.values()).flatten();
        jobs.map(|job| (job.2, std::ptr::from_ref(job))).collect()
    }

    #[tokio::test]
    async fn a_batch_moves_no_job_that_stays() {
        let queue = queue(1000, (0..900).map(|n| Of(n as u64 % 3, n as u64 % 10, n)));
        taken(&queue, 100).await;
        let before = places(&queue);
        assert_eq!(before.len(), 800);
        taken(&queue, 100).await;
        let after = places(&queue);
        assert_eq!(after.len(), 700);
        assert!(after.iter().all(|(job, place)| before[job] == *place));
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
}
