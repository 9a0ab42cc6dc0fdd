//! A client that holds copies, one session after another.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt as _;
use rand::rngs::SmallRng;
use tokio::time::sleep_until;
use tollgate_client::connection::{AuthChannel, answer_within};
use tollgate_proto::tollgate::v1::holds_client::HoldsClient;
use tollgate_proto::tollgate::v1::{
    EndSessionRequest, KeepAliveRequest, ReleaseRequest, ReserveRequest, SessionToRenew,
};

use crate::audit::Key;
use crate::commands::holds::books::{HoldBooks, sure_life};
use crate::load::driver::Failure;
use crate::load::keys::Draw;
use crate::load::protocol::{Protocol as _, Reserve};
use crate::load::tally::{LiveCounts, Tally, Window};

/// Pause after a failure, so that a dead target does not cause a busy loop.
const FAILURE_BACKOFF: Duration = Duration::from_millis(10);

/// Pause after a refusal without a time to retry after.
const REFUSAL_PAUSE: Duration = Duration::from_millis(100);

/// Renewals in each ttl.
const RENEWALS: u32 = 3;

/// What became of sessions, in the whole run.
#[derive(Clone, Debug, Default)]
pub(super) struct SessionCounts {
    /// Renewals that were answered.
    pub(super) renewals: u64,
    /// Renewals without an answer.
    pub(super) renewal_errors: u64,
    /// Sessions whose copies were lost before they were released.
    pub(super) lost: u64,
    /// Of these, those that should have lived on.
    pub(super) lost_early: u64,
    /// Sessions that released their copies.
    pub(super) released: u64,
    /// Sessions whose release failed.
    pub(super) release_errors: u64,
}

/// What all clients share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) reserve: Reserve,
    pub(super) window: Window,
    pub(super) timeout: Duration,
    pub(super) ttl: Duration,
    pub(super) hold_for: Duration,
    /// Start of all session names of this run.
    pub(super) run: u64,
    pub(super) live: Arc<LiveCounts>,
    pub(super) tally: RefCell<Tally<Reserve>>,
    pub(super) books: RefCell<HoldBooks>,
    pub(super) sessions: RefCell<SessionCounts>,
}

/// A client, with one session at a time.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) shared: Rc<Shared>,
    pub(super) node: HoldsClient<AuthChannel>,
    pub(super) domains: Draw,
    pub(super) rng: SmallRng,
    /// Number of the next session.
    pub(super) next_session: u64,
    /// Distance to the one after that: the number of clients.
    pub(super) step: u64,
}

/// A session that is not reserved yet.
struct Session {
    number: u64,
    domain: u64,
    request: ReserveRequest,
}

/// What a reservation has come to.
enum Reserved {
    /// Until the first renewal is due, count from then.
    Granted(Instant),
    Refused(Duration),
    Failed,
}

impl Client {
    /// Holds copies until the run ends.
    pub(super) async fn run(mut self) {
        let end = self.shared.window.end;
        while Instant::now() < end {
            let session = self.session();
            // Sent again, a reservation answers the same: a lost answer costs nothing.
            let reserved = loop {
                match self.reserve(&session).await {
                    Reserved::Failed if Instant::now() < end => pause(FAILURE_BACKOFF, end).await,
                    reserved => break reserved,
                }
            };
            match reserved {
                Reserved::Granted(sent) => self.hold(&session, sent).await,
                Reserved::Refused(time) => {
                    pause(time.mul_f64(self.rng.random_range(0.75..1.25)), end).await;
                }
                Reserved::Failed => {}
            }
        }
    }

    fn session(&mut self) -> Session {
        let Shared { reserve, run, .. } = &*self.shared;
        let (number, domain) = (self.next_session, self.domains.key());
        self.next_session += self.step;
        let mut request = reserve.request();
        request.session = format!("{run:016x}-{number}");
        reserve.keys.write(domain, Reserve::name(&mut request));
        Session { number, domain, request }
    }

    async fn reserve(&mut self, session: &Session) -> Reserved {
        let shared = Rc::clone(&self.shared);
        let Session { number, domain, request } = session;
        let sent = Instant::now();
        shared.tally.borrow_mut().sent(sent, sent);
        let answer = answer_within(shared.timeout, self.node.reserve(request.clone())).await;
        let now = Instant::now();
        let mut tally = shared.tally.borrow_mut();
        let answer = match answer {
            Ok(answer) => answer,
            Err(status) => {
                shared.live.failed();
                tally.failed(sent, now, Failure::from(status));
                return Reserved::Failed;
            }
        };
        let outcome = Reserve::outcome(request, &answer);
        shared.live.decided(outcome.granted);
        let key = Key { number: *domain, of: shared.reserve.keys.count() };
        tally.decided((sent, now), (request, &answer), &outcome, key);
        if outcome.granted && !outcome.degraded {
            if !outcome.shadow {
                let until = sent + sure_life(shared.ttl);
                shared.books.borrow_mut().begin(*number, (*domain, outcome.amount), until, now);
            }
            return Reserved::Granted(sent);
        }
        match u64::try_from(outcome.wait_ms) {
            Ok(ms) if ms > 0 => Reserved::Refused(Duration::from_millis(ms)),
            _ => Reserved::Refused(REFUSAL_PAUSE),
        }
    }

    /// Keeps the session alive for some time, and then releases its copies.
    async fn hold(&mut self, session: &Session, mut renewed: Instant) {
        let Shared { ttl, hold_for, window, .. } = *self.shared;
        let until = Instant::now() + hold_for.mul_f64(self.rng.random_range(0.0..2.0));
        let until = until.min(window.end);
        loop {
            let next = renewed + ttl / RENEWALS;
            if until <= next.max(Instant::now()) {
                break;
            }
            sleep_until(next.into()).await;
            match self.renew(session).await {
                Renewed::Lives(sent) => renewed = sent,
                Renewed::Lost => return,
                // Again, without delay: the session may end soon.
                Renewed::Failed => pause(FAILURE_BACKOFF, until).await,
            }
        }
        sleep_until(until.into()).await;
        self.release(session).await;
    }

    async fn renew(&mut self, session: &Session) -> Renewed {
        let shared = Rc::clone(&self.shared);
        let ReserveRequest { resource, session: name, hold, .. } = &session.request;
        let renewed =
            SessionToRenew { resource: resource.clone(), session: name.clone(), ttl_millis: 0 };
        let request = KeepAliveRequest { sessions: vec![renewed] };
        let sent = Instant::now();
        let answer = answer_within(shared.timeout, self.node.keep_alive(request)).await;
        let now = Instant::now();
        let mut counts = shared.sessions.borrow_mut();
        let Ok(answer) = answer else {
            counts.renewal_errors += 1;
            return Renewed::Failed;
        };
        counts.renewals += 1;
        if answer.degraded {
            // Nothing is renewed; the time of the session passes.
            return Renewed::Lives(sent);
        }
        let mut books = shared.books.borrow_mut();
        let lives = answer
            .sessions
            .iter()
            .any(|session| session.alive && session.holds.iter().any(|held| held.hold == *hold));
        if lives {
            books.renew(session.number, sent + sure_life(shared.ttl), now);
            return Renewed::Lives(sent);
        }
        counts.lost += 1;
        counts.lost_early += u64::from(books.end(session.number, now));
        Renewed::Lost
    }

    /// Releases the copies, by one of the two ways to do so.
    async fn release(&mut self, session: &Session) {
        let shared = Rc::clone(&self.shared);
        shared.books.borrow_mut().end(session.number, Instant::now());
        let ReserveRequest { resource, session, hold, .. } = session.request.clone();
        let released = if self.rng.random() {
            let request = EndSessionRequest { resource, session };
            answer_within(shared.timeout, self.node.end_session(request)).await.is_ok()
        } else {
            let request = ReleaseRequest { resource, session, hold, keep: 0 };
            let answer = answer_within(shared.timeout, self.node.release(request)).await;
            answer.is_ok_and(|answer| !answer.degraded)
        };
        let mut counts = shared.sessions.borrow_mut();
        if released {
            counts.released += 1;
        } else {
            counts.release_errors += 1;
        }
    }
}

/// What a renewal has come to.
enum Renewed {
    /// The session lives, as of a call that was sent then.
    Lives(Instant),
    Lost,
    Failed,
}

/// Waits, until `end` at most.
async fn pause(time: Duration, end: Instant) {
    let until = Instant::now().checked_add(time).map_or(end, |until| until.min(end));
    sleep_until(until.into()).await;
}
