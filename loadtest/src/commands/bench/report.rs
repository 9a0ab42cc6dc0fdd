//! Result of a benchmark: JSON with stable names, and tables in Markdown.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::commands::bench::args::BenchArgs;
use crate::commands::bench::goals::{self, Outcome};
use crate::commands::bench::stats::{self, Round, Stat, Value};

/// All results.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The arguments.
    pub bench: BenchArgs,
    /// CPUs of the machine, shared by all processes.
    pub cpus: usize,
    /// Evaluated goals.
    pub goals: Vec<Outcome>,
    /// All figures by name: the measurement, a dot, and one of `rate` (decisions/s), `p50_us`,
    /// `p99_us`, `p99_9_us`, the CPU µs per decision of the servers, Redis, Redis scripts and the
    /// load generator (`server_us`, `redis_us`, `script_us`, `own_us`), or the shares `granted` and
    /// `failed`.
    pub figures: BTreeMap<String, Stat>,
    /// Figures per round, for ratios within a round.
    #[serde(skip)]
    rounds: Vec<Round>,
}

impl Report {
    /// Aggregates `rounds`.
    pub fn new(args: &BenchArgs, rounds: Vec<Round>) -> Self {
        Self {
            bench: args.clone(),
            cpus: std::thread::available_parallelism().map_or(1, Into::into),
            goals: goals::outcomes(&rounds),
            figures: stats::figures(&rounds),
            rounds,
        }
    }

    /// Indented JSON.
    pub fn pretty(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// The figure `point` divided by the rate of the empty RPC.
    pub fn of_empty(&self, point: &'static str) -> Option<Stat> {
        Value::Ratio(point, "empty/hot/128.rate").over(&self.rounds)
    }

    /// Measurements with failed requests, and their highest share of failures.
    fn faulty(&self) -> impl Iterator<Item = (&str, f64)> {
        self.figures.iter().filter_map(|(name, stat)| {
            Some((name.strip_suffix(".failed")?, stat.max)).filter(|(_, share)| *share > 0.0)
        })
    }

    fn cell(&self, name: &str) -> String {
        self.figures.get(name).map_or_else(|| "–".to_owned(), cell)
    }

    fn table(
        &self,
        f: &mut fmt::Formatter<'_>,
        title: &str,
        rows: &[(&str, &str)],
        columns: &[(&str, &str)],
    ) -> fmt::Result {
        let cells = |row: &str| -> Vec<String> {
            columns.iter().map(|(_, column)| self.cell(&column.replace("{}", row))).collect()
        };
        let rows: Vec<_> = rows.iter().map(|(name, row)| (name, cells(row))).collect();
        if rows.iter().all(|(_, cells)| cells.iter().all(|cell| cell == "–")) {
            return Ok(());
        }
        let heads: Vec<&str> = columns.iter().map(|(head, _)| *head).collect();
        writeln!(f, "\n| {title} | {} |\n|---|{}", heads.join(" | "), "---|".repeat(heads.len()))?;
        for (name, cells) in rows {
            writeln!(f, "| {name} | {} |", cells.join(" | "))?;
        }
        Ok(())
    }
}

/// Median with its range, to about three digits.
fn cell(stat: &Stat) -> String {
    let Stat { median, min, max, .. } = stat;
    match stat.rounds.len() {
        1 => number(*median),
        _ => format!("{} ({} – {})", number(*median), number(*min), number(*max)),
    }
}

/// A number to about three digits, with thousands separators.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        0.0..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    // Rates from 10,000 on are rounded to hundreds.
    let rounded = if value.abs() >= 10_000.0 { (value / 100.0).round() * 100.0 } else { value };
    let text = format!("{rounded:.digits$}");
    if digits > 0 || text.len() <= 4 {
        return text;
    }
    let mut grouped = String::new();
    for (at, digit) in text.chars().enumerate() {
        if at > 0 && (text.len() - at).is_multiple_of(3) && !grouped.ends_with('-') {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

const PATTERNS: [(&str, &str); 7] = [
    ("empty RPC", "empty/hot"),
    ("embedded, uniform", "embedded/uniform"),
    ("embedded, hot", "embedded/hot"),
    ("Redis, uniform", "redis/uniform"),
    ("Redis, zipf", "redis/zipf"),
    ("Redis, hot", "redis/hot"),
    ("one EVALSHA a request, uniform", "one-call/uniform"),
];

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BenchArgs { rounds, seconds, buckets, .. } = &self.bench;
        writeln!(
            f,
            "Medians of {rounds} rounds of {seconds} s each, and in brackets the lowest and the \
             highest; ratios are taken within a round. {buckets} buckets; {} CPUs for everything.",
            self.cpus
        )?;
        self.goals_table(f)?;
        self.load_tables(f)?;
        self.lease_table(f)?;
        self.scale_table(f)?;
        let h2load = [("this generator", "redis/hot/128.rate"), ("h2load", "h2load/hot/128.rate")];
        self.table(f, "one hot bucket, 128 concurrent", &h2load, &[("decisions a second", "{}")])?;
        for (point, share) in self.faulty() {
            writeln!(
                f,
                "\n{point}: up to {} % of the requests of a round were not decided as they should be.",
                number(share * 100.0)
            )?;
        }
        Ok(())
    }
}

impl Report {
    fn goals_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n| | goal | reached | |\n|---|---|---|---|")?;
        for Outcome { what, goal, reached, holds } in &self.goals {
            let verdict = match holds {
                Some(true) => "holds",
                Some(false) => "**no**",
                None => "not measured",
            };
            let reached = reached.as_ref().map_or_else(|| "–".to_owned(), cell);
            writeln!(f, "| {what} | {goal} | {reached} | {verdict} |")?;
        }
        Ok(())
    }

    /// Rates, latencies and CPU times of Allow requests.
    fn load_tables(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = [("1", "{}/1"), ("8", "{}/8"), ("128", "{}/128"), ("512", "{}/512")];
        for (title, figure) in [
            ("decisions a second, by concurrency", "rate"),
            ("p50, µs", "p50_us"),
            ("p99, µs", "p99_us"),
        ] {
            let columns = at.map(|(head, point)| (head, format!("{point}.{figure}")));
            let columns = columns.each_ref().map(|(head, column)| (*head, column.as_str()));
            self.table(f, title, &PATTERNS, &columns)?;
        }
        let refused = [&PATTERNS[..], &[("Redis, refused", "redis/refused")]].concat();
        let costs = [
            ("node or server", "{}/128.server_us"),
            ("Redis", "{}/128.redis_us"),
            ("Redis, in scripts", "{}/128.script_us"),
            ("load generator", "{}/128.own_us"),
            ("decisions a second", "{}/128.rate"),
        ];
        self.table(f, "CPU µs a decision, 128 concurrent", &refused, &costs)?;
        let paced = [
            ("Redis, hot, at 50 % of the peak", "redis/hot/50%"),
            ("Redis, hot, at 80 %", "redis/hot/80%"),
            ("Redis, uniform, at 50 %", "redis/uniform/50%"),
            ("Redis, uniform, at 80 %", "redis/uniform/80%"),
        ];
        let latencies = [
            ("decisions a second", "{}.rate"),
            ("p50, µs", "{}.p50_us"),
            ("p99, µs", "{}.p99_us"),
            ("p99.9, µs", "{}.p99_9_us"),
        ];
        self.table(f, "latency on a schedule", &paced, &latencies)
    }

    fn lease_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let leases = [("10", "10"), ("1,000", "1000"), ("100,000", "100000")];
        let costs = [
            ("Redis CPU µs a decision", "leases/{}.redis_us"),
            ("in the script", "leases/{}.script_us"),
            ("node CPU µs", "leases/{}.server_us"),
            ("decisions a second", "leases/{}.rate"),
        ];
        self.table(f, "leases, by clients of the resource", &leases, &costs)
    }

    fn scale_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scale = [("1 on 1", "1x1"), ("2 on 2", "2x2"), ("3 on 3", "3x3")];
        let costs = [
            ("nodes, CPU µs a decision", "scale/{}.server_us"),
            ("Redis, CPU µs a decision", "scale/{}.redis_us"),
            ("decisions a second", "scale/{}.rate"),
        ];
        self.table(f, "nodes on shards, uniform, 128 concurrent a node", &scale, &costs)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn report(rounds: &[&[(&str, f64)]]) -> Report {
        let rounds = rounds.iter().map(|figures| {
            figures.iter().map(|(name, figure)| ((*name).to_owned(), *figure)).collect()
        });
        Report::new(&Cli::parse_from(["bench"]).args, rounds.collect())
    }

    #[test]
    fn numbers_have_three_digits_or_so() {
        for (value, text) in [
            (0.0, "0.00"),
            (-0.256, "-0.26"),
            (1.0, "1.00"),
            (12.34, "12.3"),
            (999.4, "999"),
            (6543.2, "6543"),
            (12_345.0, "12,300"),
            (123_456.0, "123,500"),
            (-123_456.0, "-123,500"),
            (20_568_866.8, "20,568,900"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn tables_without_figures_are_omitted() {
        let text = report(&[
            &[("redis/hot/128.rate", 50_000.0), ("empty/hot/128.rate", 100_000.0)],
            &[("redis/hot/128.rate", 99_000.0), ("empty/hot/128.rate", 100_000.0)],
            &[("redis/hot/128.rate", 60_000.0), ("empty/hot/128.rate", 50_000.0)],
        ])
        .to_string();
        assert!(
            text.contains("\n| the same, one hot bucket | ≥ 0.95 | 0.99 (0.50 – 1.20) | holds |\n"),
            "{text}"
        );
        assert!(text.contains("| – | not measured |"), "{text}");
        let row = "\n| Redis, hot | – | – | 60,000 (50,000 – 99,000) | – |\n";
        assert!(text.contains(row), "{text}");
        assert!(text.find("goal").unwrap() < text.find("decisions a second").unwrap());
        assert!(!text.contains("leases, by clients"), "{text}");
        assert!(!text.contains("not decided as they should be"), "{text}");
    }

    #[test]
    fn failures_are_reported() {
        let text = report(&[&[("redis/hot/8.failed", 0.0)], &[("redis/hot/8.failed", 0.02)]]);
        let said = "\nredis/hot/8: up to 2.00 % of the requests of a round were not decided";
        assert!(text.to_string().contains(said), "{text}");
    }

    #[test]
    fn json_has_goals_and_figures_with_all_rounds() {
        let report = report(&[&[("redis/bytes-a-bucket", 161.0)]]);
        let json: serde_json::Value = serde_json::from_str(&report.pretty()).expect("JSON");
        assert_eq!(json["figures"]["redis/bytes-a-bucket"]["rounds"][0], 161.0);
        assert_eq!(json["bench"]["rounds"], 5);
        let goals = json["goals"].as_array().expect("a list");
        assert!(goals.iter().any(|goal| goal["holds"] == true));
        assert!(goals.iter().any(|goal| goal["holds"].is_null()));
    }
}
