//! What a simulation came to, beside what the design document says of its own.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::scenario::ScenarioArgs;
use crate::scenario::measure::{Measure, SAMPLE_EVERY};
use crate::scenario::plan::{CAPACITY, Plan};
use crate::scenario::sim::{Mishap, Outcome};
use crate::scenario::svg::Plot;

/// One simulation. Every field is always there in JSON: what doesn't apply is null or 0.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Which scenario.
    pub scenario: &'static str,
    /// How clusters share.
    pub algorithm: &'static str,
    /// What clusters share without a lease; null: what the service takes for that.
    pub safe_capacity: f64,
    /// The seed.
    pub seed: u64,
    /// The simulated time, in seconds.
    pub duration_s: f64,
    /// How long that took, in seconds.
    pub took_s: f64,
    /// Clusters in the tree.
    pub clusters: usize,
    /// Clients of its leaves.
    pub clients: usize,
    /// What the root has.
    pub capacity: f64,
    /// From when on means count, in seconds: the stores start empty, and learn until then.
    pub learning_s: f64,
    /// Σ has ÷ min(capacity, Σ wants), averaged over time.
    pub utilisation: Option<f64>,
    /// Σ has, averaged over time.
    pub mean_has: Option<f64>,
    /// Σ wants, averaged over time.
    pub mean_wants: Option<f64>,
    /// When more was handed out than there is, at any moment.
    pub shortfalls: Shortfalls,
    /// The same, looked at every five seconds as the older simulation did.
    pub sampled: Shortfalls,
    /// Leases given to clients.
    pub decisions: u64,
    /// Of these, by clusters that were learning.
    pub learning: u64,
    /// Requests of clients to clusters that couldn't be reached.
    pub failed: u64,
    /// What went wrong.
    pub mishaps: Mishaps,
    /// What the design document says.
    pub document: Document,
}

/// More handed out than there is.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Shortfalls {
    /// Stretches of time; of samples, how many.
    pub times: u64,
    /// For how long in all, in seconds; null for samples.
    pub seconds: Option<f64>,
    /// The most handed out.
    pub max: Option<f64>,
    /// That as a share of the capacity.
    pub max_percent: Option<f64>,
    /// What was handed out on average while it was too much.
    pub mean: Option<f64>,
    /// That as a share of the capacity.
    pub mean_percent: Option<f64>,
}

impl Shortfalls {
    fn new(times: u64, seconds: Option<f64>, max: Option<f64>, mean: Option<f64>) -> Self {
        let percent = |amount: f64| amount / CAPACITY * 100.0;
        let (max_percent, mean_percent) = (max.map(percent), mean.map(percent));
        Self { times, seconds, max, max_percent, mean, mean_percent }
    }
}

/// What went wrong, by kind.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Mishaps {
    /// Clients that suddenly wanted more.
    pub spikes: u64,
    /// Clusters that couldn't be reached for a while.
    pub clusters_lost: u64,
    /// Stores that restarted empty.
    pub stores_lost: u64,
}

/// The figures of the design document for the same scenario.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Document {
    /// Percent of the capacity handed out on average.
    pub utilisation_percent: Option<f64>,
    /// Shortfalls.
    pub shortfalls: Option<u64>,
    /// The most handed out.
    pub max: Option<f64>,
    /// Handed out on average in a shortfall.
    pub mean_over: Option<f64>,
}

impl Report {
    /// The report on a run with `args` that came to `outcome` and took `took`.
    pub fn new(args: &ScenarioArgs, plan: &Plan, outcome: &Outcome, took: Duration) -> Self {
        let Measure { utilisation, mean_has, mean_wants, excess, samples, .. } = &outcome.measure;
        let mut mishaps = Mishaps::default();
        for (_, mishap) in &outcome.mishaps {
            match mishap {
                Mishap::Spike(_) => mishaps.spikes += 1,
                Mishap::Lost(..) => mishaps.clusters_lost += 1,
                Mishap::StoreLost(_) => mishaps.stores_lost += 1,
            }
        }
        let published = args.scenario.published();
        Self {
            scenario: args.scenario.name(),
            algorithm: args.algorithm.name(),
            safe_capacity: args.safe_capacity,
            seed: args.seed,
            duration_s: args.duration.as_secs_f64(),
            took_s: took.as_secs_f64(),
            clusters: plan.clusters.len(),
            clients: plan.clients.len(),
            capacity: CAPACITY,
            learning_s: plan.learning().as_secs_f64(),
            utilisation: utilisation.mean(),
            mean_has: mean_has.mean(),
            mean_wants: mean_wants.mean(),
            shortfalls: Shortfalls::new(
                excess.times,
                Some(excess.mean.seconds()),
                excess.worst,
                excess.mean.mean(),
            ),
            sampled: Shortfalls::new(samples.over, None, samples.max, samples.mean_over()),
            decisions: outcome.decisions,
            learning: outcome.learning,
            failed: outcome.failed,
            mishaps,
            document: Document {
                utilisation_percent: published.utilisation_percent,
                shortfalls: published.shortfalls,
                max: published.max,
                mean_over: published.mean_over,
            },
        }
    }

    /// A plot of the run.
    pub fn plot<'a>(&self, plan: &Plan, outcome: &'a Outcome) -> Plot<'a> {
        let share =
            |share: Option<f64>| share.map_or("-".to_owned(), |s| format!("{:.2}", s * 100.0));
        let name = |cluster: usize| plan.clusters[cluster].name.as_str();
        let mishaps = outcome.mishaps.iter().map(|(at, mishap)| {
            let what = match mishap {
                Mishap::Spike(client) => format!("{} wants more", plan.clients[*client].name),
                Mishap::Lost(cluster, time) => {
                    format!("{} can't be reached for {} s", name(*cluster), time.as_secs())
                }
                Mishap::StoreLost(cluster) => format!("{} loses its store", name(*cluster)),
            };
            (*at, what)
        });
        Plot {
            title: format!(
                "Scenario {}: {} clients, capacity {CAPACITY}",
                self.scenario, self.clients
            ),
            subtitle: format!(
                "{} % of what could be handed out was; shortfalls: {}, at most {} %; {}, seed {}",
                share(self.utilisation),
                self.shortfalls.times,
                number(self.shortfalls.max_percent.or(Some(0.0))),
                self.algorithm,
                self.seed
            ),
            duration: Duration::from_secs_f64(self.duration_s),
            columns: &outcome.measure.columns,
            mishaps: mishaps.collect(),
        }
    }
}

fn number(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.2}"))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "scenario {}, {}, seed {}: {} s simulated in {:.2} s",
            self.scenario, self.algorithm, self.seed, self.duration_s, self.took_s
        )?;
        writeln!(
            f,
            "tree         {} clusters, {} clients, capacity {}; {} leases, {} while learning",
            self.clusters, self.clients, self.capacity, self.decisions, self.learning
        )?;
        let Mishaps { spikes, clusters_lost, stores_lost } = self.mishaps;
        if spikes + clusters_lost + stores_lost > 0 {
            writeln!(
                f,
                "mishaps      {spikes} spikes, {clusters_lost} clusters lost ({} requests failed), \
                 {stores_lost} stores lost",
                self.failed
            )?;
        }
        let document = &self.document;
        writeln!(
            f,
            "utilised     {} % of min(capacity, wants) from {} s on{}",
            number(self.utilisation.map(|share| share * 100.0)),
            self.learning_s,
            published(document.utilisation_percent.map(|percent| format!("{percent} %")))
        )?;
        writeln!(
            f,
            "             {} had of {} wanted on average",
            number(self.mean_has),
            number(self.mean_wants)
        )?;
        let of_document = |value: Option<f64>| {
            value.map(|value| format!("{value} = {:.2} %", value / CAPACITY * 100.0))
        };
        let shortfalls = &self.shortfalls;
        writeln!(
            f,
            "shortfalls   {}, {} s in all; {} of the looks every {} s{}",
            shortfalls.times,
            number(shortfalls.seconds),
            self.sampled.times,
            SAMPLE_EVERY.as_secs(),
            published(document.shortfalls.map(|times| times.to_string()))
        )?;
        writeln!(
            f,
            "  at most    {} = {} %{}",
            number(shortfalls.max),
            number(shortfalls.max_percent),
            published(of_document(document.max))
        )?;
        writeln!(
            f,
            "  on average {} = {} %{}",
            number(shortfalls.mean),
            number(shortfalls.mean_percent),
            published(of_document(document.mean_over))
        )
    }
}

fn published(figure: Option<String>) -> String {
    figure.map_or_else(String::new, |figure| format!("   (design document: {figure})"))
}
