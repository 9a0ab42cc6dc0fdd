//! Hits of domains on a resource: `tollgate.v1.Throttle/Request`.

use tollgate_proto::tollgate::v1::throttle_response::Status;
use tollgate_proto::tollgate::v1::{ThrottleRequest, ThrottleResponse};

use super::{Merge, Outcome, Protocol};
use crate::audit::{Key, Ledger};
use crate::load::keys::Keys;

/// What every request for hits asks for.
#[derive(Clone, Debug)]
pub struct Hits {
    /// Resource.
    pub resource: String,
    /// Domain names.
    pub keys: Keys,
    /// Most hits per request.
    pub copies: i64,
    /// Least hits per request.
    pub min_copies: i64,
}

/// What limits the hits of a refused request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limiter {
    /// `hard_limit`.
    Hard,
    /// `global_limit`.
    Global,
    /// Both leave equally little room.
    HardAndGlobal,
    /// Neither: the tiers, `max_domains`, or a node without its store. Answers don't tell them apart.
    Tiers,
}

impl Limiter {
    /// Number of values.
    pub const COUNT: usize = 4;

    fn of(answer: &ThrottleResponse) -> Self {
        match (answer.limited_by_hard, answer.limited_by_global) {
            (true, true) => Self::HardAndGlobal,
            (true, false) => Self::Hard,
            (false, true) => Self::Global,
            (false, false) => Self::Tiers,
        }
    }

    /// Name of value number `number` in reports.
    pub fn name(number: usize) -> &'static str {
        ["hard", "global", "hard_and_global", "tiers"].get(number).unwrap_or(&"")
    }
}

/// Counts of decisions on hits.
#[derive(Clone, Debug, Default)]
pub struct HitCounts {
    /// Granted fewer hits than were asked for.
    pub granted_in_part: u64,
    /// Entered a tier.
    pub bursts: u64,
    /// Refusals by [`Limiter`].
    pub refused_by: [u64; Limiter::COUNT],
}

impl Merge for HitCounts {
    fn merge(&mut self, other: &Self) {
        self.granted_in_part += other.granted_in_part;
        self.bursts += other.bursts;
        self.refused_by.iter_mut().zip(other.refused_by).for_each(|(sum, count)| *sum += count);
    }
}

impl Protocol for Hits {
    const PATH: &'static str = "/tollgate.v1.Throttle/Request";
    type Request = ThrottleRequest;
    type Answer = ThrottleResponse;
    type Counts = HitCounts;

    fn keys(&self) -> &Keys {
        &self.keys
    }

    fn request(&self) -> ThrottleRequest {
        ThrottleRequest {
            resource: self.resource.clone(),
            domain: String::new(),
            copies: self.copies,
            min_copies: self.min_copies,
        }
    }

    fn name(request: &mut ThrottleRequest) -> &mut String {
        &mut request.domain
    }

    fn outcome(request: &ThrottleRequest, answer: &ThrottleResponse) -> Outcome {
        let granted = answer.status == Status::Ok as i32;
        let amount = if granted { u64::try_from(answer.granted).unwrap_or(0) } else { 0 };
        Outcome {
            granted,
            amount,
            degraded: answer.degraded,
            shadow: answer.shadow,
            short: answer.shadow || !granted || answer.granted < request.copies,
            wait_ms: answer.retry_after_millis,
        }
    }

    fn count(counts: &mut HitCounts, answer: &ThrottleResponse, outcome: &Outcome) {
        counts.bursts += u64::from(answer.burst);
        if !outcome.granted {
            counts.refused_by[Limiter::of(answer) as usize] += 1;
        } else if outcome.short && !answer.shadow {
            counts.granted_in_part += 1;
        }
    }

    fn book(
        ledger: &mut Ledger,
        request: &ThrottleRequest,
        _: &ThrottleResponse,
        key: Key,
        amount: u64,
    ) {
        if !ledger.grant_by_number(key, amount) {
            ledger.grant(&request.domain, amount);
        }
    }
}
