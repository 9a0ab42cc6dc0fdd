//! The task that keeps the holds of a client: renews their sessions, and ends them.
//!
//! A hold that a node has recorded is renewed, many in one call. One that was granted without a record
//! is asked for again until there is one.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};
use tollgate_proto::tollgate::v1::{KeepAliveRequest, KeepAliveResponse, RenewedSession};

use super::session::Session;
use crate::backend::Backend;
use crate::decision::{DecidedBy, Error, NoAnswer, Refusal};
use crate::fallback::Fallbacks;
use crate::metrics;
use crate::tenants::{Copies, copies};

/// The longest time for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Of the ttl: renewals are so far apart, and at its end the application has so long to stop, before
/// others get the copies.
const PART_OF_TTL: u32 = 3;

/// Of the ttl: the pause after a renewal without an answer.
const RETRY_PART_OF_TTL: u32 = 24;

/// Renewals that are due so soon are made in the same call.
const TOGETHER: Duration = Duration::from_millis(500);

/// The most sessions in one call.
const MOST_RENEWED: usize = 100;

/// The most calls for single sessions at a time.
const MOST_CALLS: usize = 16;

/// The pause before a session that was not ended is ended again.
const END_PAUSE: Duration = Duration::from_secs(1);

/// The longest time for that. Afterwards the session ends by itself.
const LONGEST_END: Duration = Duration::from_secs(60);

pub(super) type Events = mpsc::UnboundedSender<Event>;

/// What the application does.
pub(super) enum Event {
    /// It has a hold.
    Keep(Kept),
    /// It does not use the copies any more, and wants to be told when the nodes know that.
    End(Arc<Session>, Option<oneshot::Sender<()>>),
    /// It has closed the client, and wants to be told when all sessions are ended.
    Close(oneshot::Sender<()>),
}

/// A hold that is kept.
pub(super) struct Kept {
    session: Arc<Session>,
    phase: Phase,
    /// Until when a node may keep the session; `None` if no node can know it.
    may_live_until: Option<Instant>,
    /// When something is to be done.
    due: Option<Instant>,
    /// Whether a call is under way, or waits for others.
    is_called: bool,
    /// Those who wait for the end.
    told: Vec<oneshot::Sender<()>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The copies are held.
    Held {
        /// Whether a node has recorded the hold.
        is_recorded: bool,
        /// Until when the last answer counts; `None` if the fallback has granted it.
        until: Option<Instant>,
    },
    /// The copies are lost, but the application has not let go yet.
    Lost,
    /// The session is to be ended.
    Ending,
}

impl Kept {
    /// A new hold. `granted_at` is when the request was sent with which a node has granted it.
    pub(super) fn new(
        session: Arc<Session>,
        granted_at: Option<Instant>,
        may_live_until: Option<Instant>,
    ) -> Self {
        let status = session.status();
        let is_recorded = is_recorded(status.decided_by, status.shadow);
        let until = granted_at.map(|at| at + session.ttl);
        let phase = Phase::Held { is_recorded, until };
        Self { session, phase, may_live_until, due: None, is_called: false, told: Vec::new() }
    }

    fn interval(&self) -> Duration {
        self.session.ttl / PART_OF_TTL
    }

    /// When the copies are lost without another answer.
    fn end(&self) -> Option<Instant> {
        let Phase::Held { until, .. } = self.phase else { return None };
        until.map(|until| until - self.interval())
    }

    fn is_recorded(&self) -> bool {
        matches!(self.phase, Phase::Held { is_recorded: true, .. })
    }
}

impl Drop for Kept {
    /// Also when the runtime has ended.
    fn drop(&mut self) {
        self.session.end();
    }
}

fn is_recorded(decided_by: DecidedBy, shadow: bool) -> bool {
    decided_by == DecidedBy::Node && !shadow
}

/// What came of a call.
enum Answer {
    Renewed {
        ids: Vec<u64>,
        sent: Instant,
        result: Result<KeepAliveResponse, Error>,
    },
    Reserved {
        id: u64,
        sent: Instant,
        result: Result<Result<Copies, Refusal>, Error>,
    },
    /// Whether the session is ended.
    Ended {
        id: u64,
        is_ended: bool,
    },
}

pub(super) struct Keeper {
    backend: Arc<Backend>,
    fallbacks: Fallbacks,
    events: mpsc::UnboundedReceiver<Event>,
    /// Nobody can send an event any more.
    is_alone: bool,
    /// Those who wait for the end of all sessions, once the client is closed.
    closing: Option<Vec<oneshot::Sender<()>>>,
    kept: HashMap<u64, Kept>,
    /// When something is to be done about a hold.
    due: BTreeSet<(Instant, u64)>,
    /// Those that wait for a call of their own.
    waiting: VecDeque<u64>,
    calls: FuturesUnordered<BoxFuture<'static, Answer>>,
    /// Calls for single sessions.
    single_calls: usize,
}

impl Keeper {
    pub(super) fn new(
        backend: Arc<Backend>,
        fallbacks: Fallbacks,
        events: mpsc::UnboundedReceiver<Event>,
    ) -> Self {
        Self {
            backend,
            fallbacks,
            events,
            is_alone: false,
            closing: None,
            kept: HashMap::new(),
            due: BTreeSet::new(),
            waiting: VecDeque::new(),
            calls: FuturesUnordered::new(),
            single_calls: 0,
        }
    }

    /// Runs until the client is closed or dropped, and no session is left.
    pub(super) async fn run(mut self) {
        loop {
            self.do_what_is_due(Instant::now());
            self.call_waiting();
            if self.kept.is_empty() && (self.is_alone || self.closing.is_some()) {
                return;
            }
            let next = self.due.first().map(|(at, _)| *at);
            tokio::select! {
                event = self.events.recv(), if !self.is_alone => match event {
                    Some(event) => self.take(event, Instant::now()),
                    None => self.is_alone = true,
                },
                Some(answer) = self.calls.next() => self.take_answer(answer, Instant::now()),
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            }
        }
    }

    fn take(&mut self, event: Event, now: Instant) {
        match event {
            Event::Keep(kept) => {
                let (id, due) = (kept.session.id, now + kept.interval());
                self.kept.insert(id, kept);
                self.plan(id, Some(due));
                if self.closing.is_some() {
                    self.begin_end(id, None, now);
                }
            }
            Event::End(session, told) => self.begin_end(session.id, told, now),
            Event::Close(told) => {
                self.closing.get_or_insert_default().push(told);
                let ids: Vec<u64> = self.kept.keys().copied().collect();
                for id in ids {
                    self.begin_end(id, None, now);
                }
            }
        }
    }

    /// Something is to be done about a hold at another time.
    fn plan(&mut self, id: u64, at: Option<Instant>) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        let at = match (at, kept.end()) {
            (Some(at), Some(end)) => Some(at.min(end)),
            (at, end) => at.or(end),
        };
        if let Some(before) = std::mem::replace(&mut kept.due, at) {
            self.due.remove(&(before, id));
        }
        self.due.extend(at.map(|at| (at, id)));
    }

    fn forget(&mut self, id: u64) {
        if let Some(kept) = self.kept.remove(&id)
            && let Some(due) = kept.due
        {
            self.due.remove(&(due, id));
        }
    }

    /// Begins to end a session, unless no node can know it.
    fn begin_end(&mut self, id: u64, told: Option<oneshot::Sender<()>>, now: Instant) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        kept.told.extend(told);
        if kept.phase == Phase::Ending {
            return;
        }
        kept.phase = Phase::Ending;
        kept.session.end();
        kept.may_live_until = kept.may_live_until.map(|until| until.min(now + LONGEST_END));
        if kept.may_live_until.is_none() && !kept.is_called {
            self.forget(id);
        } else {
            let due = (!kept.is_called).then_some(now);
            self.plan(id, due);
        }
    }

    /// Begins the calls that are due.
    fn do_what_is_due(&mut self, now: Instant) {
        let mut renewed = Vec::new();
        while let Some((at, id)) = self.due.first().copied() {
            let Some(kept) = self.kept.get(&id) else {
                self.due.remove(&(at, id));
                continue;
            };
            // Those that are recorded go along with others that are due.
            let latest = if renewed.is_empty() { now } else { now + TOGETHER };
            if at > now && (at > latest || !kept.is_recorded() || kept.is_called) {
                break;
            }
            match kept.phase {
                Phase::Held { .. } if kept.end().is_some_and(|end| end <= now) => {
                    self.time_is_over(id, now);
                }
                Phase::Ending if kept.may_live_until.is_none_or(|until| until <= now) => {
                    self.forget(id);
                }
                Phase::Lost => self.plan(id, None),
                Phase::Held { is_recorded: true, .. } => {
                    self.is_called(id);
                    renewed.push(id);
                }
                Phase::Held { .. } | Phase::Ending => {
                    self.is_called(id);
                    self.waiting.push_back(id);
                }
            }
        }
        for ids in renewed.chunks(MOST_RENEWED) {
            self.renew(ids.to_vec());
        }
    }

    /// A call is under way: the next thing to do is at the end of the hold's time.
    fn is_called(&mut self, id: u64) {
        if let Some(kept) = self.kept.get_mut(&id) {
            kept.is_called = true;
            self.plan(id, None);
        }
    }

    /// No node has answered in time: the fallback decides.
    fn time_is_over(&mut self, id: u64, now: Instant) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        let (session, copies) = (&kept.session, kept.session.status().copies);
        let fallback = self.fallbacks.of_resource(&session.resource);
        if fallback.is_some_and(|fallback| fallback.decide(copies, now).is_granted()) {
            let resource = &session.resource;
            tracing::warn!(resource, "no node has renewed a hold: the fallback lets it go on");
            session.goes_on(DecidedBy::Fallback, false);
            kept.phase = Phase::Held { is_recorded: false, until: None };
            let next = (!kept.is_called).then(|| now + kept.interval());
            self.plan(id, next);
        } else {
            self.lose(id, "no node has renewed it in time");
        }
    }

    fn lose(&mut self, id: u64, reason: &str) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        kept.phase = Phase::Lost;
        if kept.session.status().is_held {
            metrics::hold_lost();
            let Session { resource, domain, .. } = &*kept.session;
            tracing::warn!(resource, domain, reason, "a hold is lost");
            kept.session.end();
        }
        self.plan(id, None);
    }

    /// Renews recorded holds in one call.
    fn renew(&mut self, ids: Vec<u64>) {
        let kept: Vec<&Kept> = ids.iter().filter_map(|id| self.kept.get(id)).collect();
        let (backend, sent) = (Arc::clone(&self.backend), Instant::now());
        let limit = kept.iter().map(|kept| kept.interval()).fold(ANSWER_TIMEOUT, Duration::min);
        let deadline = sent + limit;
        let sessions = kept.iter().map(|kept| kept.session.renewal()).collect();
        for id in &ids {
            self.may_live(*id, deadline);
        }
        self.calls.push(Box::pin(async move {
            let request = KeepAliveRequest { sessions };
            let result = backend.keep_alive(&request, deadline).await;
            Answer::Renewed { ids, sent, result }
        }));
    }

    /// Makes the calls for single sessions, not too many at a time.
    fn call_waiting(&mut self) {
        while self.single_calls < MOST_CALLS
            && let Some(id) = self.waiting.pop_front()
        {
            let Some(kept) = self.kept.get_mut(&id) else { continue };
            if kept.phase == Phase::Lost {
                kept.is_called = false;
                continue;
            }
            let (backend, sent) = (Arc::clone(&self.backend), Instant::now());
            let deadline = sent + kept.interval().min(ANSWER_TIMEOUT);
            self.single_calls += 1;
            if kept.phase == Phase::Ending {
                let request = kept.session.end_message();
                self.calls.push(Box::pin(async move {
                    let ended = backend.end_session(&request, deadline).await;
                    // Nothing is there to be ended, or it may not be.
                    let is_refused = ended.as_ref().is_err_and(is_refused);
                    Answer::Ended { id, is_ended: is_refused || ended.unwrap_or(false) }
                }));
            } else {
                let held = kept.session.status().copies;
                let request = kept.session.reserve_message(held, held);
                self.may_live(id, deadline);
                self.calls.push(Box::pin(async move {
                    let result = backend.reserve(&request, deadline).await;
                    let result = result.and_then(|response| copies(&response));
                    Answer::Reserved { id, sent, result }
                }));
            }
        }
    }

    /// A call that may be carried out until then keeps the session alive for its ttl.
    fn may_live(&mut self, id: u64, deadline: Instant) {
        if let Some(kept) = self.kept.get_mut(&id) {
            let until = deadline + kept.session.ttl;
            kept.may_live_until = kept.may_live_until.max(Some(until));
        }
    }

    fn take_answer(&mut self, answer: Answer, now: Instant) {
        match answer {
            Answer::Renewed { mut ids, result: Err(error), .. }
                if is_refused(&error) && ids.len() > 1 =>
            {
                // One of them may be the reason.
                let half = ids.split_off(ids.len() / 2);
                self.renew(ids);
                self.renew(half);
            }
            Answer::Renewed { ids, result: Err(_), .. } => {
                ids.into_iter().for_each(|id| self.not_answered(id, now));
            }
            Answer::Renewed { ids, sent, result: Ok(response) } => {
                let mut sessions = response.sessions.iter();
                for id in ids {
                    self.renewed(id, sent, sessions.next(), response.degraded, now);
                }
            }
            Answer::Reserved { id, sent, result } => {
                self.single_calls -= 1;
                self.reserved(id, sent, result, now);
            }
            Answer::Ended { id, is_ended } => {
                self.single_calls -= 1;
                if is_ended {
                    self.forget(id);
                } else {
                    self.called(id);
                    self.plan(id, Some(now + END_PAUSE));
                }
            }
        }
    }

    /// No call is under way any more. Returns the phase.
    fn called(&mut self, id: u64) -> Option<Phase> {
        let kept = self.kept.get_mut(&id)?;
        kept.is_called = false;
        Some(kept.phase)
    }

    fn not_answered(&mut self, id: u64, now: Instant) {
        let Some(phase) = self.called(id) else { return };
        let Some(kept) = self.kept.get(&id) else { return };
        let next = match phase {
            Phase::Held { until: Some(_), .. } => now + kept.session.ttl / RETRY_PART_OF_TTL,
            Phase::Held { .. } => now + kept.interval(),
            Phase::Lost => return,
            Phase::Ending => now,
        };
        self.plan(id, Some(next));
    }

    fn renewed(
        &mut self,
        id: u64,
        sent: Instant,
        session: Option<&RenewedSession>,
        is_degraded: bool,
        now: Instant,
    ) {
        let Some(kept) = self.kept.get(&id) else { return };
        let Some(session) = session.filter(|session| session.session == kept.session.name) else {
            return self.not_answered(id, now);
        };
        let has_hold = session.holds.iter().any(|hold| hold.hold == kept.session.hold);
        match session.alive && (has_hold || is_degraded) {
            true => {
                let decided_by = if has_hold { DecidedBy::Node } else { DecidedBy::DegradedNode };
                self.goes_on(id, sent, (decided_by, false), now);
            }
            false => self.is_refused(id, "its session was ended, or its store has lost it", now),
        }
    }

    fn reserved(
        &mut self,
        id: u64,
        sent: Instant,
        result: Result<Result<Copies, Refusal>, Error>,
        now: Instant,
    ) {
        match result {
            Ok(Ok(copies)) => self.goes_on(id, sent, (copies.decided_by, copies.shadow), now),
            // The store is away, and no hold ends for that.
            Ok(Err(refusal)) if refusal.decided_by == DecidedBy::DegradedNode => {
                self.goes_on(id, sent, (DecidedBy::DegradedNode, false), now);
            }
            Ok(Err(_)) => self.is_refused(id, "there is no room for it", now),
            Err(_) => self.not_answered(id, now),
        }
    }

    /// A node lets a hold go on, with a call sent then.
    fn goes_on(
        &mut self,
        id: u64,
        sent: Instant,
        (decided_by, shadow): (DecidedBy, bool),
        now: Instant,
    ) {
        let Some(phase) = self.called(id) else { return };
        let Some(kept) = self.kept.get_mut(&id) else { return };
        match phase {
            Phase::Lost => {}
            Phase::Ending => self.plan(id, Some(now)),
            Phase::Held { .. } => {
                kept.session.goes_on(decided_by, shadow);
                let until = Some(sent + kept.session.ttl);
                let is_recorded = is_recorded(decided_by, shadow);
                kept.phase = Phase::Held { is_recorded, until };
                let next = sent + kept.interval();
                self.plan(id, Some(next));
            }
        }
    }

    /// A node says that there is no such hold, and none is made.
    fn is_refused(&mut self, id: u64, reason: &str, now: Instant) {
        match self.called(id) {
            Some(Phase::Held { .. }) => self.lose(id, reason),
            Some(Phase::Ending) => self.plan(id, Some(now)),
            Some(Phase::Lost) | None => {}
        }
    }
}

/// Whether the request is wrong, or not allowed; it will be the next time.
fn is_refused(error: &Error) -> bool {
    use NoAnswer::{Forbidden, NotConfigured};
    matches!(error, Error::Invalid(_) | Error::NoDecision(Forbidden(_) | NotConfigured(_)))
}
