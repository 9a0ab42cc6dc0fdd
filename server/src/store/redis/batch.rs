//! Many questions to buckets as one call of `lua/allow.lua`, where the layout of the arguments
//! and of the reply is described.

use hashbrown::HashMap;
use redis::Cmd;

use super::keys::Keys;
use super::script::Scripted;
use crate::domain::bucket::Place;
use crate::domain::time::Micros;
use crate::store::{Ask, Outcome, Verdict};

const COUNTED: u32 = 1;
const CONFIGURED: u32 = 2;
const REWRITE: u32 = 4;

const CREATED: u16 = 1 << 14;
const TOO_MANY: u16 = 1 << 15;
const ELSEWHERE: u16 = u16::MAX;

/// Terms as the script takes them.
type Terms = [f64; 7];

/// One question, with all that the script needs of it.
pub(super) struct Question {
    pub(super) keys: Keys,
    /// The namespace's hash: who is to be treated fairly.
    pub(super) owner: u64,
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
    pub(super) fn new(ask: &Ask<'_>, owner: u64, now: Option<Micros>) -> Self {
        let (flags, bound) = match ask.place {
            Place::Dynamic { max_buckets: Some(bound) } => (COUNTED, bound),
            Place::Configured { bounded: true } => (CONFIGURED, 0),
            _ => (0, 0),
        };
        let rewrite = if ask.rewrites() { REWRITE } else { 0 };
        Self {
            keys: Keys::new(ask.place, ask.namespace, ask.name),
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
            ],
            cost_us: ask.terms.cost_us(ask.tokens),
            max_wait_us: ask.max_wait_ms as f64 * 1000.0,
            now,
            twin: None,
            dynamic: matches!(ask.place, Place::Dynamic { .. }),
            counted: flags == COUNTED,
        }
    }

    /// Whether this and `other` may be told as one run with a count.
    fn equals(&self, other: &Self) -> bool {
        self.cost_us == other.cost_us
            && self.max_wait_us == other.max_wait_us
            && self.name.is_none()
            && other.name.is_none()
            && self.twin.is_none()
            && other.twin.is_none()
    }
}

/// Equal questions to one bucket, by their positions.
struct Run {
    questions: std::ops::Range<usize>,
    terms: u16,
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
    /// keep their order, as do those to all buckets that a register counts. Unless keys are
    /// `declared`, they may be in several slots.
    pub(super) fn new(questions: &[&Question], declared: bool) -> Self {
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
                _ => runs.push(Run { questions: at..at + 1, terms: term }),
            }
        }

        let mut keys: Vec<&[u8]> = Vec::with_capacity(runs.len());
        let mut counted: HashMap<&[u8], u16> = HashMap::new();
        let mut registers: Vec<&[u8]> = Vec::new();
        let mut texts: Vec<&[u8]> = Vec::new();
        let mut told = Vec::with_capacity(28 * runs.len());
        for run in &runs {
            let asked = questions[order[run.questions.start]];
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
            let register = asked.keys.register.as_deref().map_or(usize::MAX, |register| {
                registers.iter().position(|known| *known == register).unwrap_or_else(|| {
                    registers.push(register);
                    registers.len() - 1
                })
            });
            let name = place(&mut texts, asked.name.as_deref().map(str::as_bytes));
            let twin = place(&mut texts, asked.twin.as_deref());
            let count = run.questions.len() as u16;
            // Registers come after all states: how many those are is known only at the end.
            let register = register as u16;
            for number in [key, register, name, twin, run.terms, count] {
                told.extend(number.to_le_bytes());
            }
            told.extend(asked.cost_us.to_le_bytes());
            told.extend(asked.max_wait_us.to_le_bytes());
        }
        for run in told.chunks_exact_mut(28) {
            let register = u16::from_le_bytes([run[2], run[3]]);
            // None is told as 0, and the first one follows the last state.
            let place = register.wrapping_add(1);
            let place = if place == 0 { 0 } else { place + keys.len() as u16 };
            run[2..4].copy_from_slice(&place.to_le_bytes());
        }

        let now = questions[order[0]].now.map_or(0.0, |now| now.0 as f64);
        let all = keys.len() + registers.len();
        let (declared, placed) = if declared { (all, 0) } else { (0, all) };
        let mut numbers = Vec::with_capacity(24 + 56 * terms.len());
        let header = [now, keys.len() as f64, placed as f64];
        for number in header.iter().chain(terms.into_iter().flatten()) {
            numbers.extend(number.to_le_bytes());
        }
        let mut cmd = Scripted::Allow.call(declared);
        let mut keys = keys.into_iter().chain(registers);
        for key in keys.by_ref().take(declared) {
            cmd.arg(key);
        }
        cmd.arg(numbers).arg(told);
        for text in texts.into_iter().chain(keys) {
            cmd.arg(text);
        }
        Self { cmd, order, runs }
    }

    /// How many questions are in it.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// The outcomes in a reply, with the position of the question that each is for; one of
    /// `None`: the server does not have that key. `None` for all: it is no reply of the script.
    pub(super) fn outcomes(
        &self,
        reply: &[u8],
        questions: &[&Question],
    ) -> Option<Vec<(usize, Option<Outcome>)>> {
        let mut outcomes = Vec::with_capacity(self.order.len());
        let mut rest = reply;
        for run in &self.runs {
            let asked = questions[self.order[run.questions.start]];
            let outcome = u16::from_le_bytes(*take(&mut rest)?);
            let met_us = f64::from_le_bytes(*take(&mut rest)?);
            let (mut removed, mut live) = (0, None);
            if asked.counted {
                removed = u32::from_le_bytes(*take(&mut rest)?);
                live = Some(u32::from_le_bytes(*take(&mut rest)?));
            }
            if outcome == ELSEWHERE {
                let all = &self.order[run.questions.clone()];
                outcomes.extend(all.iter().map(|&question| (question, None)));
                continue;
            }
            let granted = outcome & (CREATED - 1);
            for (at, &question) in self.order[run.questions.clone()].iter().enumerate() {
                let before = (at as u16).min(granted);
                let verdict = match outcome & TOO_MANY {
                    0 if (at as u16) < granted => Verdict::Granted,
                    0 => Verdict::Refused,
                    _ => Verdict::TooManyBuckets,
                };
                let outcome = Outcome {
                    verdict,
                    accrued_us: met_us - f64::from(before) * asked.cost_us,
                    created: at == 0 && asked.dynamic && outcome & CREATED != 0,
                    removed,
                    live,
                };
                outcomes.push((question, Some(outcome)));
            }
        }
        rest.is_empty().then_some(outcomes)
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

fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(first)
}
