//! Compares what was granted with its bounds.

use super::ledger::Ledger;

/// Violations listed in a report.
pub(super) const REPORTED_VIOLATIONS: usize = 10;

/// What a bucket or a domain granted, and its bound.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) name: Box<str>,
    pub(super) granted: u64,
    /// `None` if no limit of the file is for that name.
    pub(super) bound: Option<f64>,
    /// Granted ÷ bound.
    pub(super) ratio: f64,
}

impl Entry {
    /// The share of the bound; `None` without a bound.
    pub(super) fn granted_to_bound(&self) -> Option<f64> {
        self.bound.map(|_| self.ratio)
    }
}

/// Everything in a ledger, compared with its bounds.
#[derive(Default)]
pub(super) struct Comparison {
    pub(super) violations: u64,
    /// The worst violations, worst first.
    pub(super) violated: Vec<Entry>,
    /// The highest share of its bound.
    pub(super) most_loaded: Option<Entry>,
}

impl Comparison {
    pub(super) fn new(ledger: &Ledger, bound: impl Fn(&str) -> Option<f64>) -> Self {
        let mut comparison = Self::default();
        for (name, &granted) in &ledger.granted {
            comparison.add(name, granted, bound(name));
        }
        keep_worst(&mut comparison.violated);
        comparison
    }

    fn add(&mut self, name: &str, granted: u64, bound: Option<f64>) {
        // Without limits for the name nothing may be granted.
        let ratio = bound.map_or(f64::INFINITY, |bound| ratio(granted, bound));
        let leads = self.most_loaded.as_ref().is_none_or(|most| ratio > most.ratio);
        if !leads && ratio <= 1.0 {
            return;
        }
        let entry = Entry { name: name.into(), granted, bound, ratio };
        if ratio > 1.0 {
            self.violations += 1;
            self.violated.push(entry.clone());
            // Truncated at intervals to bound memory if most of them violate.
            if self.violated.len() >= 1000 {
                keep_worst(&mut self.violated);
            }
        }
        if leads {
            self.most_loaded = Some(entry);
        }
    }
}

/// Granted ÷ bound; 0 if nothing was granted where nothing may be.
pub(super) fn ratio(granted: u64, bound: f64) -> f64 {
    if granted == 0 { 0.0 } else { granted as f64 / bound }
}

fn keep_worst(violated: &mut Vec<Entry>) {
    violated.sort_by(|a, b| b.ratio.total_cmp(&a.ratio).then_with(|| a.name.cmp(&b.name)));
    violated.truncate(REPORTED_VIOLATIONS);
}
