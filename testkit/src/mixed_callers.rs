//! Concurrent callers of several kinds: callers that honour waits, that cancel calls, that send
//! bursts. All grants are recorded, to be checked against the bounds.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::transport::Channel;

use super::grpc::{channel, request};

/// Connections per node.
const CONNECTIONS: usize = 4;

/// Upper limit of the delay before a call is cancelled, in ms (exclusive).
const MAX_CANCEL_DELAY_MS: usize = 12;

/// Behaviour of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Sends the next request at once.
    Greedy,
    /// Sleeps for the wait of a grant or the retry time of a refusal.
    HonoursWaits,
    /// Cancels most calls before the answer, after varying delays.
    CancelsCalls,
    /// Alternates between sending and pausing for this long, in step with the other callers.
    Bursts(Duration),
}

/// Callers of the same kind.
#[derive(Clone, Copy)]
pub struct Group {
    /// Number of callers.
    pub callers: usize,
    /// Requested namespace.
    pub namespace: &'static str,
    /// Bucket name, or name prefix if there are several buckets.
    pub bucket: &'static str,
    /// Number of buckets; with 1 the name is `bucket`.
    pub buckets: usize,
    /// Least tokens per request.
    pub least: usize,
    /// Most tokens per request.
    pub most: usize,
    /// Behaviour of a caller, by its number.
    pub behaviour: fn(usize) -> Behaviour,
}

/// A grant with its time bounds.
#[derive(Clone, Copy, Debug)]
pub struct Grant {
    /// Time of the request.
    pub sent: Instant,
    /// Time of the answer.
    pub answered: Instant,
    /// Granted tokens.
    pub tokens: f64,
}

/// Requests to one bucket and their results.
#[derive(Default)]
pub struct Account {
    /// Grants in order of their answers.
    pub grants: Vec<Grant>,
    /// Requests refused for lack of tokens.
    pub refused: u64,
    /// Times of the first and the last request.
    pub asked: Option<(Instant, Instant)>,
    /// Time of the store's first answer.
    pub first_answer: Option<Instant>,
    /// Time of the last request that the store refused: the bucket lacked its tokens after it.
    pub last_refused: Option<Instant>,
    /// Cancelled calls, whose outcome is unknown.
    pub cancelled: u64,
    /// Calls decided without the shared store, which may have counted them nevertheless.
    pub degraded: u64,
    /// Most tokens of a single request.
    pub largest: f64,
}

/// All results, by the `namespace:bucket` of the answers.
#[derive(Default)]
pub struct Record {
    /// Results per bucket.
    pub accounts: BTreeMap<String, Account>,
    /// Answers with another status, by namespace.
    pub others: BTreeMap<(&'static str, Status), u64>,
    /// Failed calls.
    pub failed: Vec<tonic::Status>,
    /// All calls, including cancelled ones.
    pub calls: u64,
}

impl Record {
    /// Results of one bucket; panics if there are none.
    pub fn of(&self, bucket: &str) -> &Account {
        self.accounts.get(bucket).unwrap_or_else(|| panic!("nobody has heard of {bucket}"))
    }

    /// Decisions made without the shared store.
    pub fn degraded(&self) -> u64 {
        self.accounts.values().map(|account| account.degraded).sum()
    }

    fn merge(&mut self, other: Self) {
        for (bucket, account) in other.accounts {
            let sum = self.accounts.entry(bucket).or_default();
            sum.grants.extend(account.grants);
            sum.refused += account.refused;
            sum.cancelled += account.cancelled;
            sum.degraded += account.degraded;
            sum.largest = sum.largest.max(account.largest);
            sum.asked = match (sum.asked, account.asked) {
                (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
                (a, b) => a.or(b),
            };
            sum.first_answer = sum.first_answer.into_iter().chain(account.first_answer).min();
            sum.last_refused = sum.last_refused.max(account.last_refused);
        }
        for (status, count) in other.others {
            *self.others.entry(status).or_default() += count;
        }
        self.failed.extend(other.failed);
        self.calls += other.calls;
    }
}

impl Account {
    /// Tokens of all known grants.
    pub fn granted(&self) -> f64 {
        self.grants.iter().map(|grant| grant.tokens).sum()
    }

    /// Seconds from the first request to the last answer: no grant is outside of them.
    pub fn span(&self) -> f64 {
        let Some((first, last)) = self.asked else { return 0.0 };
        let answered = self.grants.iter().map(|grant| grant.answered).max().unwrap_or(last);
        (answered.max(last) - first).as_secs_f64()
    }

    /// Seconds from the first answer to the last refusal by the store, 0 if it refused nothing. The
    /// bucket existed all this time and was empty at its end, so what it gained was granted, unless
    /// it was full in between. What it gains later may be left over if the callers are slow.
    pub fn span_until_empty(&self) -> f64 {
        let span = self.last_refused.zip(self.first_answer);
        span.map_or(0.0, |(last, first)| last.saturating_duration_since(first).as_secs_f64())
    }

    /// Highest ratio of granted tokens to `burst + rate * time` over all intervals that begin at
    /// one of `starts` evenly spaced moments and end with an answer. Only grants requested and
    /// answered within the interval count.
    pub fn worst_interval(&self, starts: u32, burst: f64, rate: f64) -> f64 {
        let Some((first, last)) = self.asked else { return 0.0 };
        let share = |number| {
            let start = first + (last - first) * number / starts;
            let within = self.grants.iter().filter(|grant| grant.sent >= start);
            let mut sum = 0.0;
            let shares = within.map(|grant| {
                sum += grant.tokens;
                sum / (burst + rate * (grant.answered - start).as_secs_f64())
            });
            shares.fold(0.0, f64::max)
        };
        (0..starts).map(share).fold(0.0, f64::max)
    }
}

/// Runs the callers of all groups on one thread for `time`, distributed round-robin over the
/// targets.
pub fn run_callers(targets: &[SocketAddr], groups: &[Group], time: Duration) -> Record {
    let mut record = super::runtime().block_on(async {
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            for target in targets {
                clients.push(QuotaServiceClient::new(channel(*target).await));
            }
        }
        let started = Instant::now();
        let mut callers = JoinSet::new();
        for (group, number) in groups.iter().flat_map(|g| (0..g.callers).map(move |n| (g, n))) {
            let client = clients[callers.len() % clients.len()].clone();
            callers.spawn(caller(client, *group, number, started, time));
        }
        let mut record = Record::default();
        while let Some(caller_record) = callers.join_next().await {
            record.merge(caller_record.unwrap());
        }
        record
    });
    for account in record.accounts.values_mut() {
        account.grants.sort_by_key(|grant| grant.answered);
    }
    record
}

async fn caller(
    mut client: QuotaServiceClient<Channel>,
    group: Group,
    number: usize,
    started: Instant,
    time: Duration,
) -> Record {
    let mut record = Record::default();
    let behaviour = (group.behaviour)(number);
    for count in 0.. {
        if let Behaviour::Bursts(length) = behaviour {
            let at = started.elapsed().as_nanos() % (2 * length.as_nanos());
            if let Some(paused) = at.checked_sub(length.as_nanos()) {
                tokio::time::sleep(length - Duration::from_nanos(paused as u64)).await;
            }
        }
        if started.elapsed() >= time {
            break;
        }
        // Pseudo-random, but equal in every run.
        let pseudo_random = (number * 7919 + count * 104_729) >> 3;
        let tokens = group.least + pseudo_random % (group.most - group.least + 1);
        let bucket = match group.buckets {
            1 => group.bucket.to_owned(),
            many => format!("{}{}", group.bucket, (number + count) % many),
        };
        let request = request(group.namespace, &bucket, tokens as i64);
        let sent = Instant::now();
        record.calls += 1;
        let answer = client.allow(request);
        let answer = match behaviour {
            Behaviour::CancelsCalls => {
                let cancel_after =
                    Duration::from_millis((pseudo_random % MAX_CANCEL_DELAY_MS) as u64);
                match tokio::time::timeout(cancel_after, answer).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        let name = format!("{}:{bucket}", group.namespace);
                        record.accounts.entry(name).or_default().cancelled += 1;
                        continue;
                    }
                }
            }
            _ => answer.await,
        };
        let answered = Instant::now();
        let answer = match answer {
            Ok(answer) => answer.into_inner(),
            Err(status) => {
                record.failed.push(status);
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
        };
        match answer.status() {
            status @ (Status::Ok | Status::RejectedTimeout) => {
                let account = record.accounts.entry(answer.bucket.clone()).or_default();
                let first = account.asked.map_or(sent, |asked| asked.0);
                account.asked = Some((first, sent));
                if !answer.degraded {
                    account.first_answer.get_or_insert(answered);
                }
                account.largest = account.largest.max(tokens as f64);
                account.degraded += u64::from(answer.degraded);
                if status == Status::Ok {
                    let tokens = answer.tokens_granted as f64;
                    account.grants.push(Grant { sent, answered, tokens });
                } else {
                    account.refused += 1;
                    if !answer.degraded {
                        account.last_refused = Some(sent);
                    }
                }
            }
            other => *record.others.entry((group.namespace, other)).or_default() += 1,
        }
        if behaviour == Behaviour::HonoursWaits {
            let pause = answer.wait_millis.max(answer.retry_after_millis).max(0);
            tokio::time::sleep(Duration::from_millis(pause as u64)).await;
        }
    }
    record
}
