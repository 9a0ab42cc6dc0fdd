//! The requests of a load, and how their answers are counted: [`Allow`] for tokens of buckets,
//! [`RateLimit`] for hits on descriptors of Envoy's rate limits, [`Hits`] for hits of domains, [`Reserve`] for
//! copies that they hold.

mod allow;
mod hits;
mod rate_limit;
mod reserve;

pub use allow::{Allow, AllowCounts, STATUSES};
pub use hits::{HitCounts, Hits, Limiter};
pub use rate_limit::RateLimit;
pub use reserve::{Reserve, ReserveCounts};

use std::fmt;

use prost::Message;

use crate::audit::{Key, Ledger};
use crate::load::keys::Keys;

/// A unary gRPC method under load. A value says what every request asks for.
///
/// The driver, the loops and the counters are generic over it, so each method has code of its own:
/// the load generator shares the CPUs with the measured servers.
pub trait Protocol: fmt::Debug + Send + Sync + 'static {
    /// Path of the method.
    const PATH: &'static str;
    /// A request.
    type Request: Message + fmt::Debug;
    /// Its answer.
    type Answer: Message + Default + fmt::Debug;
    /// Counts of what only these answers have.
    type Counts: Merge;

    /// The names that the requests are spread over.
    fn keys(&self) -> &Keys;

    /// A request, still without a name.
    fn request(&self) -> Self::Request;

    /// The name in `request`: of a bucket or a domain.
    fn name(request: &mut Self::Request) -> &mut String;

    /// What `answer` decides.
    fn outcome(request: &Self::Request, answer: &Self::Answer) -> Outcome;

    /// Counts a decision.
    fn count(counts: &mut Self::Counts, answer: &Self::Answer, outcome: &Outcome);

    /// Enters a grant of `amount` into the ledger. The request is for `key`.
    fn book(
        ledger: &mut Ledger,
        request: &Self::Request,
        answer: &Self::Answer,
        key: Key,
        amount: u64,
    );
}

/// Counters of one thread that add up.
pub trait Merge: Clone + Default + fmt::Debug + Send + 'static {
    /// Adds the counts of another thread.
    fn merge(&mut self, other: &Self);
}

/// What the decisions of all protocols have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Whether anything was granted.
    pub granted: bool,
    /// Tokens, hits or copies granted.
    pub amount: u64,
    /// Whether the shared store did not take part.
    pub degraded: bool,
    /// Whether it was granted only because the limits are not enforced.
    pub shadow: bool,
    /// Whether the limits left less than was asked for, or not at once.
    pub short: bool,
    /// Wait in ms: until use of a grant, or until the retry of a refusal.
    pub wait_ms: i64,
}
