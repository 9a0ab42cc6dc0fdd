use super::*;
use crate::measurement::series::Settling;

const EPOCH_S: i64 = 1_700_000_000;

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn config(clients: usize, resources: usize, per_client: usize) -> FleetConfig {
    FleetConfig {
        clients,
        resources,
        per_client,
        wants: 10.0,
        walk: Walk::Within { step: 0.0, most: 20.0 },
        spread: s(8),
        refresh_every: None,
        epoch_us: EPOCH_S * 1_000_000,
        seed: 1,
    }
}

fn fleet(config: FleetConfig) -> Fleet {
    Fleet::new(config, LeaseLedger::new(config.resources, Some(100.0), Duration::ZERO))
}

fn lease(expires: u64, capacity: f64) -> Lease {
    Lease { expiry_s: EPOCH_S + expires as i64, refresh_s: 5, capacity }
}

/// Sends the next client's request at its due time and answers it with `lease` at once.
fn refresh(fleet: &mut Fleet, lease: Lease) -> DueRefresh {
    let now = fleet.next_due().expect("a client");
    let due_refresh = fleet.due_refresh(now).expect("its turn");
    let leases: Vec<_> = due_refresh.items.iter().map(|_| Some(lease)).collect();
    fleet.answered(&due_refresh, now, now, &leases);
    due_refresh
}

#[test]
fn first_refreshes_are_spread_and_later_ones_follow_the_interval() {
    let mut fleet = fleet(config(4, 1, 1));
    let mut refreshes = Vec::new();
    for _ in 0..8 {
        let due_refresh = refresh(&mut fleet, lease(60, 1.0));
        refreshes.push((due_refresh.client, due_refresh.due.as_secs()));
    }
    assert_eq!(refreshes, [(0, 0), (1, 2), (2, 4), (0, 5), (3, 6), (1, 7), (2, 9), (0, 10)]);
    assert_eq!(fleet.due_refresh(s(0)), None);
}

#[test]
fn fixed_interval_overrides_the_lease() {
    let mut fleet = fleet(FleetConfig { refresh_every: Some(s(1)), ..config(1, 1, 1) });
    let dues: Vec<_> = (0..3).map(|_| refresh(&mut fleet, lease(60, 1.0)).due).collect();
    assert_eq!(dues, [s(0), s(1), s(2)]);
}

#[test]
fn clients_report_what_they_hold() {
    let mut fleet = fleet(config(1, 1, 1));
    assert_eq!(refresh(&mut fleet, lease(60, 7.0)).items[0].has, None);
    assert_eq!(refresh(&mut fleet, lease(65, 8.0)).items[0].has, Some(lease(60, 7.0)));
    fleet.finish(s(10));
    let mean = fleet.ledger.mean_has.mean().expect("time");
    assert!((mean - 7.5).abs() < 1e-9, "{mean}");
}

#[test]
fn resources_are_dealt_out_evenly() {
    let fleet = fleet(config(6, 3, 2));
    let mut held = vec![0; 3];
    for client in 0..6 {
        let own: Vec<_> = fleet.rows(client).map(|row| resource(&fleet.config, row)).collect();
        assert_ne!(own[0], own[1]);
        own.iter().for_each(|resource| held[*resource] += 1);
    }
    assert_eq!(held, [4, 4, 4]);
}

#[test]
fn a_lease_that_is_not_refreshed_is_dropped_when_it_expires() {
    let mut fleet = fleet(config(1, 1, 1));
    refresh(&mut fleet, lease(7, 10.0));
    let due_refresh = fleet.due_refresh(s(5)).expect("its turn");
    assert_eq!(due_refresh.items[0].has, Some(lease(7, 10.0)));
    fleet.failed(&due_refresh, s(5), s(6));
    let due_refresh = fleet.due_refresh(s(10)).expect("again after the interval");
    assert_eq!(due_refresh.items[0].has, None);
    fleet.failed(&due_refresh, s(10), s(10));
    fleet.finish(s(14));
    assert_eq!(fleet.expired, 1);
    assert!((fleet.ledger.mean_has.mean().expect("time") - 5.0).abs() < 1e-9);
    assert_eq!(fleet.holders().count(), 0);
}

#[test]
fn refreshed_and_shortened_leases_expire_on_time() {
    let mut fleet = fleet(config(1, 1, 1));
    refresh(&mut fleet, lease(60, 1.0));
    refresh(&mut fleet, lease(65, 1.0));
    assert_eq!(fleet.expiries.len(), 1);
    fleet.close(s(62));
    assert_eq!((fleet.expired, fleet.holders().count()), (0, 1));
    // Shortened from 65 to 63, then answered with an expired lease.
    let due_refresh = fleet.due_refresh(s(62)).expect("its turn");
    fleet.answered(&due_refresh, s(62), s(62), &[Some(lease(63, 1.0))]);
    fleet.close(s(64));
    assert_eq!((fleet.expired, fleet.holders().count()), (1, 0));
    let due_refresh = fleet.due_refresh(s(67)).expect("its turn");
    fleet.answered(&due_refresh, s(67), s(67), &[Some(lease(60, 1.0))]);
    fleet.finish(s(80));
    assert_eq!((fleet.expired, fleet.holders().count()), (2, 0));
    assert_eq!(fleet.ledger.worst(), None);
}

#[test]
fn answers_may_leave_resources_out() {
    let mut fleet = fleet(config(1, 2, 2));
    let due_refresh = fleet.due_refresh(s(0)).expect("its turn");
    fleet.answered(&due_refresh, s(0), s(0), &[None, Some(lease(60, 3.0))]);
    assert_eq!(fleet.holders().collect::<Vec<_>>(), [(0, vec![1])]);
    let due_refresh = fleet.due_refresh(s(5)).expect("its turn");
    fleet.answered(&due_refresh, s(5), s(5), &[None, None]);
    assert_eq!(fleet.next_due(), Some(s(13)), "no interval was told: that of the start");
}

#[test]
fn failures_keep_the_lease_and_rest() {
    let mut fleet = fleet(FleetConfig { refresh_every: Some(Duration::ZERO), ..config(1, 1, 1) });
    refresh(&mut fleet, lease(60, 10.0));
    let due_refresh = fleet.due_refresh(s(0)).expect("its turn");
    fleet.failed(&due_refresh, s(0), s(1));
    assert_eq!(fleet.next_due(), Some(s(1) + FAILURE_BACKOFF));
    assert_eq!(fleet.holders().count(), 1);
}

#[test]
fn books_stay_open_from_the_oldest_unanswered_request_on() {
    let mut fleet = fleet(FleetConfig { spread: s(0), ..config(2, 1, 1) });
    let slow = fleet.due_refresh(s(0)).expect("a turn");
    refresh(&mut fleet, lease(60, 90.0));
    refresh(&mut fleet, lease(60, 20.0));
    fleet.close(s(8));
    // Answered late: it held nothing until then, and the other lease had shrunk meanwhile.
    fleet.answered(&slow, s(0), s(9), &[Some(lease(60, 80.0))]);
    fleet.finish(s(10));
    assert_eq!(fleet.ledger.worst(), None);
}

#[test]
fn demand_jumps_at_once_and_leases_follow() {
    let mut fleet = fleet(FleetConfig { spread: s(2), ..config(2, 1, 1) });
    fleet.ledger.settling = Some(Settling::new(s(10), 0.99, s(1)));
    refresh(&mut fleet, lease(60, 10.0));
    refresh(&mut fleet, lease(60, 10.0));
    fleet.jump(s(10), 3.0);
    fleet.close(s(10));
    for wants in [10.0, 10.0, 30.0, 30.0] {
        refresh(&mut fleet, lease(60, wants));
    }
    fleet.finish(s(20));
    // The clients refresh at 5, 6, 10 and 11 s.
    let settled = fleet.ledger.settling.and_then(|settling| settling.after());
    assert_eq!(settled, Some(s(1)));
}

#[test]
fn the_same_seed_walks_the_same_way() {
    let walk = Walk::Within { step: 5.0, most: 20.0 };
    let wants = |seed| {
        let mut fleet = fleet(FleetConfig { walk, seed, ..config(3, 1, 1) });
        (0..9).map(|_| refresh(&mut fleet, lease(60, 1.0)).items[0].wants).collect::<Vec<_>>()
    };
    assert_eq!(wants(1), wants(1));
    assert_ne!(wants(1), wants(2));
    assert!(wants(1).iter().all(|wants| (0.0..=20.0).contains(wants) && *wants != 10.0));
}
