//! The performance goals and their evaluation.

use serde::Serialize;

use crate::commands::bench::stats::{Round, Stat, Value};

/// Acceptable range of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
    /// At most this far from 1.
    NearOne(f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
            Self::NearOne(far) => (value - 1.0).abs() <= far,
        }
    }

    fn text(self) -> String {
        match self {
            Self::AtLeast(least) => format!("≥ {least}"),
            Self::AtMost(most) => format!("≤ {most}"),
            Self::NearOne(far) => format!("{} to {}", 1.0 - far, 1.0 + far),
        }
    }
}

struct Goal {
    what: &'static str,
    bound: Bound,
    value: Value,
}

const GOALS: [Goal; 20] = {
    use Bound::{AtLeast, AtMost, NearOne};
    use Value::{Difference, Figure, Ratio};
    const fn goal(what: &'static str, bound: Bound, value: Value) -> Goal {
        Goal { what, bound, value }
    }
    [
        goal(
            "Allow on Redis ÷ empty RPC, uniform, 128 concurrent",
            AtLeast(0.6),
            Ratio("redis/uniform/128.rate", "empty/hot/128.rate"),
        ),
        goal("the same, zipf", AtLeast(0.65), Ratio("redis/zipf/128.rate", "empty/hot/128.rate")),
        goal(
            "the same, one hot bucket",
            AtLeast(0.95),
            Ratio("redis/hot/128.rate", "empty/hot/128.rate"),
        ),
        goal(
            "Allow on the embedded store ÷ empty RPC, uniform",
            AtLeast(0.95),
            Ratio("embedded/uniform/128.rate", "empty/hot/128.rate"),
        ),
        goal(
            "the same, one hot bucket",
            AtLeast(0.95),
            Ratio("embedded/hot/128.rate", "empty/hot/128.rate"),
        ),
        goal("Redis CPU µs a decision, uniform", AtMost(2.5), Figure("redis/uniform/128.redis_us")),
        goal("the same, zipf", AtMost(2.0), Figure("redis/zipf/128.redis_us")),
        goal("the same, one hot bucket", AtMost(0.3), Figure("redis/hot/128.redis_us")),
        goal(
            "node CPU µs a decision beyond the empty RPC's, uniform",
            AtMost(1.0),
            Difference("redis/uniform/128.server_us", "empty/hot/128.server_us"),
        ),
        goal(
            "the same, zipf",
            AtMost(1.0),
            Difference("redis/zipf/128.server_us", "empty/hot/128.server_us"),
        ),
        goal(
            "the same, one hot bucket",
            AtMost(1.0),
            Difference("redis/hot/128.server_us", "empty/hot/128.server_us"),
        ),
        goal(
            "p50 at concurrency 1 ÷ one EVALSHA a request, uniform",
            AtMost(1.1),
            Ratio("redis/uniform/1.p50_us", "one-call/uniform/1.p50_us"),
        ),
        goal(
            "rate of refusals ÷ rate of grants",
            AtLeast(1.0),
            Ratio("redis/refused/128.rate", "redis/hot/128.rate"),
        ),
        goal(
            "Redis bytes a bucket (used_memory), names of 20 characters",
            AtMost(165.0),
            Figure("redis/bytes-a-bucket"),
        ),
        goal(
            "a lease decision at 100,000 clients ÷ at 10, Redis CPU",
            AtMost(3.0),
            Ratio("leases/100000.redis_us", "leases/10.redis_us"),
        ),
        goal(
            "the same, in the script",
            AtMost(3.0),
            Ratio("leases/100000.script_us", "leases/10.script_us"),
        ),
        goal(
            "rate by h2load ÷ rate by this generator, one hot bucket",
            NearOne(0.15),
            Ratio("h2load/hot/128.rate", "redis/hot/128.rate"),
        ),
        goal(
            "decisions a CPU second of nodes, 3 nodes on 3 shards ÷ 1 on 1",
            AtLeast(0.9),
            Ratio("scale/1x1.server_us", "scale/3x3.server_us"),
        ),
        goal("the same, of Redis", AtLeast(0.9), Ratio("scale/1x1.redis_us", "scale/3x3.redis_us")),
        goal("the same, of both", AtLeast(0.9), Ratio("scale/1x1.both_us", "scale/3x3.both_us")),
    ]
};

/// A goal and its evaluation.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Description of the figure.
    pub what: &'static str,
    /// Acceptable range, as text.
    pub goal: String,
    /// Measured figure; null if not measured.
    pub reached: Option<Stat>,
    /// Whether the median is within the range; null if not measured.
    pub holds: Option<bool>,
}

/// Evaluates every goal.
pub fn outcomes(rounds: &[Round]) -> Vec<Outcome> {
    let outcome = |goal: &Goal| {
        let reached = goal.value.over(rounds);
        let holds = reached.as_ref().map(|stat| goal.bound.holds(stat.median));
        Outcome { what: goal.what, goal: goal.bound.text(), reached, holds }
    };
    GOALS.iter().map(outcome).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::plan;

    #[test]
    fn goals_hold_by_their_medians() {
        let round = |rate: f64, memory: f64| {
            let figures = [
                ("redis/uniform/128.rate", rate),
                ("empty/hot/128.rate", 100.0),
                ("redis/bytes-a-bucket", memory),
                ("h2load/hot/128.rate", 116.0),
                ("redis/hot/128.rate", 100.0),
            ];
            figures.into_iter().map(|(name, figure)| (name.to_owned(), figure)).collect()
        };
        let rounds: Vec<Round> = vec![round(70.0, 165.0), round(61.0, 166.0), round(10.0, 165.0)];
        let outcomes = outcomes(&rounds);
        let of = |what: &str| {
            let outcome = outcomes.iter().find(|outcome| outcome.what.starts_with(what));
            outcome.expect("a goal").clone()
        };
        let ratio = of("Allow on Redis ÷ empty RPC");
        assert_eq!((ratio.goal.as_str(), ratio.holds), ("≥ 0.6", Some(true)));
        assert_eq!(ratio.reached.map(|stat| (stat.min, stat.max)), Some((0.1, 0.7)));
        assert_eq!(of("Redis bytes").holds, Some(true));
        assert_eq!(of("rate by h2load").holds, Some(false));
        assert_eq!(of("Redis CPU").holds, None);
        assert!(of("Redis CPU").reached.is_none());
    }

    #[test]
    fn goals_refer_to_measured_figures() {
        let points: Vec<String> = plan::all().iter().map(ToString::to_string).collect();
        for goal in &GOALS {
            let names = match goal.value {
                Value::Figure(name) => vec![name],
                Value::Ratio(of, to) | Value::Difference(of, to) => vec![of, to],
            };
            for name in names {
                let point = name.split_once('.').map_or(name, |(point, _)| point);
                let known = points.iter().any(|known| known == point);
                assert!(known || point == "redis/bytes-a-bucket", "{name}");
            }
        }
    }
}
