//! Aggregation of rounds: medians and ranges, of figures and of ratios within a round.

use std::collections::BTreeMap;

use serde::Serialize;

/// Figures of one round, by name.
pub type Round = BTreeMap<String, f64>;

/// A figure over all rounds that have it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stat {
    /// Median; the mean of the middle two for an even number of rounds.
    pub median: f64,
    /// Minimum.
    pub min: f64,
    /// Maximum.
    pub max: f64,
    /// Values in round order.
    pub rounds: Vec<f64>,
}

impl Stat {
    /// Aggregates `rounds`; `None` if empty.
    pub fn of(rounds: Vec<f64>) -> Option<Self> {
        let mut sorted = rounds.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
            _ => sorted[middle],
        };
        Some(Self { median, min, max, rounds })
    }
}

/// A value derived from the figures of a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// One figure.
    Figure(&'static str),
    /// First figure divided by the second, within a round: a slowdown of the machine affects both.
    Ratio(&'static str, &'static str),
    /// First figure minus the second, within a round.
    Difference(&'static str, &'static str),
}

impl Value {
    fn of(self, round: &Round) -> Option<f64> {
        let figure = |name| round.get(name).copied();
        match self {
            Self::Figure(name) => figure(name),
            Self::Ratio(of, to) => {
                figure(of).zip(figure(to)).filter(|(_, to)| *to != 0.0).map(|(of, to)| of / to)
            }
            Self::Difference(of, than) => Some(figure(of)? - figure(than)?),
        }
    }

    /// Over all rounds that have it; `None` if no round has.
    pub fn over(self, rounds: &[Round]) -> Option<Stat> {
        Stat::of(rounds.iter().filter_map(|round| self.of(round)).collect())
    }
}

/// Every figure over all rounds that have it.
pub fn figures(rounds: &[Round]) -> BTreeMap<String, Stat> {
    let mut all = BTreeMap::<&str, Vec<f64>>::new();
    for (name, figure) in rounds.iter().flatten() {
        all.entry(name).or_default().push(*figure);
    }
    all.into_iter().filter_map(|(name, found)| Some((name.to_owned(), Stat::of(found)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(figures: &[(&str, f64)]) -> Round {
        figures.iter().map(|(name, figure)| ((*name).to_owned(), *figure)).collect()
    }

    #[test]
    fn computes_median_and_range() {
        for (rounds, median, min, max) in [
            (vec![3.0], 3.0, 3.0, 3.0),
            (vec![9.0, 1.0, 2.0], 2.0, 1.0, 9.0),
            (vec![4.0, 1.0, 2.0, 8.0], 3.0, 1.0, 8.0),
        ] {
            let stat = Stat::of(rounds.clone());
            assert_eq!(stat, Some(Stat { median, min, max, rounds }));
        }
        assert_eq!(Stat::of(vec![]), None);
    }

    #[test]
    fn ratios_are_computed_per_round() {
        let rounds = [
            round(&[("a", 10.0), ("b", 100.0)]),
            round(&[("a", 40.0), ("b", 50.0)]),
            round(&[("a", 60.0), ("b", 60.0)]),
            round(&[("a", 1.0)]),
            round(&[("a", 1.0), ("b", 0.0)]),
        ];
        let stat = Value::Ratio("a", "b").over(&rounds).expect("three rounds have both");
        assert_eq!((stat.median, stat.rounds), (0.8, vec![0.1, 0.8, 1.0]));
        let stat = Value::Difference("b", "a").over(&rounds[..2]).expect("both");
        assert_eq!(stat.rounds, [90.0, 10.0]);
        assert_eq!(Value::Figure("a").over(&rounds).map(|stat| stat.median), Some(10.0));
        assert_eq!(Value::Ratio("a", "c").over(&rounds), None);
    }

    #[test]
    fn figures_cover_rounds_that_have_them() {
        let all = figures(&[round(&[("a", 1.0)]), round(&[("a", 3.0), ("b", 5.0)])]);
        assert_eq!(all["a"].median, 2.0);
        assert_eq!(all["b"].rounds, [5.0]);
        assert_eq!(all.len(), 2);
    }
}
