//! Random walks of demand: how the wants of a client change over time.

use rand::RngExt as _;
use rand::rngs::SmallRng;

/// Step rule of a walk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Walk {
    /// Moves by at most `step`, reflected at 0 and `most`. The stationary distribution is uniform,
    /// so the total demand of many clients stays about constant.
    Within {
        /// Largest step.
        step: f64,
        /// Upper bound.
        most: f64,
    },
    /// Moves by at most this share of the current value, as in doorman's simulation.
    Share(f64),
}

impl Walk {
    /// The value after `wants`, for a `draw` from -1 to 1.
    pub fn step(&self, wants: f64, draw: f64) -> f64 {
        match *self {
            Self::Within { step, most } => {
                let next = (wants + draw * step).abs();
                let next = if next > most { 2.0 * most - next } else { next };
                // A step longer than the range would need several reflections.
                next.clamp(0.0, most)
            }
            Self::Share(share) => (wants + draw * share * wants).max(0.0),
        }
    }

    /// The value after `wants`, with a random draw.
    pub fn random(&self, wants: f64, rng: &mut SmallRng) -> f64 {
        self.step(wants, rng.random_range(-1.0..=1.0))
    }

    /// The walk after all demand was multiplied by `factor`.
    pub fn scaled(&self, factor: f64) -> Self {
        match *self {
            Self::Within { step, most } => {
                Self::Within { step: step * factor, most: most * factor }
            }
            share @ Self::Share(_) => share,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::keys::rng;

    #[test]
    fn steps_turn_back_at_both_ends() {
        let walk = Walk::Within { step: 4.0, most: 10.0 };
        for (wants, draw, next) in [
            (5.0, 0.5, 7.0),
            (5.0, -1.0, 1.0),
            (1.0, -1.0, 3.0),
            (9.0, 1.0, 7.0),
            (10.0, 0.0, 10.0),
        ] {
            assert_eq!(walk.step(wants, draw), next, "{wants} {draw}");
        }
        assert_eq!(Walk::Within { step: 100.0, most: 10.0 }.step(5.0, 1.0), 0.0);
    }

    #[test]
    fn a_share_is_of_what_is_wanted_now() {
        let walk = Walk::Share(0.1);
        assert_eq!(walk.step(100.0, 1.0), 110.0);
        assert_eq!(walk.step(100.0, -0.5), 95.0);
        assert_eq!(walk.step(0.0, 1.0), 0.0);
        assert_eq!(Walk::Share(2.0).step(10.0, -1.0), 0.0);
    }

    #[test]
    fn a_bounded_walk_keeps_its_mean() {
        let walk = Walk::Within { step: 1.0, most: 20.0 };
        let mut rng = rng(3, 0);
        let (mut wants, mut sum) = (10.0, 0.0);
        for _ in 0..200_000 {
            wants = walk.random(wants, &mut rng);
            sum += wants;
        }
        assert!((9.0..11.0).contains(&(sum / 200_000.0)), "{sum}");
    }

    #[test]
    fn scaling_leaves_shares_alone() {
        let within = Walk::Within { step: 1.0, most: 20.0 };
        assert_eq!(within.scaled(3.0), Walk::Within { step: 3.0, most: 60.0 });
        assert_eq!(Walk::Share(0.1).scaled(3.0), Walk::Share(0.1));
    }
}
