//! Result of a simulation, beside the figures of the design document.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::commands::scenario::ScenarioArgs;
use crate::commands::scenario::measure::{Measure, SAMPLE_EVERY};
use crate::commands::scenario::plan::{CAPACITY, Plan};
use crate::commands::scenario::sim::{Mishap, Outcome};
use crate::commands::scenario::svg::Plot;

/// One simulation. JSON always has every field: null or 0 where it does not apply.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Scenario name.
    pub scenario: &'static str,
    /// Sharing algorithm.
    pub algorithm: &'static str,
    /// Capacity that a cluster shares without a lease.
    pub safe_capacity: f64,
    /// Random seed.
    pub seed: u64,
    /// Simulated time, in seconds.
    pub duration_s: f64,
    /// Run time of the simulation, in seconds.
    pub took_s: f64,
    /// Clusters in the tree.
    pub clusters: usize,
    /// Clients of the leaf clusters.
    pub clients: usize,
    /// Capacity of the root.
    pub capacity: f64,
    /// Start of the means, in seconds: until then the initially empty stores learn.
    pub learning_s: f64,
    /// Time-weighted mean of Σ has ÷ min(capacity, Σ wants).
    pub utilisation: Option<f64>,
    /// Time-weighted mean of Σ has.
    pub mean_has: Option<f64>,
    /// Time-weighted mean of Σ wants.
    pub mean_wants: Option<f64>,
    /// Shortfalls, measured continuously.
    pub shortfalls: Shortfalls,
    /// Shortfalls, sampled every five seconds as in doorman's simulation.
    pub sampled: Shortfalls,
    /// Leases granted to clients.
    pub decisions: u64,
    /// Leases granted in learning mode.
    pub learning: u64,
    /// Client requests to unreachable clusters.
    pub failed: u64,
    /// Simulated mishaps.
    pub mishaps: Mishaps,
    /// Figures of the design document.
    pub document: Document,
}

/// Times with more leased than the capacity.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Shortfalls {
    /// Number of intervals, or of samples.
    pub times: u64,
    /// Total duration in seconds; null for samples.
    pub seconds: Option<f64>,
    /// Most capacity leased.
    pub max: Option<f64>,
    /// `max` in percent of the capacity.
    pub max_percent: Option<f64>,
    /// Mean capacity leased during shortfalls.
    pub mean: Option<f64>,
    /// `mean` in percent of the capacity.
    pub mean_percent: Option<f64>,
}

impl Shortfalls {
    fn new(times: u64, seconds: Option<f64>, max: Option<f64>, mean: Option<f64>) -> Self {
        let percent = |amount: f64| amount / CAPACITY * 100.0;
        let (max_percent, mean_percent) = (max.map(percent), mean.map(percent));
        Self { times, seconds, max, max_percent, mean, mean_percent }
    }
}

/// Mishaps by kind.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Mishaps {
    /// Clients with a sudden increase in wants.
    pub spikes: u64,
    /// Clusters that became unreachable for a while.
    pub clusters_lost: u64,
    /// Stores that restarted empty.
    pub stores_lost: u64,
}

/// Figures of the design document for the scenario.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Document {
    /// Mean percentage of the capacity that was leased.
    pub utilisation_percent: Option<f64>,
    /// Number of shortfalls.
    pub shortfalls: Option<u64>,
    /// Most capacity leased.
    pub max: Option<f64>,
    /// Mean capacity leased during shortfalls.
    pub mean_over: Option<f64>,
}

impl Report {
    /// Report of a run with `args` that took `took`.
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
        self.shortfalls_text(f)
    }
}

impl Report {
    fn shortfalls_text(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let document = &self.document;
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
