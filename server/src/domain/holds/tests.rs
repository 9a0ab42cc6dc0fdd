use proptest::prelude::*;

use super::*;

const LIMITS: HoldLimits<'_> = HoldLimits {
    domain: Some(5),
    groups: &[],
    global: Some(8),
    bounds: HoldBounds { max_holds: Some(1000), known_only: false },
    enforced: true,
};

fn new<'a>(session: &'a str, hold: &'a str, domain: &'a str, copies: u64) -> NewHold<'a> {
    NewHold { session, ttl_ms: 10_000, hold, domain, copies, min_copies: 1 }
}

impl Holds {
    /// Every count is the sum of what lives.
    fn check(&self) {
        let all = || self.sessions.values().flat_map(|session| session.holds.values());
        let mut held = Held::default();
        all().for_each(|hold| held.add(hold, hold.copies));
        assert_eq!(self.held, held);
        assert_eq!(self.holds, all().count() as u64);
        assert!(all().all(|hold| hold.copies > 0));
        let by_end = self.sessions.iter().map(|(name, session)| (session.ends_ms, name.clone()));
        assert_eq!(self.by_end, by_end.collect());
        for session in self.sessions.values() {
            let bytes = session.holds.iter().map(|(name, hold)| hold.bytes(name));
            assert_eq!(session.bytes, bytes.sum::<u64>());
        }
    }
}

#[test]
fn grants_what_all_limits_leave_room_for() {
    let mut holds = Holds::default();
    let reserve = |holds: &mut Holds, new| holds.reserve(&new, &LIMITS, 0);
    assert_eq!(reserve(&mut holds, new("s", "1", "acme", 3)).granted, 3);
    let part = reserve(&mut holds, new("s", "2", "acme", 3));
    assert_eq!((part.granted, part.domain_held, part.all_held), (2, 5, 5), "the domain's limit");
    let part = reserve(&mut holds, new("t", "1", "other", 4));
    assert_eq!((part.granted, part.domain_held, part.all_held), (3, 3, 8), "that of all");
    let none = reserve(&mut holds, new("t", "2", "third", 1));
    assert_eq!((none.outcome, none.granted), (HoldOutcome::NoRoom, 0));
    assert_eq!(holds.release("s", "1", 1, 0), 1);
    let least = NewHold { min_copies: 3, ..new("t", "2", "third", 9) };
    assert_eq!(reserve(&mut holds, least).outcome, HoldOutcome::NoRoom);
    let least = NewHold { min_copies: 2, ..least };
    assert_eq!(reserve(&mut holds, least).granted, 2);
    holds.check();
}

fn group(name: &str, limit: u64) -> GroupLimit<'_> {
    GroupLimit { name, limit: Some(limit) }
}

#[test]
fn a_hold_counts_in_each_group_of_its_domain() {
    let mut holds = Holds::default();
    let groups = [group("trial", 4), group("eu", 7)];
    let reserve = |holds: &mut Holds, session, domain, groups, copies| {
        let limits = HoldLimits { domain: None, global: None, groups, ..LIMITS };
        let answer = holds.reserve(&new(session, "1", domain, copies), &limits, 0);
        holds.check();
        (answer.granted, answer.groups_held)
    };
    assert_eq!(reserve(&mut holds, "a", "t-1", &groups, 3), (3, vec![3, 3]));
    assert_eq!(reserve(&mut holds, "b", "t-2", &groups, 3), (1, vec![4, 4]), "that of trial");
    assert_eq!(reserve(&mut holds, "c", "acme", &groups[1..], 9), (3, vec![7]), "that of eu");
    assert_eq!(reserve(&mut holds, "d", "t-3", &groups, 1), (0, vec![4, 7]));
    assert_eq!(holds.release("c", "1", 1, 0), 1);
    assert_eq!(holds.list(&["eu", "trial", "none"], 0).groups_held, [5, 4, 0]);
    assert_eq!(reserve(&mut holds, "e", "globex", &[], 9), (9, vec![]));
    assert_eq!(holds.end_session("a", 0), 3);
    assert_eq!(holds.list(&["eu", "trial"], 0).groups_held, [2, 1]);
    assert_eq!(holds.keep_alive("b", None, 9999).unwrap().holds.len(), 1);
    assert_eq!(holds.list(&["eu", "trial"], 10_000).groups_held, [1, 1], "the others are over");
    holds.check();
}

#[test]
fn a_hold_counts_in_the_groups_that_its_domain_was_in() {
    let mut holds = Holds::default();
    let reserve = |holds: &mut Holds, hold, groups| {
        let limits = HoldLimits { groups, ..LIMITS };
        holds.reserve(&new("s", hold, "acme", 2), &limits, 0).groups_held
    };
    let (old, now) = ([group("old", 9)], [group("new", 9)]);
    assert_eq!(reserve(&mut holds, "1", &old), [2]);
    assert_eq!(reserve(&mut holds, "2", &now), [2]);
    assert_eq!(reserve(&mut holds, "1", &now), [2], "known: the other hold's");
    assert_eq!(holds.release("s", "1", 1, 0), 1);
    assert_eq!(holds.list(&["old", "new"], 0).groups_held, [1, 2]);
    assert_eq!(holds.release("s", "2", 0, 0), 0);
    assert_eq!(holds.list(&["old", "new"], 0).groups_held, [1, 0]);
    // Names of groups and domains are apart.
    assert_eq!(holds.list(&["acme"], 0).groups_held, [0]);
    holds.check();
}

fn transfer<'a>(session: &'a str, copies: Option<u64>, to_session: &'a str) -> Transfer<'a> {
    Transfer { session, hold: "1", copies, to_session, ttl_ms: 5000 }
}

/// The operations `transfer` and `seize` of the paper: what is handed over is a session that nobody renews yet.
#[test]
fn a_hold_is_handed_over() {
    let mut holds = Holds::default();
    let groups = [group("g", 4)];
    let limits = HoldLimits { groups: &groups, ..LIMITS };
    let hand_over = |holds: &mut Holds, transfer: Transfer<'_>, now_ms| {
        let outcome = holds.transfer(&transfer, &LIMITS.bounds, now_ms);
        holds.check();
        outcome
    };
    holds.reserve(&new("first", "1", "acme", 4), &limits, 0);
    // A part, and again after a lost answer.
    for _ in 0..2 {
        let moved = hand_over(&mut holds, transfer("first", Some(3), "secret"), 1000);
        assert_eq!(moved, Transferred::Copies(3));
    }
    let staged = holds.list(&["g"], 1000);
    assert_eq!((staged.all_held, staged.holds, &*staged.groups_held), (4, 2, &[4][..]));
    assert_eq!(&*staged.sessions[0].0, "secret", "it has 5 s, the other 10");
    assert_eq!(holds.end_session("first", 5999), 1, "nothing of what was handed over");
    // The other process takes it over.
    let taken = holds.keep_alive("secret", Some(10_000), 5999).unwrap();
    assert_eq!(
        (taken.ends_ms, taken.holds[0].copies, &*taken.holds[0].domain),
        (15_999, 3, "acme")
    );
    let whole = hand_over(&mut holds, transfer("secret", None, "third"), 6000);
    assert_eq!(whole, Transferred::Copies(3));
    assert_eq!(holds.keep_alive("secret", None, 6000).unwrap().holds, []);
    let again = hand_over(&mut holds, transfer("secret", None, "third"), 6000);
    assert_eq!(again, Transferred::Copies(3), "a lost answer");
    // Nobody takes it over in time.
    assert_eq!(holds.keep_alive("third", None, 11_000), None);
    assert_eq!(
        hand_over(&mut holds, transfer("secret", None, "third"), 11_000),
        Transferred::NoSuchHold
    );
    assert_eq!(holds.list(&["g"], 11_000).groups_held, [0]);
}

#[test]
fn what_can_not_be_handed_over() {
    let mut holds = Holds::default();
    let hand_over = |holds: &mut Holds, transfer: Transfer<'_>, bounds: HoldBounds| {
        let outcome = holds.transfer(&transfer, &bounds, 0);
        holds.check();
        outcome
    };
    let bounds = HoldBounds { max_holds: Some(2), known_only: true };
    assert_eq!(hand_over(&mut holds, transfer("a", None, "b"), bounds), Transferred::NoSuchHold);
    holds.reserve(&new("a", "1", "acme", 2), &LIMITS, 0);
    holds.reserve(&new("b", "1", "globex", 2), &LIMITS, 0);
    assert_eq!(hand_over(&mut holds, transfer("a", None, "b"), bounds), Transferred::OtherDomain);
    assert_eq!(hand_over(&mut holds, transfer("a", None, "c"), bounds), Transferred::TooMany);
    let bounds = HoldBounds { known_only: false, ..bounds };
    let part = transfer("a", Some(1), "c");
    assert_eq!(hand_over(&mut holds, part, bounds), Transferred::TooMany, "of holds");
    let more = transfer("a", Some(9), "c");
    assert_eq!(hand_over(&mut holds, more, bounds), Transferred::Copies(2));
    // The other session is full.
    let hold = "x".repeat(MAX_SESSION_BYTES as usize - 80);
    holds.reserve(&new("d", &hold, "acme", 1), &LIMITS, 0);
    let full = transfer("c", None, "d");
    assert_eq!(hand_over(&mut holds, full, HoldBounds::default()), Transferred::TooMany);
    assert_eq!(holds.sessions["d"].ttl_ms, 5000, "renewed all the same");
}

#[test]
fn a_list_of_many_sessions_is_cut() {
    let mut holds = Holds::default();
    let limits = HoldLimits { domain: None, global: None, bounds: HoldBounds::default(), ..LIMITS };
    let most = LIST_BYTES.div_ceil(SESSION_BYTES + 46) as usize;
    for nth in 0..most {
        let name = format!("{nth:05}");
        let new = NewHold { ttl_ms: 10_000 + nth as i64, ..new(&name, "hi", "acme", 1) };
        holds.reserve(&new, &limits, 0);
    }
    let whole = holds.list(&[], 0);
    assert_eq!((whole.sessions.len(), whole.has_more, whole.holds), (most, false, most as u64));
    assert_eq!(&*whole.sessions[1].0, "00001");
    assert_eq!(whole.sessions[1].1, holds.sessions["00001"].live());
    holds.reserve(&NewHold { ttl_ms: 20_000, ..new("last", "hi", "acme", 1) }, &limits, 0);
    let cut = holds.list(&[], 0);
    assert_eq!((cut.sessions, cut.has_more), (whole.sessions, true));
    let later = holds.list(&[], 10_001 + most as i64);
    assert_eq!(later.sessions.len(), 1);
}

#[test]
fn calls_that_are_sent_again_change_nothing_more() {
    let mut holds = Holds::default();
    let first = holds.reserve(&new("s", "1", "acme", 3), &LIMITS, 0);
    let again = holds.reserve(&new("s", "1", "acme", 5), &LIMITS, 0);
    assert_eq!(again, Reservation { outcome: HoldOutcome::Known, allowed: 0, ..first });
    let other = holds.reserve(&new("s", "1", "other", 3), &LIMITS, 9000);
    assert_eq!(other.outcome, HoldOutcome::OtherDomain);
    assert!(holds.keep_alive("s", None, 9999).is_some());
    assert_eq!([holds.release("s", "1", 2, 9999), holds.release("s", "1", 2, 9999)], [2, 2]);
    assert_eq!([holds.release("s", "1", 0, 9999), holds.release("s", "1", 0, 9999)], [0, 0]);
    assert_eq!(holds.release("s", "1", 7, 9999), 0, "there is none any more");
    holds.reserve(&new("s", "1", "acme", 3), &LIMITS, 9999);
    assert_eq!([holds.end_session("s", 9999), holds.end_session("s", 9999)], [3, 0]);
    holds.check();
}

#[test]
fn silent_sessions_are_freed() {
    let mut holds = Holds::default();
    holds.reserve(&new("s", "1", "acme", 5), &LIMITS, 0);
    let renewed = holds.keep_alive("s", None, 9999).unwrap();
    assert_eq!((renewed.ends_ms, renewed.holds.len()), (19_999, 1));
    assert_eq!(holds.keep_alive("s", Some(100), 10_000).unwrap().ends_ms, 10_100);
    holds.release("s", "no such hold", 0, 10_099);
    let refused = holds.reserve(&new("t", "1", "acme", 1), &LIMITS, 10_198);
    assert_eq!(refused.outcome, HoldOutcome::NoRoom, "renewed by any call that names it");
    assert_eq!(holds.reserve(&new("t", "1", "acme", 1), &LIMITS, 10_199).all_held, 1);
    assert_eq!(holds.keep_alive("s", None, 10_199), None);
    holds.check();
}

#[test]
fn a_session_may_begin_again_once_it_is_over() {
    let mut holds = Holds::default();
    holds.reserve(&new("s", "1", "acme", 5), &LIMITS, 0);
    let again = holds.reserve(&new("s", "2", "acme", 4), &LIMITS, 10_000);
    assert_eq!((again.granted, again.all_held), (4, 4));
    holds.check();
}

#[test]
fn a_call_frees_a_bounded_number() {
    let mut holds = Holds::default();
    let limits = HoldLimits { domain: None, global: Some(300), ..LIMITS };
    for name in 0..300 {
        let name = format!("{name:03}");
        assert_eq!(holds.reserve(&new(&name, "1", "acme", 1), &limits, 0).granted, 1);
    }
    // This one keeps the others from being over as a whole.
    let long = NewHold { ttl_ms: 50_000, ..new("299", "1", "acme", 1) };
    holds.reserve(&long, &limits, 0);
    // One session and its hold count as two.
    let first = holds.reserve(&new("t", "1", "acme", 300), &limits, 20_000);
    assert_eq!((first.granted, first.has_backlog), (50, true));
    let over = holds.reserve(&new("250", "1", "acme", 1), &limits, 20_000);
    assert_eq!(over.outcome, HoldOutcome::Made, "the named session is freed in any case");
    while holds.reserve(&new("t", "1", "acme", 1), &limits, 20_000).has_backlog {}
    assert_eq!(holds.held.all, 50 + 1 + 1);
    holds.check();
}

#[test]
fn bounds() {
    let mut holds = Holds::default();
    let bounds = HoldBounds { max_holds: Some(2), known_only: false };
    let limits = HoldLimits { domain: None, global: None, bounds, ..LIMITS };
    holds.reserve(&new("s", "1", "acme", u64::MAX), &limits, 0);
    assert_eq!(holds.held.all, MAX_HELD, "no limit");
    let none = holds.reserve(&new("s", "2", "acme", 1), &limits, 0);
    assert_eq!(none.outcome, HoldOutcome::NoRoom);
    assert_eq!(holds.release("s", "1", 7, 0), 7);
    holds.reserve(&new("s", "2", "acme", 1), &limits, 0);
    let many = holds.reserve(&new("s", "3", "acme", 1), &limits, 0);
    assert_eq!((many.outcome, many.granted), (HoldOutcome::TooMany, 0));
    let known_only =
        HoldLimits { bounds: HoldBounds { known_only: true, max_holds: None }, ..limits };
    let unknown = holds.reserve(&new("t", "1", "acme", 1), &known_only, 0);
    assert_eq!(unknown.outcome, HoldOutcome::TooMany);
    // With 85 bytes each.
    for name in 1..MAX_SESSION_BYTES / 85 {
        let hold = format!("more {name:036}");
        assert_eq!(holds.reserve(&new("s", &hold, "acme", 1), &known_only, 0).granted, 1);
    }
    let long = format!("{:041}", 0);
    let full = holds.reserve(&new("s", &long, "acme", 1), &known_only, 0);
    assert_eq!(full.outcome, HoldOutcome::TooMany);
    assert_eq!(holds.release("s", "2", 0, 0), 0);
    let room = holds.reserve(&new("s", &long, "acme", 1), &known_only, 0);
    assert_eq!(room.outcome, HoldOutcome::Made);
    holds.check();
}

#[test]
fn limits_that_are_not_enforced_count_all_the_same() {
    let mut holds = Holds::default();
    let shadow = HoldLimits { enforced: false, ..LIMITS };
    let more = holds.reserve(&new("s", "1", "acme", 20), &shadow, 0);
    assert_eq!((more.granted, more.allowed, more.all_held), (20, 5, 20));
    let more = holds.reserve(&new("s", "2", "acme", 20), &shadow, 0);
    assert_eq!((more.granted, more.allowed, more.all_held), (20, 0, 40));
    let none = holds.reserve(&new("s", "3", "other", 1), &LIMITS, 0);
    assert_eq!(none.outcome, HoldOutcome::NoRoom, "takes nothing away, and grants nothing");
    holds.check();
}

proptest! {
    /// Whatever happens, every count is the sum of what lives, and enforced limits hold.
    #[test]
    fn counts_are_sums(
        steps in proptest::collection::vec(
            (0..6u8, 0..4usize, 0..4usize, 0..3usize, 0..9u64, 0..6000i64), 1..200
        )
    ) {
        let names = ["a", "b", "c", "d"];
        let mut holds = Holds::default();
        let mut now_ms = 0;
        for (operation, session, hold, domain, copies, pause_ms) in steps {
            now_ms += pause_ms;
            let (session, hold) = (names[session], names[hold]);
            match operation {
                0 | 1 => {
                    let new = new(session, hold, names[domain], copies.max(1));
                    // Groups change with time.
                    let groups = [group("g", 6), group("h", 7)];
                    let in_groups = (now_ms / 5000 + domain as i64) % 3;
                    let groups = &groups[..in_groups as usize];
                    let answer = holds.reserve(&new, &HoldLimits { groups, ..LIMITS }, now_ms);
                    prop_assert!(answer.all_held <= 8 && answer.domain_held <= 5);
                    let room = [6, 7];
                    prop_assert!(answer.groups_held.iter().zip(room).all(|(held, most)| *held <= most));
                }
                2 => prop_assert!(holds.release(session, hold, copies / 2, now_ms) <= copies / 2),
                3 => {
                    let ttl_ms = (copies > 0).then_some(copies as i64 * 2000);
                    if let Some(live) = holds.keep_alive(session, ttl_ms, now_ms) {
                        prop_assert!(live.ends_ms > now_ms);
                    }
                }
                4 if session != names[domain] => {
                    let copies = (copies > 0).then_some(copies);
                    let transfer =
                        Transfer { session, hold, copies, to_session: names[domain], ttl_ms: 7000 };
                    let before = holds.held.all;
                    holds.transfer(&transfer, &LIMITS.bounds, now_ms);
                    prop_assert!(holds.held.all <= before);
                }
                _ => drop(holds.end_session(session, now_ms)),
            }
            holds.check();
        }
    }
}
