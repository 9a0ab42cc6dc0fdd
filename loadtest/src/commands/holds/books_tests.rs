//! Tests of the books of what is held.

use super::*;
use crate::audit::load_limits;
use crate::load::keys::Pattern;

const LIMITS: &str = "
holds:
  - resource: r
    global_limit: 10
    domain_limit: 4
    domains: { d2: 6 }
    groups: { pair: { domains: [d0, d1], limit: 5 } }
";

/// Books of domains d0 to d3, and a clock in seconds.
fn books() -> (HoldBooks, impl Fn(u64) -> Instant) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("limits.yaml");
    std::fs::write(&path, LIMITS).expect("a file");
    let limits = load_limits(&path).expect("good limits");
    let template = limits.holds.find("r").map(|(_, template)| template.clone());
    let keys = Keys::new(Pattern::Uniform(4), "hot", "d");
    let start = Instant::now();
    (HoldBooks::new(template, keys), move |s| start + Duration::from_secs(s))
}

fn exceeded(books: &HoldBooks) -> Vec<(Kind, String, u64)> {
    books.exceeded().into_iter().map(|sum| (sum.of, sum.name, sum.most_held)).collect()
}

#[test]
fn all_limits_may_be_reached_and_not_exceeded() {
    let (mut books, at) = books();
    books.begin(1, (0, 4), at(10), at(0));
    books.begin(2, (1, 1), at(10), at(0));
    books.begin(3, (2, 5), at(10), at(0));
    assert_eq!((books.violations, books.all().most_held, books.domains()), (0, 10, 3));
    // One more of d2, which may have 6, is one too many of all; of d1, of the group, too.
    books.begin(4, (2, 1), at(10), at(1));
    assert_eq!(exceeded(&books), [(Kind::All, String::new(), 11)]);
    books.begin(5, (1, 1), at(10), at(1));
    let group = (Kind::Group, "pair".to_owned(), 6);
    assert_eq!(exceeded(&books), [(Kind::All, String::new(), 12), group]);
    assert_eq!(books.violations, 3);
}

#[test]
fn a_domain_may_exceed_its_limit_alone() {
    let (mut books, at) = books();
    books.begin(1, (3, 3), at(10), at(0));
    books.begin(2, (3, 2), at(10), at(1));
    assert_eq!(exceeded(&books), [(Kind::Domain, "d3".to_owned(), 5)]);
}

#[test]
fn copies_count_until_they_are_released_or_may_have_expired() {
    let (mut books, at) = books();
    books.begin(1, (3, 4), at(10), at(0));
    assert!(books.end(1, at(3)), "held until now");
    books.begin(2, (3, 4), at(13), at(3));
    // At 13 s it may have ended.
    books.begin(3, (3, 4), at(20), at(13));
    assert!(!books.end(2, at(14)), "no longer for sure");
    assert!(!books.end(2, at(14)), "forgotten");
    assert_eq!(books.violations, 0);
}

#[test]
fn a_renewed_session_counts_on_even_if_it_seemed_to_have_ended() {
    let (mut books, at) = books();
    books.begin(1, (3, 4), at(10), at(0));
    books.renew(1, at(15), at(5));
    books.renew(1, at(14), at(6));
    books.begin(2, (2, 4), at(12), at(11));
    assert_eq!((books.violations, books.all().most_held), (0, 8), "still held at 11 s");
    // The renewal was sent in time, and its answer was late.
    books.renew(1, at(26), at(20));
    books.begin(3, (3, 1), at(30), at(21));
    assert_eq!(exceeded(&books), [(Kind::Domain, "d3".to_owned(), 5)]);
}

#[test]
fn without_limits_nothing_is_exceeded() {
    let (_, at) = books();
    let mut books = HoldBooks::new(None, Keys::new(Pattern::Hot, "d", ""));
    books.begin(1, (0, 1000), at(10), at(0));
    assert!(!books.checked() && books.violations == 0);
    let all = MostHeld { of: Kind::All, name: String::new(), most_held: 1000, limit: None };
    assert_eq!(books.all(), all);
}

#[test]
fn a_session_surely_lives_a_little_less_than_its_ttl() {
    assert_eq!(sure_life(Duration::from_secs(10)), Duration::from_millis(9988));
}
