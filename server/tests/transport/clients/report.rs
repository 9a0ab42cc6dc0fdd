//! Rows for the table of `docs/compatibility.md`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

/// Count of each status.
pub type Statuses = BTreeMap<String, u64>;

/// Prints the statuses of a client in a scenario. If `TOLLGATE_REPORT` is set, also writes them to
/// `$TOLLGATE_REPORT/client-<scenario>-<client>.json`.
pub fn row(scenario: &str, client: &str, statuses: &Statuses) {
    let counts: Vec<String> =
        statuses.iter().map(|(status, count)| format!("{count} {status}")).collect();
    let counts = counts.join(", ");
    println!("{scenario} | {client} | {counts}");
    let Some(folder) = std::env::var_os("TOLLGATE_REPORT") else { return };
    let row = json!({ "scenario": scenario, "client": client, "statuses": counts });
    let name = format!("client-{scenario}-{client}.json").replace(['/', ' '], "-");
    let path = Path::new(&folder).join(name);
    std::fs::write(path, format!("{row:#}\n")).unwrap();
}

/// Sum of several counts.
pub fn sum<'a>(counts: impl IntoIterator<Item = &'a Statuses>) -> Statuses {
    let mut all = Statuses::new();
    for (status, count) in counts.into_iter().flatten() {
        *all.entry(status.clone()).or_default() += count;
    }
    all
}

/// Asserts that only allowed statuses occurred.
#[track_caller]
pub fn only(statuses: &Statuses, allowed: &[&str]) {
    let others: Vec<_> =
        statuses.keys().filter(|status| !allowed.contains(&status.as_str())).collect();
    assert!(others.is_empty(), "{others:?} of {statuses:?}; allowed: {allowed:?}");
}

/// Asserts that `count` calls had this status, and none another.
#[track_caller]
pub fn all(statuses: &Statuses, status: &str, count: u64) {
    assert_eq!(*statuses, Statuses::from([(status.to_owned(), count)]));
}
