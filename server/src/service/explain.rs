//! Explanations: what a request would be answered, step by step.

use std::time::Duration;

use super::ServiceState;

/// What a request would be answered, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation<A> {
    /// The answer.
    pub answer: A,
    /// The answer in one sentence.
    pub summary: String,
    /// How it comes about, in order.
    pub steps: Vec<Step>,
}

/// A rule or a circumstance, and what it does to the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// A fixed word, such as `wait`.
    pub name: &'static str,
    /// Whether it permits or refuses the request.
    pub effect: Effect,
    /// A sentence for people.
    pub text: String,
    /// The numbers in the sentence, by name.
    pub numbers: Vec<(&'static str, f64)>,
}

/// What a step does to the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It decides nothing.
    Notes,
    /// It permits the request.
    Permits,
    /// It permits the request after a wait.
    Delays,
    /// It refuses the request.
    Refuses,
    /// It grants a request that would be refused or would have to wait.
    Lifts,
}

impl Effect {
    /// The word for programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Notes => "notes",
            Self::Permits => "permits",
            Self::Delays => "delays",
            Self::Refuses => "refuses",
            Self::Lifts => "lifts",
        }
    }

    pub(super) fn of_rule(permits: bool) -> Self {
        if permits { Self::Permits } else { Self::Refuses }
    }
}

/// The steps of an explanation, as they are found out.
#[derive(Default)]
pub(super) struct Steps(Vec<Step>);

impl Steps {
    pub(super) fn add<const N: usize>(
        &mut self,
        name: &'static str,
        effect: Effect,
        text: impl Into<String>,
        numbers: [(&'static str, f64); N],
    ) {
        self.0.push(Step { name, effect, text: text.into(), numbers: numbers.into() });
    }

    pub(super) fn explain<A>(self, summary: String, answer: A) -> Explanation<A> {
        Explanation { answer, summary, steps: self.0 }
    }
}

/// Why limits that are, or are not, configured to be enforced, are not; `None` if they are.
pub(super) fn why_not_enforced(state: &ServiceState, enforced: bool) -> Option<&'static str> {
    if state.kill_switch.is_on() {
        return Some("the kill switch is on: no limit refuses anything");
    }
    (!enforced).then_some("the limits are in shadow (enforce: false): they refuse nothing")
}

/// An amount, rounded to three decimals.
pub(super) fn amount(value: f64) -> String {
    let text = format!("{value:.3}");
    match text.trim_end_matches('0').trim_end_matches('.') {
        "-0" => "0".to_owned(),
        text => text.to_owned(),
    }
}

/// So many of something that is whole.
pub(super) fn whole(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// So many of something.
pub(super) fn count(number: f64, one: &str, many: &str) -> String {
    match amount(number) {
        number if number == "1" => format!("1 {one}"),
        number => format!("{number} {many}"),
    }
}

/// A time, from milliseconds.
pub(super) fn time(ms: i64) -> String {
    humantime::format_duration(Duration::from_millis(ms.unsigned_abs())).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_and_times() {
        for (value, text) in [
            (0.0, "0"),
            (-0.0001, "0"),
            (1.0, "1"),
            (41.5, "41.5"),
            (-2.12345, "-2.123"),
            (100.0, "100"),
        ] {
            assert_eq!(amount(value), text);
        }
        let tokens = |number| count(number, "token", "tokens");
        assert_eq!([tokens(1.0), tokens(0.5)], ["1 token", "0.5 tokens"]);
        assert_eq!([time(0), time(1200), time(90_000)], ["0s", "1s 200ms", "1m 30s"]);
    }
}
