//! Replies that no script of ours makes: whatever a server says, it is read as what it is, or as no
//! reply at all.
//!
//! An input is a reply as on the wire.

use redis::Value;
use testkit::fuzz;

use super::batch::{Batch, Declared, Question};
use super::queue::Owner;
use super::{leases, script};
use crate::domain::bucket::{BucketKind, BucketLimit};
use crate::store::{BucketRequest, TokenAction};

/// Questions of each kind, several to one bucket.
fn asks<'a>(terms: &'a crate::domain::bucket::Terms) -> Vec<BucketRequest<'a>> {
    let kinds = [
        BucketKind::GlobalDefault,
        BucketKind::Configured { bounded: false },
        BucketKind::Configured { bounded: false },
        BucketKind::Configured { bounded: true },
        BucketKind::Dynamic { max_buckets: Some(3) },
    ];
    let ask = |kind| BucketRequest {
        caller: None,
        namespace: "ns",
        name: "b",
        kind,
        terms,
        max_idle_ms: None,
        tokens: 1,
        action: TokenAction::Take { max_wait_ms: 1000 },
        prefetch: None,
        moved: false,
        rewrite: false,
    };
    kinds.map(ask).to_vec()
}

#[test]
fn any_reply() {
    let terms = BucketLimit::default().terms();
    let questions: Vec<Question> =
        asks(&terms).iter().map(|ask| Question::new(ask, Owner::default(), None)).collect();
    let questions: Vec<&Question> = questions.iter().collect();
    let batch = Batch::new(&questions, Declared::All);
    fuzz::run("replies", &[], |input| {
        let Ok(reply) = redis::parse_redis_value(input) else { return };
        if let Some(outcomes) = batch.outcomes(&reply, &questions) {
            let mut answered: Vec<usize> = outcomes.each.iter().map(|(at, _)| *at).collect();
            answered.sort_unstable();
            assert_eq!(answered, (0..questions.len()).collect::<Vec<_>>(), "each of them once");
            let met = outcomes.each.iter().filter_map(|(_, outcome)| outcome.as_ref());
            assert!(met.clone().all(|outcome| outcome.accrued_us.is_finite()), "{reply:?}");
        }
        leases::read_anything(&reply);
        if let Some(heard) = script::Heard::read(&reply) {
            assert!(heard.born >= 0);
        }
        for layouts in [0, 1, 5] {
            if let Some((left, _)) = script::settled(&reply, layouts) {
                assert_eq!(left.len(), layouts);
                assert!(
                    left.iter().all(|left| std::time::Instant::now().checked_add(*left).is_some())
                );
            }
        }
        let parts = if let Value::Array(parts) = &reply { parts.as_slice() } else { &[] };
        if let [state, expires, ..] = parts {
            script::twin_state(state, expires, None);
        }
    });
}
