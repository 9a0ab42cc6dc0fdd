//! Copies that domains hold: `tollgate.v1.Holds/Reserve`.

use tollgate_proto::tollgate::v1::reserve_response::Status;
use tollgate_proto::tollgate::v1::{ReserveRequest, ReserveResponse};

use super::{Merge, Outcome, Protocol};
use crate::audit::{Key, Ledger};
use crate::load::keys::Keys;

/// What every reservation asks for.
#[derive(Clone, Debug)]
pub struct Reserve {
    /// Resource.
    pub resource: String,
    /// Domain names.
    pub keys: Keys,
    /// Name of the hold in each session.
    pub hold: &'static str,
    /// Most copies per hold.
    pub copies: i64,
    /// Least copies per hold.
    pub min_copies: i64,
    /// How long a session lives if it is not renewed, in ms.
    pub ttl_ms: i64,
}

/// Counts of reservations.
#[derive(Clone, Debug, Default)]
pub struct ReserveCounts {
    /// Granted fewer copies than were asked for.
    pub granted_in_part: u64,
}

impl Merge for ReserveCounts {
    fn merge(&mut self, other: &Self) {
        self.granted_in_part += other.granted_in_part;
    }
}

impl Protocol for Reserve {
    const PATH: &'static str = "/tollgate.v1.Holds/Reserve";
    type Request = ReserveRequest;
    type Answer = ReserveResponse;
    type Counts = ReserveCounts;

    fn keys(&self) -> &Keys {
        &self.keys
    }

    fn request(&self) -> ReserveRequest {
        ReserveRequest {
            resource: self.resource.clone(),
            session: String::new(),
            session_ttl_millis: self.ttl_ms,
            hold: self.hold.to_owned(),
            domain: String::new(),
            copies: self.copies,
            min_copies: self.min_copies,
        }
    }

    fn name(request: &mut ReserveRequest) -> &mut String {
        &mut request.domain
    }

    fn outcome(request: &ReserveRequest, answer: &ReserveResponse) -> Outcome {
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

    fn count(counts: &mut ReserveCounts, answer: &ReserveResponse, outcome: &Outcome) {
        if outcome.granted && outcome.short && !answer.shadow {
            counts.granted_in_part += 1;
        }
    }

    /// What was granted in a whole run is bounded by nothing: what is held at once is.
    fn book(_: &mut Ledger, _: &ReserveRequest, _: &ReserveResponse, _: Key, _: u64) {}
}
