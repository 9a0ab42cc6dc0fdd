//! Replies that no script of ours makes: whatever a server says, it is read as what it is, or as no
//! reply at all.
//!
//! An input is a reply as on the wire.

use testkit::fuzz;

use super::owner::Owner;
use super::wire::batch::{Batch, Declared, EncodedRequest, Registration};
use super::wire::script;
use super::{NODE_TTL, keys, leases, looks, permits, registers, versions};
use crate::domain::bucket::{BucketKind, BucketLimit};
use crate::store::permits::PermitUse;
use crate::store::{BucketRequest, TokenAction};

/// Requests of each kind, several to one bucket.
fn asks<'a>(terms: &'a crate::domain::bucket::Terms) -> Vec<BucketRequest<'a>> {
    let kinds = [
        BucketKind::GlobalDefault,
        BucketKind::Configured,
        BucketKind::Configured,
        BucketKind::Configured,
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
        rewrite: false.into(),
    };
    kinds.map(ask).to_vec()
}

fn encoded(request: &BucketRequest<'_>) -> EncodedRequest {
    let registration = match request.kind {
        BucketKind::Dynamic { max_buckets: Some(bound) } => {
            Registration::Here { key: keys::register(request.namespace), bound, enroll: true }
        }
        _ => Registration::NotNeeded,
    };
    let key = keys::state(request);
    EncodedRequest::new(request, key, registration, Owner::INTERNAL, None)
}

#[test]
fn any_reply() {
    let terms = BucketLimit::default().terms();
    let requests: Vec<EncodedRequest> = asks(&terms).iter().map(|ask| encoded(ask)).collect();
    let batch = Batch::new(&requests, Declared::All);
    fuzz::run("replies", &[], |input| {
        let Ok(reply) = redis::parse_redis_value(input) else { return };
        if let Some(outcomes) = batch.outcomes(&reply, &requests) {
            assert_eq!(outcomes.len(), requests.len());
            let mut found = outcomes.iter().flatten();
            assert!(found.all(|outcome| outcome.accrued_us.is_finite()), "{reply:?}");
        }
        leases::read_anything(&reply);
        if let Some(heard) = script::HeartbeatReply::read(&reply) {
            assert!(heard.born >= 0);
        }
        for layouts in [0, 1, 5] {
            if let Some((left, _)) = script::read_layouts_reply(&reply, layouts) {
                assert_eq!(left.len(), layouts);
                assert!(
                    left.iter().all(|left| std::time::Instant::now().checked_add(*left).is_some())
                );
            }
        }
        if let Some(members) = script::read_members_reply(&reply, NODE_TTL) {
            assert!(members.iter().all(|member| member.is_live == (member.silent < NODE_TTL)));
        }
        registers::read_anything(&reply);
        looks::read_anything(&reply);
        let permit = permits::read_use_reply(&reply);
        if let Some(PermitUse::First(tokens)) = permit {
            assert!(i64::try_from(tokens).is_ok());
        }
        versions::read_anything(&reply);
    });
}
