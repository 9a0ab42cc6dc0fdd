//! Many decisions on buckets as one call of `lua/allow.lua`, which describes the arguments and the
//! reply.

use std::ops::Range;

use redis::{Cmd, Value};

use super::script::Scripted;
use crate::domain::algorithm::Retry;
use crate::domain::bucket::{BucketKind, MAX_SPAN_US};
use crate::domain::time::Micros;
use crate::domain::window::{MAX_LENGTH_US, Window, WindowKind};
use crate::store::redis::owner::Owner;
use crate::store::{BucketRequest, MAX_REQUESTS_PER_CALL, Outcome, Verdict};

/// Bits of a term's flags.
const REWRITE: u32 = 1;
const ENROLL: u32 = 2;
const WINDOW: u32 = 4;
const SLIDING: u32 = 8;
const LOG: u32 = 16;
const BAN: u32 = 32;

/// Bytes of the reply for each run: a byte and a double.
const RUN_BYTES: usize = 9;

/// Values of the byte.
const FULL: u8 = 127;
const NO_PLACE: u8 = 254;
const UNREADABLE: u8 = 255;

/// The longest time after which a window may grant what it has refused: two of the longest windows (of a ban, the
/// longest window and as long again), and an hour by which the clock may have stepped back.
const LONGEST_RETRY_US: f64 = 2.0 * MAX_LENGTH_US as f64 + 3.6e9;

/// The most decisions in a batch: a byte of the reply can count that many grants of a run. A larger
/// batch would make a decision no cheaper, and whoever comes while it is in flight waits for all of
/// it.
pub(crate) const BATCH: usize = 126;

/// A queue always has room for a batch: see `pace`.
const _: () = assert!(MAX_REQUESTS_PER_CALL <= BATCH);

/// The terms of a request as the script takes them, up to `flags`.
type Limits = [f64; 7];

/// What a bucket without a state needs before it may get one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Registration {
    /// Nothing: its namespace does not bound its dynamic buckets.
    NotNeeded,
    /// A place among `bound` in the register at `key`, which is on the same server. `enroll`: a bucket
    /// that has a state needs one, too.
    Here { key: Vec<u8>, bound: u64, enroll: bool },
    /// A place, which this call can't give: the register is on another server, or was full lately.
    Missing,
    /// It has its place already, and must be decided until this time on the server's clock.
    Until(Micros),
}

/// One request to a bucket, with everything that the script needs to know about it.
pub(crate) struct EncodedRequest {
    /// The key of the bucket's state.
    pub(crate) key: Vec<u8>,
    /// Whom it is counted for while it waits.
    pub(crate) owner: Owner,
    /// The time to decide at; `None`: the server's own.
    pub(crate) now: Option<Micros>,
    registration: Registration,
    limits: Limits,
    cost_us: f64,
    max_wait_us: f64,
    is_window: bool,
    /// Whether its tokens count even if they are refused: a log counts none of these.
    counts_refused: bool,
    dynamic: bool,
}

impl EncodedRequest {
    /// `key`: of the state of the bucket.
    pub(crate) fn new(
        request: &BucketRequest<'_>,
        key: Vec<u8>,
        registration: Registration,
        owner: Owner,
        now: Option<Micros>,
    ) -> Self {
        let (terms, charge) = (request.terms, request.charge());
        let rewrite = if request.rewrites() { REWRITE } else { 0 };
        let enroll = match registration {
            Registration::Here { enroll: true, .. } => ENROLL,
            _ => 0,
        };
        let (window, [mark, grid_us, life_us]) = match terms.window {
            None => (0, [terms.mark.bits().into(), terms.grid_us, terms.life_us]),
            Some(Window { kind: WindowKind::Ban { lasting_us, .. }, length_us }) => {
                (WINDOW | BAN, [lasting_us as f64, terms.life_us, length_us as f64])
            }
            Some(window) => {
                let kind = match window.kind {
                    WindowKind::Sliding => SLIDING,
                    WindowKind::Log => LOG,
                    WindowKind::Fixed | WindowKind::Ban { .. } => 0,
                };
                (WINDOW | kind, [0.0, terms.life_us, terms.cap_us])
            }
        };
        Self {
            key,
            owner,
            now,
            registration,
            limits: [
                terms.cap_us,
                terms.max_debt_us,
                mark,
                request.idle_us().map_or(-1.0, |idle_us| idle_us as f64),
                grid_us,
                life_us,
                f64::from(rewrite | enroll | window),
            ],
            is_window: terms.window.is_some(),
            counts_refused: charge.counts_refused() && window & LOG == 0,
            cost_us: charge.cost_us,
            max_wait_us: charge.max_wait_us,
            dynamic: matches!(request.kind, BucketKind::Dynamic { .. }),
        }
    }

    fn register(&self) -> Option<&[u8]> {
        match &self.registration {
            Registration::Here { key, .. } => Some(key),
            _ => None,
        }
    }

    fn has_equal_terms(&self, other: &Self) -> bool {
        self.limits == other.limits && self.registration == other.registration
    }

    /// Whether both ask for the same, if they are about one bucket.
    fn equals(&self, other: &Self) -> bool {
        self.has_equal_cost(other) && self.has_equal_terms(other)
    }

    fn has_equal_cost(&self, other: &Self) -> bool {
        self.cost_us == other.cost_us && self.max_wait_us == other.max_wait_us
    }
}

impl AsRef<Self> for EncodedRequest {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// Which keys of a call are declared to the server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Declared {
    /// All keys: there is one server, or there is one key.
    All,
    /// None: the keys may be in several slots.
    None,
}

/// Equal requests to one bucket.
struct Run {
    /// Where the indexes of its requests are in the order of the batch.
    requests: Range<usize>,
    /// Index into the terms of the call.
    terms: u16,
    /// Whether the reply has two entries for it.
    is_window: bool,
    /// The number of its group, which are the runs with equal terms and costs; `None` if another run
    /// has the same key, and it is written on its own.
    group: Option<usize>,
}

/// A call, and how to read its reply.
pub(crate) struct Batch {
    pub(crate) cmd: Cmd,
    /// Indexes of the requests: those of one bucket together, and within it the equal ones.
    order: Vec<usize>,
    /// In the order of the reply.
    runs: Vec<Run>,
    /// By index of terms: the index of their register among those of the call.
    registers: Vec<Option<usize>>,
    register_count: usize,
}

impl Batch {
    /// A call for at least one request, all to be decided at the same time. Those about one bucket
    /// keep their order, but equal ones are decided together with the first of them.
    pub(crate) fn new<Q: AsRef<EncodedRequest>>(requests: &[Q], declared: Declared) -> Self {
        let requests: Vec<&EncodedRequest> = requests.iter().map(AsRef::as_ref).collect();
        let requests = requests.as_slice();
        let order = order(requests);
        let (terms, mut runs) = runs(&order, requests);
        let first = |run: &Run| requests[order[run.requests.start]];
        group(&mut runs, first);

        let (registers, of_terms) = registers(&terms);
        let (keys, groups) = encode_groups(&runs, first);
        let all = keys.len() + registers.len();
        let (declared, undeclared) = match declared {
            Declared::All => (all, 0),
            Declared::None => (0, all),
        };

        let now = requests[0].now.map_or(0.0, |now| now.0 as f64);
        let mut numbers = Vec::with_capacity(24 + 72 * terms.len());
        write_doubles(&mut numbers, [now, keys.len() as f64, undeclared as f64]);
        for (request, register) in terms.iter().zip(&of_terms) {
            write_doubles(&mut numbers, request.limits);
            let register = register.map(|index| keys.len() + 1 + index);
            write_doubles(&mut numbers, encode_registration(&request.registration, register));
        }

        let mut cmd = Scripted::Allow.call(declared);
        let keys = keys.into_iter().chain(registers.iter().copied());
        for key in keys.clone().take(declared) {
            cmd.arg(key);
        }
        cmd.arg(numbers).arg(groups);
        for key in keys.take(undeclared) {
            cmd.arg(key);
        }
        let register_count = registers.len();
        Self { cmd, order, runs, registers: of_terms, register_count }
    }

    /// Reads a reply: the outcome of each request, or `None` for one whose key the server can't
    /// read. `None` if the script can't have made the reply.
    pub(crate) fn outcomes<Q: AsRef<EncodedRequest>>(
        &self,
        reply: &Value,
        requests: &[Q],
    ) -> Option<Vec<Option<Outcome>>> {
        let Value::BulkString(bytes) = reply else { return None };
        let windows = self.runs.iter().filter(|run| run.is_window).count();
        let entries = self.runs.len() + windows;
        let (of_runs, of_registers) = bytes.split_at_checked(entries * RUN_BYTES)?;
        let mut of_runs = of_runs.as_chunks::<RUN_BYTES>().0.iter();
        let (of_registers, []) = of_registers.as_chunks::<8>() else { return None };
        if of_registers.len() != self.register_count {
            return None;
        }
        let mut outcomes = vec![None; requests.len()];
        for run in &self.runs {
            let [byte, balance @ ..] = of_runs.next()?;
            let balance = f64::from_le_bytes(*balance);
            let retry = match run.is_window {
                true => Some(retry(of_runs.next()?)?),
                false => None,
            };
            if !balance.is_finite() {
                return None;
            }
            let live = self.registers[usize::from(run.terms)];
            let live = live.map(|register| f64::from_le_bytes(of_registers[register]));
            let live = live.filter(|live| *live >= 0.0).map(|live| live as u32);
            let indexes = &self.order[run.requests.clone()];
            for (nth, &index) in indexes.iter().enumerate() {
                let request = requests[index].as_ref();
                outcomes[index] = outcome(*byte, (balance, retry), live, nth, request);
            }
        }
        Some(outcomes)
    }
}

/// The second entry of a run of requests to a window.
fn retry([_, after_us @ ..]: &[u8; RUN_BYTES]) -> Option<Retry> {
    match f64::from_le_bytes(*after_us) {
        -1.0 => Some(Retry::NEVER),
        after_us if (0.0..=LONGEST_RETRY_US).contains(&after_us) => {
            Some(Retry::after_us(after_us as i64))
        }
        _ => None,
    }
}

/// The outcome of the `nth` request of a run, by the run's byte and double of the reply, and for a window its
/// second entry.
fn outcome(
    byte: u8,
    (met_us, retry): (f64, Option<Retry>),
    live: Option<u32>,
    nth: usize,
    request: &EncodedRequest,
) -> Option<Outcome> {
    let (granted, was_full) = match byte {
        UNREADABLE => return None,
        NO_PLACE => (0, false),
        _ => (usize::from(byte % FULL), byte >= FULL),
    };
    let refused = if byte == NO_PLACE { Verdict::TooManyBuckets } else { Verdict::Refused };
    let cap_us = request.limits[0];
    let counted = if request.counts_refused { nth } else { nth.min(granted) };
    let verdict = if nth < granted { Verdict::Granted } else { refused };
    Some(Outcome {
        verdict,
        retry: retry.filter(|_| verdict == Verdict::Refused),
        // Tokens put back into a full bucket are lost, and no longer debt can be stored.
        accrued_us: (met_us - counted as f64 * request.cost_us).min(cap_us).max(-MAX_SPAN_US),
        created: nth == 0 && request.dynamic && was_full,
        live,
    })
}

/// The indexes of the requests, ordered by key. Equal ones follow the first of them, so that they
/// make one run.
fn order(requests: &[&EncodedRequest]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by(|&a, &b| requests[a].key.cmp(&requests[b].key));
    for same_key in order.chunk_by_mut(|&a, &b| requests[a].key == requests[b].key) {
        // Nearly always there are no others, or all are equal.
        let equals = |a: &usize, b: &usize| requests[*a].equals(requests[*b]);
        if same_key.windows(2).filter(|pair| !equals(&pair[0], &pair[1])).count() < 2 {
            continue;
        }
        let firsts = same_key.to_vec();
        same_key.sort_by_cached_key(|at| firsts.iter().position(|first| equals(first, at)));
    }
    order
}

/// The runs of a batch, and a request with each of the terms that they use.
fn runs<'q>(
    order: &[usize],
    requests: &[&'q EncodedRequest],
) -> (Vec<&'q EncodedRequest>, Vec<Run>) {
    let mut terms: Vec<&EncodedRequest> = Vec::new();
    let mut runs: Vec<Run> = Vec::new();
    for (at, &index) in order.iter().enumerate() {
        let request = requests[index];
        if let Some(run) = runs.last_mut() {
            let last = requests[order[run.requests.start]];
            if last.key == request.key && last.equals(request) {
                run.requests.end += 1;
                continue;
            }
        }
        let known = terms.iter().rposition(|known| known.has_equal_terms(request));
        let known = known.unwrap_or_else(|| {
            terms.push(request);
            terms.len() - 1
        });
        let is_window = request.is_window;
        runs.push(Run { requests: at..at + 1, terms: known as u16, is_window, group: None });
    }
    (terms, runs)
}

/// Finds the group of each run, and orders the runs by group. Runs without one come last. `first`
/// is the first request of a run.
fn group<'q>(runs: &mut [Run], first: impl Fn(&Run) -> &'q EncodedRequest) {
    let mut groups: Vec<usize> = Vec::new();
    for at in 0..runs.len() {
        let request = first(&runs[at]);
        let has_key = |other: &Run| first(other).key == request.key;
        let shares_key = runs.get(at + 1).is_some_and(has_key)
            || at.checked_sub(1).is_some_and(|before| has_key(&runs[before]));
        if shares_key {
            continue;
        }
        let is_equal = |known: &usize| {
            runs[*known].terms == runs[at].terms && first(&runs[*known]).has_equal_cost(request)
        };
        let known = groups.iter().rposition(is_equal);
        runs[at].group = Some(known.unwrap_or_else(|| {
            groups.push(at);
            groups.len() - 1
        }));
    }
    runs.sort_by_key(|run| run.group.unwrap_or(usize::MAX));
}

/// The registers that some terms use, each once; and for each of the terms the index of its own.
fn registers<'q>(terms: &[&'q EncodedRequest]) -> (Vec<&'q [u8]>, Vec<Option<usize>>) {
    let mut registers: Vec<&[u8]> = Vec::new();
    let mut index = |key| {
        registers.iter().position(|known| *known == key).unwrap_or_else(|| {
            registers.push(key);
            registers.len() - 1
        })
    };
    let of_terms = terms.iter().map(|request| request.register().map(&mut index)).collect();
    (registers, of_terms)
}

/// The keys of the runs, each once, and the groups as the script reads them. `first` is the first
/// request of a run.
fn encode_groups<'q>(
    runs: &[Run],
    first: impl Fn(&Run) -> &'q EncodedRequest,
) -> (Vec<&'q [u8]>, Vec<u8>) {
    let mut keys: Vec<&[u8]> = Vec::with_capacity(runs.len());
    let mut groups = Vec::with_capacity(32 + 2 * runs.len());
    for group in runs.chunk_by(|a, b| a.group.is_some() && a.group == b.group) {
        let request = first(&group[0]);
        write_group(&mut groups, group, request);
        if group[0].group.is_some() {
            keys.extend(group.iter().map(|run| first(run).key.as_slice()));
        } else {
            // A single run, which says whose it is. Others with its key are next to it.
            if keys.last() != Some(&request.key.as_slice()) {
                keys.push(&request.key);
            }
            write_words(&mut groups, [keys.len() as u16, group[0].requests.len() as u16]);
        }
    }
    (keys, groups)
}

/// Writes a group as the script reads it, but for the key of a single run.
fn write_group(groups: &mut Vec<u8>, runs: &[Run], first: &EncodedRequest) {
    let size = if runs[0].group.is_some() { runs.len() as u16 } else { 0 };
    write_words(groups, [runs[0].terms + 1, size]);
    write_doubles(groups, [first.cost_us, first.max_wait_us]);
    if size > 0 {
        groups.extend(runs.iter().map(|run| run.requests.len() as u8));
    }
}

/// `register` and `bound` of the terms. `index`: of the register among the keys of the call.
fn encode_registration(registration: &Registration, index: Option<usize>) -> [f64; 2] {
    match registration {
        Registration::NotNeeded => [-1.0, f64::INFINITY],
        Registration::Here { bound, .. } => [index.unwrap_or(0) as f64, *bound as f64],
        Registration::Missing => [0.0, 0.0],
        Registration::Until(time) => [-1.0, time.0 as f64],
    }
}

fn write_words(bytes: &mut Vec<u8>, words: impl IntoIterator<Item = u16>) {
    words.into_iter().for_each(|word| bytes.extend(word.to_le_bytes()));
}

fn write_doubles(bytes: &mut Vec<u8>, doubles: impl IntoIterator<Item = f64>) {
    doubles.into_iter().for_each(|double| bytes.extend(double.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use testkit::Redis;

    use super::*;
    use crate::domain::bucket::BucketLimit;
    use crate::store::TokenAction;

    /// A bucket has got its place on the clock of another server, and is decided on this one's.
    #[test]
    fn a_place_is_usable_until_its_time() {
        let redis = Redis::start();
        let mut inside = redis.connection();
        let terms = BucketLimit::default().terms();
        let request = BucketRequest {
            caller: None,
            namespace: "ns",
            name: "new",
            kind: BucketKind::Dynamic { max_buckets: Some(1) },
            terms: &terms,
            max_idle_ms: None,
            tokens: 1,
            action: TokenAction::TakeAvailable,
            prefetch: None,
            rewrite: false.into(),
        };
        let until = Micros(1_700_000_000_000_000);
        let mut verdict = |now| {
            let (key, place) = (b"b{ns:new}".to_vec(), Registration::Until(until));
            let request = [EncodedRequest::new(&request, key, place, Owner::INTERNAL, Some(now))];
            let batch = Batch::new(&request, Declared::All);
            let reply = Scripted::Allow.with_text(&batch.cmd).query(&mut inside).expect("decided");
            let outcomes = batch.outcomes(&reply, &request).expect("a reply of the script");
            outcomes[0].expect("readable").verdict
        };
        assert_eq!(verdict(Micros(until.0 + 1)), Verdict::TooManyBuckets);
        assert_eq!(verdict(until), Verdict::Granted);
    }
}
