//! How demand moves: what a client wants walks at random.

use rand::RngExt as _;
use rand::rngs::SmallRng;

/// How one step of a walk goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Walk {
    /// By at most `step` up or down, turning back at 0 and at `most`: over time every value
    /// between them is as likely, so the demand of many clients together stays where it began.
    Within {
        /// The longest step.
        step: f64,
        /// The highest value.
        most: f64,
    },
    /// By at most this share of itself up or down, as in the older doorman's simulation.
    Share(f64),
}

impl Walk {
    /// Where `wants` goes from here, for a `draw` between -1 and 1.
    pub fn step(&self, wants: f64, draw: f64) -> f64 {
        match *self {
            Self::Within { step, most } => {
                let next = (wants + draw * step).abs();
                let next = if next > most { 2.0 * most - next } else { next };
                // A step longer than the whole way can turn back more than once.
                next.clamp(0.0, most)
            }
            Self::Share(share) => (wants + draw * share * wants).max(0.0),
        }
    }

    /// Where `wants` goes from here by chance.
    pub fn random(&self, wants: f64, rng: &mut SmallRng) -> f64 {
        self.step(wants, rng.random_range(-1.0..=1.0))
    }

    /// The same walk, once all demand is `factor` times as high.
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
    use crate::keys::rng;

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
