//! The task that keeps the holds of a client: renews their sessions, and ends them.
//!
//! All holds are renewed, many in one call. One of which no node knows is lost, if a node had recorded it;
//! else, if a degraded node or the fallback has granted it, it is asked for again.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};
use tollgate_common::LogThrottle;
use tollgate_proto::tollgate::v1::{KeepAliveRequest, KeepAliveResponse, RenewedSession};

use super::session::Session;
use crate::backend::Backend;
use crate::decision::{DecidedBy, Error, NoAnswer, Refusal};
use crate::fallback::Fallbacks;
use crate::metrics;
use crate::tenants::{Copies, copies};

/// Of the ttl: renewals are so far apart, and at its end the application has so long to stop, before
/// others get the copies.
const PART_OF_TTL: u32 = 3;

/// The longest time between two renewals of a hold that no node has recorded.
const LONGEST_UNRECORDED: Duration = Duration::from_secs(5);

/// Of the ttl: the time for an answer, so that there is time for several attempts; or that of the
/// client's other requests, if that is longer, and at most twice as much of the ttl.
const ANSWER_PART_OF_TTL: u32 = 12;

/// The bounds of that.
const ANSWER_TIMES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];

/// Of the ttl: the pause after an attempt without an answer.
const PAUSE_PART_OF_TTL: u32 = 24;

/// The longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Renewals that are due so soon, or at another attempt, are made in the same call.
const TOGETHER: Duration = Duration::from_millis(500);

/// The most sessions in one call.
const MOST_RENEWED: usize = 100;

/// The most calls for single sessions at a time.
const MOST_CALLS: usize = 32;

/// The pauses before a session that was not ended is ended again.
const END_PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// How long sessions are ended once the client is closed.
const LONGEST_END: Duration = Duration::from_secs(60);

pub(super) type Events = mpsc::UnboundedSender<Event>;

/// What the application does. After each `Begin` comes one `Keep` or `GiveUp`.
pub(super) enum Event {
    /// It asks for copies.
    Begin,
    /// There is a session to keep, or to end.
    Keep(Kept),
    /// It gets no copies.
    GiveUp,
    /// It does not use the copies any more, and may want to be told when a node knows that.
    End(Arc<Session>, Option<oneshot::Sender<()>>),
    /// It has closed the client, and wants to be told when all sessions are ended.
    Close(oneshot::Sender<()>),
}

/// A session that is kept.
pub(super) struct Kept {
    session: Arc<Session>,
    phase: Phase,
    /// Until when a node may keep the session; `None` if no node can know it.
    may_live_until: Option<Instant>,
    /// When something is to be done.
    due: Option<Instant>,
    /// Whether a call is under way, or waits for others.
    is_called: bool,
    /// Whether a call for it and others was refused, so that it has calls of its own.
    is_alone: bool,
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
    /// The session is to be ended, and again after such a pause.
    Ending { pause: Duration },
}

impl Kept {
    /// A hold that was granted with a request that was sent then, or by the fallback.
    pub(super) fn held(
        session: Arc<Session>,
        granted_at: Option<Instant>,
        may_live_until: Option<Instant>,
    ) -> Self {
        let status = session.status();
        let is_recorded = is_recorded(status.decided_by, status.shadow);
        let until = granted_at.map(|at| at + session.ttl);
        let mut kept = Self::new(session, Phase::Held { is_recorded, until }, may_live_until);
        kept.due = Some(granted_at.unwrap_or_else(Instant::now) + kept.interval());
        kept
    }

    /// A session without a hold, which a node may keep until then.
    pub(super) fn to_end(session: Arc<Session>, may_live_until: Instant) -> Self {
        let mut kept = Self::new(session, Phase::ENDING, Some(may_live_until));
        kept.due = Some(Instant::now());
        kept
    }

    fn new(session: Arc<Session>, phase: Phase, may_live_until: Option<Instant>) -> Self {
        let (due, is_called, is_alone, told) = (None, false, false, Vec::new());
        Self { session, phase, may_live_until, due, is_called, is_alone, told }
    }

    fn interval(&self) -> Duration {
        let part = self.session.ttl / PART_OF_TTL;
        match self.phase {
            Phase::Held { is_recorded: false, .. } => (part / 2).min(LONGEST_UNRECORDED),
            _ => part,
        }
    }

    /// The pause after an attempt without an answer.
    fn pause(&self) -> Duration {
        (self.session.ttl / PAUSE_PART_OF_TTL).min(LONGEST_PAUSE)
    }

    /// The time for an answer, where the client's other requests have so long.
    fn patience(&self, deadline: Duration) -> Duration {
        let [least, most] = ANSWER_TIMES;
        let part = self.session.ttl / ANSWER_PART_OF_TTL;
        deadline.clamp(part, 2 * part).clamp(least, most)
    }

    /// When the copies are lost without another answer.
    fn end(&self) -> Option<Instant> {
        let Phase::Held { until, .. } = self.phase else { return None };
        until.map(|until| until - self.session.ttl / PART_OF_TTL)
    }

    fn is_held(&self) -> bool {
        matches!(self.phase, Phase::Held { .. })
    }
}

impl Phase {
    const ENDING: Self = Self::Ending { pause: END_PAUSES[0] };
}

impl Drop for Kept {
    /// Also when the runtime has ended.
    fn drop(&mut self) {
        self.session.end();
    }
}

/// What came of a call.
enum Answer {
    Renewed {
        ids: Vec<u64>,
        is_single: bool,
        sent: Instant,
        result: Result<KeepAliveResponse, Error>,
    },
    Reserved {
        id: u64,
        sent: Instant,
        result: Result<Result<Copies, Refusal>, Error>,
    },
    Ended {
        id: u64,
        is_ended: bool,
    },
}

pub(super) struct Keeper {
    backend: Arc<Backend>,
    fallbacks: Fallbacks,
    deadline: Duration,
    events: mpsc::UnboundedReceiver<Event>,
    /// Nobody can send an event any more.
    is_alone: bool,
    /// Those who wait for the end of all sessions, once the client is closed.
    closing: Option<Vec<oneshot::Sender<()>>>,
    /// Requests for copies that are under way.
    attempts: usize,
    kept: HashMap<u64, Kept>,
    /// When something is to be done about a hold.
    due: BTreeSet<(Instant, u64)>,
    /// Those that wait for a call of their own, and what for.
    waiting: VecDeque<(u64, Call)>,
    calls: FuturesUnordered<BoxFuture<'static, Answer>>,
    /// Calls for single sessions that are under way.
    single_calls: usize,
    log: LogThrottle,
}

/// A call for a single session.
#[derive(Clone, Copy)]
enum Call {
    Renew,
    Reserve,
    End,
}

impl Keeper {
    pub(super) fn new(
        backend: Arc<Backend>,
        fallbacks: Fallbacks,
        deadline: Duration,
        events: mpsc::UnboundedReceiver<Event>,
    ) -> Self {
        Self {
            backend,
            fallbacks,
            deadline,
            events,
            is_alone: false,
            closing: None,
            attempts: 0,
            kept: HashMap::new(),
            due: BTreeSet::new(),
            waiting: VecDeque::new(),
            calls: FuturesUnordered::new(),
            single_calls: 0,
            log: LogThrottle::default(),
        }
    }

    /// Runs until the client is closed or dropped, and no session is left.
    pub(super) async fn run(mut self) {
        loop {
            self.do_what_is_due(Instant::now());
            self.call_waiting();
            let is_over = self.is_alone || self.closing.is_some();
            if is_over && self.kept.is_empty() && self.attempts == 0 {
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
            Event::Begin => self.attempts += 1,
            Event::GiveUp => self.attempts -= 1,
            Event::Keep(kept) => {
                self.attempts -= 1;
                let (id, due) = (kept.session.id, kept.due);
                self.kept.insert(id, kept);
                self.plan(id, due);
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

    /// Something is to be done about a session then, and in any case at the end of a hold's time.
    fn plan(&mut self, id: u64, at: Option<Instant>) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        let end = kept.end();
        let at = at.map(|at| end.map_or(at, |end| end.min(at))).or(end);
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
        let is_closing = self.closing.is_some();
        let Some(kept) = self.kept.get_mut(&id) else { return };
        kept.told.extend(told);
        if is_closing {
            kept.may_live_until = kept.may_live_until.map(|until| until.min(now + LONGEST_END));
        }
        if matches!(kept.phase, Phase::Ending { .. }) {
            return;
        }
        kept.phase = Phase::ENDING;
        kept.session.end();
        if kept.may_live_until.is_none() && !kept.is_called {
            self.forget(id);
        } else {
            let due = (!kept.is_called).then_some(now);
            self.plan(id, due);
        }
    }

    /// Begins the calls that are due.
    fn do_what_is_due(&mut self, now: Instant) {
        let mut renewed: HashMap<Duration, Vec<u64>> = HashMap::new();
        while let Some((at, id)) = self.due.first().copied() {
            let Some(kept) = self.kept.get(&id) else {
                self.due.remove(&(at, id));
                continue;
            };
            // Those that are renewed go along with others that are due.
            let goes_along = !renewed.is_empty() && kept.is_held() && !kept.is_called;
            if at > now && !(goes_along && at <= now + TOGETHER.min(kept.pause())) {
                break;
            }
            match kept.phase {
                Phase::Held { .. } if kept.end().is_some_and(|end| end <= now) => {
                    self.time_is_over(id, now);
                }
                Phase::Held { .. } if kept.is_alone => self.wait_for_call(id, Call::Renew),
                Phase::Held { .. } => {
                    // Those that wait as long for an answer go together.
                    renewed.entry(kept.patience(self.deadline)).or_default().push(id);
                    self.is_called(id);
                }
                Phase::Lost => self.plan(id, None),
                Phase::Ending { .. } if kept.may_live_until.is_none_or(|until| until <= now) => {
                    self.forget(id);
                }
                Phase::Ending { .. } => self.wait_for_call(id, Call::End),
            }
        }
        for (patience, ids) in renewed {
            for ids in ids.chunks(MOST_RENEWED) {
                self.renew(ids.to_vec(), patience, false);
            }
        }
    }

    /// A call is under way: the next thing to do is at the end of the hold's time.
    fn is_called(&mut self, id: u64) {
        if let Some(kept) = self.kept.get_mut(&id) {
            kept.is_called = true;
            self.plan(id, None);
        }
    }

    fn wait_for_call(&mut self, id: u64, call: Call) {
        self.is_called(id);
        self.enqueue(id, call);
    }

    /// Holds that are in use come before those that end.
    fn enqueue(&mut self, id: u64, call: Call) {
        match call {
            Call::End => self.waiting.push_back((id, call)),
            Call::Renew | Call::Reserve => self.waiting.push_front((id, call)),
        }
    }

    /// No node has answered in time: the fallback decides.
    fn time_is_over(&mut self, id: u64, now: Instant) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        let (session, copies) = (&kept.session, kept.session.status().copies);
        let fallback = self.fallbacks.of_resource(&session.resource);
        if fallback.is_some_and(|fallback| fallback.decide(copies, now).is_granted()) {
            if let Some(held_back) = self.log.pass() {
                let resource = &session.resource;
                tracing::warn!(resource, held_back, "the fallback lets a hold go on");
            }
            session.goes_on(DecidedBy::Fallback);
            kept.phase = Phase::Held { is_recorded: false, until: None };
            let next = (!kept.is_called).then(|| now + kept.pause());
            self.plan(id, next);
        } else {
            self.lose(id, "no node has renewed it in time");
        }
    }

    fn lose(&mut self, id: u64, reason: &str) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        kept.phase = Phase::Lost;
        if kept.session.end() {
            metrics::hold_lost();
            if let Some(held_back) = self.log.pass() {
                let Session { resource, domain, .. } = &*kept.session;
                tracing::warn!(resource, domain, reason, held_back, "a hold is lost");
            }
        }
        self.plan(id, None);
    }

    /// Renews holds in one call.
    fn renew(&mut self, ids: Vec<u64>, patience: Duration, is_single: bool) {
        let kept = ids.iter().filter_map(|id| self.kept.get(id));
        let sessions = kept.map(|kept| kept.session.renewal()).collect();
        let (backend, sent) = (Arc::clone(&self.backend), Instant::now());
        let deadline = sent + patience;
        for id in &ids {
            self.may_live(*id, deadline);
        }
        self.calls.push(Box::pin(async move {
            let request = KeepAliveRequest { sessions };
            let result = backend.keep_alive(&request, deadline).await;
            Answer::Renewed { ids, is_single, sent, result }
        }));
    }

    /// Makes the calls for single sessions, not too many at a time.
    fn call_waiting(&mut self) {
        while self.single_calls < MOST_CALLS
            && let Some((id, call)) = self.waiting.pop_front()
        {
            let Some(kept) = self.kept.get_mut(&id) else { continue };
            let call = match kept.phase {
                Phase::Held { .. } => call,
                // The application has let go meanwhile.
                Phase::Ending { .. } => Call::End,
                Phase::Lost => {
                    kept.is_called = false;
                    continue;
                }
            };
            self.single_calls += 1;
            let (backend, sent) = (Arc::clone(&self.backend), Instant::now());
            let patience = kept.patience(self.deadline);
            let deadline = sent + patience;
            match call {
                Call::Renew => self.renew(vec![id], patience, true),
                Call::End => {
                    let request = kept.session.end_message();
                    self.calls.push(Box::pin(async move {
                        let ended = backend.end_session(&request, deadline).await;
                        // What is refused will be so the next time.
                        let is_refused = ended.as_ref().is_err_and(is_refused);
                        Answer::Ended { id, is_ended: is_refused || ended.unwrap_or(false) }
                    }));
                }
                Call::Reserve => {
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
            Answer::Renewed { ids, is_single, sent, result } => {
                self.single_calls -= usize::from(is_single);
                self.take_renewals(ids, sent, result, now);
            }
            Answer::Reserved { id, sent, result } => {
                self.single_calls -= 1;
                self.reserved(id, sent, result, now);
            }
            Answer::Ended { id, is_ended: true } => {
                self.single_calls -= 1;
                self.forget(id);
            }
            Answer::Ended { id, is_ended: false } => {
                self.single_calls -= 1;
                let Some(kept) = self.kept.get_mut(&id) else { return };
                kept.is_called = false;
                let Phase::Ending { pause } = &mut kept.phase else { return };
                let next = now + pause.mul_f64(rand::random_range(0.75..1.25));
                *pause = (*pause * 2).min(END_PAUSES[1]);
                self.plan(id, Some(next));
            }
        }
    }

    fn take_renewals(
        &mut self,
        ids: Vec<u64>,
        sent: Instant,
        result: Result<KeepAliveResponse, Error>,
        now: Instant,
    ) {
        match result {
            Ok(response) => {
                let mut sessions = response.sessions.iter();
                for id in ids {
                    self.renewed(id, sent, sessions.next(), response.degraded, now);
                }
            }
            // One of them may be the reason.
            Err(error) if is_refused(&error) && ids.len() > 1 => {
                for id in ids {
                    let Some(kept) = self.kept.get_mut(&id) else { continue };
                    kept.is_alone = true;
                    self.enqueue(id, Call::Renew);
                }
            }
            Err(_) => ids.into_iter().for_each(|id| self.not_answered(id, now)),
        }
    }

    fn renewed(
        &mut self,
        id: u64,
        sent: Instant,
        session: Option<&RenewedSession>,
        is_degraded: bool,
        now: Instant,
    ) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        let Some(session) = session.filter(|session| session.session == kept.session.name) else {
            return self.not_answered(id, now);
        };
        kept.is_alone = false;
        let has_hold = session.holds.iter().any(|hold| hold.hold == kept.session.hold);
        let Phase::Held { is_recorded, until } = kept.phase else {
            return self.not_answered(id, now);
        };
        if session.alive && has_hold {
            self.goes_on(id, sent, (DecidedBy::Node, false));
        } else if session.alive && is_degraded {
            // Its store is away, and no hold ends for that.
            match until {
                Some(_) => self.goes_on(id, sent, (DecidedBy::DegradedNode, false)),
                None => self.stays(id, now),
            }
        } else if is_recorded {
            self.lose(id, "its session was ended, or its store has lost it");
            self.called(id);
        } else {
            self.enqueue(id, Call::Reserve);
        }
    }

    fn reserved(
        &mut self,
        id: u64,
        sent: Instant,
        result: Result<Result<Copies, Refusal>, Error>,
        now: Instant,
    ) {
        let is_held = self.kept.get(&id).is_some_and(Kept::is_held);
        match result {
            Ok(Ok(copies)) if is_held => self.goes_on(id, sent, (copies.decided_by, copies.shadow)),
            Ok(Err(refusal)) if is_held && refusal.decided_by == DecidedBy::Node => {
                self.lose(id, "there is no room for it");
                self.called(id);
            }
            Ok(_) => self.stays(id, now),
            Err(error) if is_refused(&error) => self.stays(id, now),
            Err(_) => self.not_answered(id, now),
        }
    }

    /// No call is under way any more.
    fn called(&mut self, id: u64) {
        if let Some(kept) = self.kept.get_mut(&id) {
            kept.is_called = false;
        }
    }

    /// A node has answered, and nothing changes.
    fn stays(&mut self, id: u64, now: Instant) {
        self.not_answered(id, now);
        let held = self.kept.get(&id).filter(|kept| kept.is_held());
        if let Some(next) = held.map(|kept| now + kept.interval()) {
            self.plan(id, Some(next));
        }
    }

    /// Nothing is known of a session that was not known before.
    fn not_answered(&mut self, id: u64, now: Instant) {
        self.called(id);
        let Some(kept) = self.kept.get(&id) else { return };
        let next = match kept.phase {
            Phase::Held { .. } => now + kept.pause(),
            Phase::Lost => return,
            Phase::Ending { .. } => now,
        };
        self.plan(id, Some(next));
    }

    /// A node lets a hold go on, with a call sent then.
    fn goes_on(&mut self, id: u64, sent: Instant, (decided_by, shadow): (DecidedBy, bool)) {
        self.called(id);
        let Some(kept) = self.kept.get_mut(&id) else { return };
        kept.session.goes_on(decided_by);
        let until = Some(sent + kept.session.ttl);
        let is_recorded = is_recorded(decided_by, shadow);
        kept.phase = Phase::Held { is_recorded, until };
        let next = sent + kept.interval();
        self.plan(id, Some(next));
    }
}

/// Whether a node has recorded a hold. In shadow, it may not have.
fn is_recorded(decided_by: DecidedBy, shadow: bool) -> bool {
    decided_by == DecidedBy::Node && !shadow
}

/// Whether the request is wrong, or not allowed; it will be the next time.
fn is_refused(error: &Error) -> bool {
    use NoAnswer::{Forbidden, NotConfigured};
    matches!(error, Error::Invalid(_) | Error::NoDecision(Forbidden(_) | NotConfigured(_)))
}
