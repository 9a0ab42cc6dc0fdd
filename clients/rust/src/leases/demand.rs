//! How much to ask for. Pure.

/// The demand of this many seconds is averaged.
const WINDOW: usize = 10;

/// What is asked for beyond the average, so that not every fluctuation has to wait.
const HEADROOM: f64 = 1.2;

/// The demand of the last seconds, to ask for as much.
#[derive(Debug, Default)]
pub(super) struct Demand {
    /// Of each of the last seconds, the latest one at the end.
    seconds: Vec<f64>,
}

impl Demand {
    /// Adds what was demanded in the last second.
    pub(super) fn add(&mut self, demand: f64) {
        if self.seconds.len() == WINDOW {
            self.seconds.remove(0);
        }
        self.seconds.push(demand);
    }

    /// The average with some headroom, or the demand of the last or the `present` second if that is
    /// more: so it grows at once, and shrinks slowly.
    pub(super) fn wants(&self, present: f64) -> f64 {
        let average = self.seconds.iter().sum::<f64>() / self.seconds.len().max(1) as f64;
        let last = self.seconds.last().copied().unwrap_or(0.0);
        (HEADROOM * average).max(last).max(present)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_is_averaged_and_grows_at_once() {
        let mut demand = Demand::default();
        assert_eq!(demand.wants(0.0), 0.0);
        assert_eq!(demand.wants(3.0), 3.0);
        demand.add(10.0);
        assert_eq!(demand.wants(0.0), 12.0);
        demand.add(0.0);
        assert_eq!(demand.wants(0.0), 6.0);
        assert_eq!(demand.wants(7.0), 7.0);
        demand.add(40.0);
        assert_eq!(demand.wants(0.0), 40.0);
        for _ in 0..WINDOW {
            demand.add(0.0);
        }
        assert_eq!(demand.wants(0.0), 0.0);
    }
}
