//! Many questions to buckets as one call of `lua/allow.lua`, where the layout of the arguments
//! and of the reply is described.

use std::ops::Range;

use hashbrown::HashMap;
use redis::{Cmd, Value};

use super::keys::Keys;
use super::queue::Owner;
use super::script::Scripted;
use crate::domain::bucket::BucketKind;
use crate::domain::time::Micros;
use crate::store::{BucketRequest, MAX_REQUESTS_PER_CALL, Outcome, Verdict};

const COUNTED: u32 = 1;
const CONFIGURED: u32 = 2;
const REWRITE: u32 = 4;

const CREATED: u8 = 127;
const TOO_MANY: u8 = 254;
const ELSEWHERE: u8 = 255;

/// The most questions in a batch: more equal ones could not be told apart in an answer's byte.
pub(super) const MOST: usize = 126;

/// A queue always has room for a batch: see `pace`.
const _: () = assert!(MAX_REQUESTS_PER_CALL <= MOST);

/// Terms as the script takes them.
type Terms = [f64; 8];

/// One question, with all that the script needs of it.
pub(super) struct Question {
    pub(super) keys: Keys,
    /// Whom it is counted for while it waits.
    pub(super) owner: Owner,
    /// For the register.
    name: Option<Box<str>>,
    terms: Terms,
    cost_us: f64,
    max_wait_us: f64,
    /// The time to decide at; `None`: Redis' own.
    pub(super) now: Option<Micros>,
    /// The state found under the namespace's other layout.
    pub(super) twin: Option<Vec<u8>>,
    dynamic: bool,
    counted: bool,
}

impl Question {
    pub(super) fn new(ask: &BucketRequest<'_>, owner: Owner, now: Option<Micros>) -> Self {
        let (flags, bound) = match ask.kind {
            BucketKind::Dynamic { max_buckets: Some(bound) } => (COUNTED, bound),
            BucketKind::Configured { bounded: true } => (CONFIGURED, 0),
            _ => (0, 0),
        };
        let rewrite = if ask.rewrites() { REWRITE } else { 0 };
        let charge = ask.charge();
        Self {
            keys: Keys::new(ask.kind, ask.namespace, ask.name),
            owner,
            name: (flags != 0).then(|| ask.name.into()),
            terms: [
                ask.terms.cap_us,
                ask.terms.max_debt_us,
                f64::from(ask.terms.mark.bits()),
                ask.idle_us().map_or(-1.0, |idle_us| idle_us as f64),
                bound as f64,
                ask.terms.grid_us,
                f64::from(flags | rewrite),
                ask.terms.life_us,
            ],
            cost_us: charge.cost_us,
            max_wait_us: charge.max_wait_us,
            now,
            twin: None,
            dynamic: matches!(ask.kind, BucketKind::Dynamic { .. }),
            counted: flags == COUNTED,
        }
    }

    fn costs(&self, other: &Self) -> bool {
        self.cost_us == other.cost_us && self.max_wait_us == other.max_wait_us
    }

    /// Whether this and `other` may be told as one run with a count.
    fn equals(&self, other: &Self) -> bool {
        self.costs(other)
            && self.name.is_none()
            && other.name.is_none()
            && self.twin.is_none()
            && other.twin.is_none()
    }
}

/// Equal questions to one bucket, by their positions.
struct Run {
    questions: Range<usize>,
    terms: u16,
    /// Which of the groups of equal limits and costs; [`SINGLE`]: none.
    group: u16,
}

/// Which keys of a call the server is told beforehand.
#[derive(Clone, Copy, Debug)]
pub(super) enum Declared {
    /// Every one: all there are, or all in one slot.
    All,
    /// One of several in a slot that goes to this server, of which some may not be there: told
    /// of all, it refuses.
    First,
    /// None: they may be in several slots.
    None,
}

/// A run that needs more words: of a bucket that a register counts, that has a twin, or that
/// is asked in several manners.
const SINGLE: u16 = u16::MAX;

/// What the reply to a [`Batch`] says.
pub(super) struct Outcomes {
    /// With the position of the question that each is for. `None`: the server does not have that
    /// key.
    pub(super) each: Vec<(usize, Option<Outcome>)>,
    /// How many values were replaced that no node can have written.
    pub(super) corrupt: u64,
}

/// A call, and how to read its reply.
pub(super) struct Batch {
    pub(super) cmd: Cmd,
    /// Positions of questions, those of one bucket together.
    order: Vec<usize>,
    /// Into `order`.
    runs: Vec<Run>,
}

impl Batch {
    /// Of questions that are to be decided at the same time, at least one. Those to one bucket
    /// keep their order, as do those to all buckets that a register counts.
    pub(super) fn new(questions: &[&Question], declared: Declared) -> Self {
        let mut order: Vec<usize> = (0..questions.len()).collect();
        order.sort_by(|&a, &b| {
            let place = |at: usize| {
                let Keys { state, register } = &questions[at].keys;
                (register.is_some(), register.is_none().then_some(state))
            };
            place(a).cmp(&place(b))
        });

        let mut terms: Vec<&Terms> = Vec::new();
        let mut runs: Vec<Run> = Vec::new();
        for (at, &question) in order.iter().enumerate() {
            let asked = questions[question];
            let known = terms.iter().rposition(|known| **known == asked.terms);
            let term = known.unwrap_or_else(|| {
                terms.push(&asked.terms);
                terms.len() - 1
            });
            let term = term as u16 + 1;
            match runs.last_mut() {
                Some(run) if run.terms == term && same_run(questions, &order, run, asked) => {
                    run.questions.end += 1;
                }
                _ => runs.push(Run { questions: at..at + 1, terms: term, group: SINGLE }),
            }
        }

        let first = |run: &Run| questions[order[run.questions.start]];
        let mut groups: Vec<(u16, &Question)> = Vec::new();
        for at in 0..runs.len() {
            let asked = first(&runs[at]);
            let same_key = |other: &Run| first(other).keys.state == asked.keys.state;
            let alone = !runs.get(at + 1).is_some_and(same_key)
                && !at.checked_sub(1).is_some_and(|before| same_key(&runs[before]));
            if alone && asked.name.is_none() && asked.twin.is_none() {
                let terms = runs[at].terms;
                let equal = |(of, known): &(u16, &Question)| *of == terms && known.costs(asked);
                let known = groups.iter().rposition(equal);
                runs[at].group = known.unwrap_or_else(|| {
                    groups.push((terms, asked));
                    groups.len() - 1
                }) as u16;
            }
        }
        runs.sort_by_key(|run| run.group);

        let mut keys: Vec<&[u8]> = Vec::with_capacity(runs.len());
        let mut counted: HashMap<&[u8], u16> = HashMap::new();
        let mut registers: Vec<&[u8]> = Vec::new();
        let mut texts: Vec<&[u8]> = Vec::new();
        let mut told = Vec::with_capacity(64 + 2 * runs.len());
        // Registers come after all states: how many those are is known only at the end.
        let mut later: Vec<(usize, u16)> = Vec::new();
        for group in runs.chunk_by(|a, b| a.group == b.group && a.group != SINGLE) {
            let (run, asked) = (&group[0], first(&group[0]));
            let size = if run.group == SINGLE { 0 } else { group.len() as u16 };
            for number in [run.terms, size] {
                told.extend(number.to_le_bytes());
            }
            for number in [asked.cost_us, asked.max_wait_us] {
                told.extend(number.to_le_bytes());
            }
            if run.group != SINGLE {
                keys.extend(group.iter().map(|run| first(run).keys.state.as_slice()));
                told.extend(group.iter().map(|run| run.questions.len() as u8));
                continue;
            }
            let state = asked.keys.state.as_slice();
            let key = if asked.keys.register.is_some() {
                *counted.entry(state).or_insert_with(|| {
                    keys.push(state);
                    keys.len() as u16
                })
            } else {
                if keys.last() != Some(&state) {
                    keys.push(state);
                }
                keys.len() as u16
            };
            if let Some(register) = asked.keys.register.as_deref() {
                let known = registers.iter().position(|known| *known == register);
                let register = known.unwrap_or_else(|| {
                    registers.push(register);
                    registers.len() - 1
                });
                later.push((told.len() + 2, register as u16 + 1));
            }
            let name = place(&mut texts, asked.name.as_deref().map(str::as_bytes));
            let twin = place(&mut texts, asked.twin.as_deref());
            for number in [key, 0, name, twin, run.questions.len() as u16] {
                told.extend(number.to_le_bytes());
            }
        }
        for (at, register) in later {
            let place = keys.len() as u16 + register;
            told[at..at + 2].copy_from_slice(&place.to_le_bytes());
        }

        let now = questions[order[0]].now.map_or(0.0, |now| now.0 as f64);
        let all = keys.len() + registers.len();
        let (declared, placed) = match declared {
            Declared::All => (all, 0),
            Declared::First => (1, all),
            Declared::None => (0, all),
        };
        let mut numbers = Vec::with_capacity(24 + 64 * terms.len());
        let header = [now, keys.len() as f64, placed as f64];
        for number in header.iter().chain(terms.into_iter().flatten()) {
            numbers.extend(number.to_le_bytes());
        }
        let mut cmd = Scripted::Allow.call(declared);
        let keys = keys.into_iter().chain(registers);
        for key in keys.clone().take(declared) {
            cmd.arg(key);
        }
        cmd.arg(numbers).arg(told);
        for text in texts.into_iter().chain(keys.take(placed)) {
            cmd.arg(text);
        }
        Self { cmd, order, runs }
    }

    /// How many questions are in it.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// What a reply says; `None`: it is no reply of the script.
    pub(super) fn outcomes(&self, reply: &Value, questions: &[&Question]) -> Option<Outcomes> {
        let Value::Array(parts) = reply else { return None };
        let (bytes, told, corrupt) = match parts.as_slice() {
            [Value::BulkString(bytes), Value::BulkString(told)] => (bytes, told, 0),
            [Value::BulkString(bytes), Value::BulkString(told), Value::Int(corrupt)] => {
                (bytes, told, u64::try_from(*corrupt).ok()?)
            }
            _ => return None,
        };
        let mut told = told.chunks_exact(8).map(|double| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(double);
            f64::from_le_bytes(bytes)
        });
        if bytes.len() != self.runs.len() {
            return None;
        }
        let mut outcomes = Vec::with_capacity(self.order.len());
        for (run, &outcome) in self.runs.iter().zip(bytes) {
            let asked = questions[self.order[run.questions.start]];
            let met_us = told.next().filter(|met_us| met_us.is_finite())?;
            let (mut removed, mut live) = (0, None);
            if asked.counted {
                removed = told.next()? as u32;
                live = Some(told.next()? as u32);
            }
            let all = &self.order[run.questions.clone()];
            if outcome == ELSEWHERE {
                outcomes.extend(all.iter().map(|&question| (question, None)));
                continue;
            }
            let refused =
                if outcome == TOO_MANY { Verdict::TooManyBuckets } else { Verdict::Refused };
            let created = outcome != TOO_MANY && outcome >= CREATED;
            let granted = match outcome {
                TOO_MANY => 0,
                _ => usize::from(outcome % CREATED),
            };
            for (at, &question) in all.iter().enumerate() {
                let outcome = Outcome {
                    verdict: if at < granted { Verdict::Granted } else { refused },
                    // What is given back beyond what makes it full is lost.
                    accrued_us: (met_us - at.min(granted) as f64 * asked.cost_us)
                        .min(asked.terms[0]),
                    created: at == 0 && asked.dynamic && created,
                    removed,
                    live,
                };
                outcomes.push((question, Some(outcome)));
            }
        }
        told.next().is_none().then_some(Outcomes { each: outcomes, corrupt })
    }
}

/// Adds a text to the arguments, and tells which it is; 0: there is none.
fn place<'a>(texts: &mut Vec<&'a [u8]>, text: Option<&'a [u8]>) -> u16 {
    let Some(text) = text else { return 0 };
    texts.push(text);
    // The first two are the numbers and the runs.
    texts.len() as u16 + 2
}

fn same_run(questions: &[&Question], order: &[usize], run: &Run, asked: &Question) -> bool {
    let first = questions[order[run.questions.start]];
    first.keys.state == asked.keys.state && first.equals(asked)
}
