//! Texts about the leases of `tollgate capacity shell`.

use tokio::time::Instant;

use super::epoch_s;
use super::get::verdict;
use crate::cli::text::{EMPTY_CELL, Table, escaped, number, remaining, rounded};
use crate::client::lease::{LeaseState, Leases, Now};
use crate::service::capacity::NO_BOUND;

/// Reads the clocks of this machine.
pub(super) fn read_clocks() -> Now {
    Now { at: Instant::now(), epoch_s: epoch_s() }
}

/// Says that a lease has expired.
pub(super) fn expired_line(client: &str, resource: &str, held: &LeaseState) -> String {
    let safe = safe_text(held.safe);
    format!("{} {}: the lease has expired, {safe}", escaped(client), escaped(resource))
}

/// One-line state of one client's lease on one resource.
pub(super) fn status_line(leases: &Leases, client: &str, resource: &str, now: Now) -> String {
    let name = format!("{} {}", escaped(client), escaped(resource));
    let Some(held) = leases.get(client, resource) else {
        return format!("{name}: not asked for");
    };
    let Some(lease) = held.has(now.epoch_s) else {
        return format!("{name}: no lease, {}", safe_text(held.safe));
    };
    let mut line = format!("{name}: {}", verdict(lease.capacity, held.wants).1);
    if let Some(remaining) = remaining(lease.expiry_time, now.epoch_s) {
        line +=
            &format!("; expires in {remaining}, asked again every {} s", lease.refresh_interval);
    }
    if let Some(until) = held.learning_until_s {
        let remaining = remaining(until, now.epoch_s)
            .map_or(String::new(), |remaining| format!(" for {remaining} more"));
        line += &format!("; the store is learning{remaining}: it gets what it says it has");
    }
    if held.degraded {
        line += "; decided without the shared store: it keeps what it says it has";
    }
    line
}

/// All leases as a table.
pub(super) fn table(leases: &Leases, now: Now) -> String {
    let mut table = Table::new(&[
        ("client", false),
        ("resource", false),
        ("wants", true),
        ("has", true),
        ("expires in", true),
        ("state", false),
    ]);
    let mut empty = true;
    for (client, resource, held) in leases.iter() {
        empty = false;
        let lease = held.has(now.epoch_s);
        let expires = lease.and_then(|lease| remaining(lease.expiry_time, now.epoch_s));
        table.row(vec![
            escaped(client),
            escaped(resource),
            rounded(held.wants),
            rounded(lease.map_or(0.0, |lease| lease.capacity)),
            expires.unwrap_or_else(|| EMPTY_CELL.to_owned()),
            state(held, now.epoch_s),
        ]);
    }
    if empty { "nobody has asked for anything here yet\n".to_owned() } else { table.to_string() }
}

fn state(held: &LeaseState, now_s: i64) -> String {
    let mut words = Vec::new();
    if held.has(now_s).is_none() {
        words.push(format!("no lease, {}", safe_text(held.safe)));
    } else {
        if let Some(remaining) = held.learning_until_s.and_then(|until| remaining(until, now_s)) {
            words.push(format!("learning, {remaining} more"));
        }
        if held.degraded {
            words.push("degraded".to_owned());
        }
    }
    if held.failing {
        words.push("no answer".to_owned());
    }
    words.join("; ")
}

/// What a client may use without a lease.
fn safe_text(safe: Option<f64>) -> String {
    match safe {
        Some(NO_BOUND) => "and any amount may be used without one".to_owned(),
        Some(safe) => format!("and {} may be used without one", number(safe)),
        None => "and nothing may be used".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use tollgate_proto::doorman::{Lease, ResourceResponse};

    use super::*;

    /// 2026-02-14T13:58:20Z
    const START_S: i64 = 1_771_077_500;

    fn start() -> Now {
        Now { at: Instant::now(), epoch_s: START_S }
    }

    /// An answer with a refresh interval of 5 s that expires `expires_s` after the start.
    fn answer(resource: &str, capacity: f64, expires_s: i64) -> ResourceResponse {
        ResourceResponse {
            resource_id: resource.to_owned(),
            gets: Lease { expiry_time: START_S + expires_s, refresh_interval: 5, capacity },
            safe_capacity: Some(2.5),
            ..ResourceResponse::default()
        }
    }

    #[test]
    fn table_and_status_lines() {
        let (now, mut leases) = (start(), Leases::default());
        let learning =
            ResourceResponse { learning_until: Some(START_S + 60), ..answer("db", 0.0, 20) };
        leases.on_answer("a\u{7}", 10.0, &learning, now);
        let degraded = ResourceResponse { degraded: Some(true), ..answer("db", 4.0, 20) };
        leases.on_answer("b", 4.0, &degraded, now);
        leases.on_failure("c", "db", 1.0, now);
        let expected = "\
client  resource  wants  has  expires in  state
a\\u{7}  db           10    0        20 s  learning, 60 s more
b       db            4    4        20 s  degraded
c       db            1    0           -  no lease, and nothing may be used; no answer
";
        assert_eq!(table(&leases, now), expected);
        let line = status_line(&leases, "a\u{7}", "db", now);
        assert!(
            line.ends_with("; the store is learning for 60 s more: it gets what it says it has")
        );
        let line = status_line(&leases, "b", "db", now);
        assert!(line.ends_with("; decided without the shared store: it keeps what it says it has"));
    }

    #[test]
    fn lines_for_what_is_not_held() {
        let (now, mut leases) = (start(), Leases::default());
        assert_eq!(status_line(&leases, "a", "db", now), "a db: not asked for");
        leases.on_failure("a", "db", 7.0, now);
        let line = status_line(&leases, "a", "db", now);
        assert_eq!(line, "a db: no lease, and nothing may be used");
        leases.on_answer("a", 100.0, &answer("db", 60.0, 8), now);
        assert_eq!(
            status_line(&leases, "a", "db", now),
            "a db: gets 60 of the 100 that it wants; expires in 8 s, asked again every 5 s"
        );
        let later = Now { epoch_s: START_S + 8, ..now };
        let lines: Vec<_> =
            leases.expire(later).into_iter().map(|(c, r, held)| expired_line(c, r, held)).collect();
        assert_eq!(lines, ["a db: the lease has expired, and 2.5 may be used without one"]);
        let line = status_line(&leases, "a", "db", later);
        assert_eq!(line, "a db: no lease, and 2.5 may be used without one");
    }
}
