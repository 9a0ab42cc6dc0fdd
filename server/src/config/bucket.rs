//! The definition of a bucket.

use crate::domain::bucket::{BucketLimit, Terms};

/// The definition of a bucket: configured, default, or a template for dynamic buckets.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    /// Position among the definitions of the limits, from 0. Also the index into arrays of data
    /// per definition, such as metrics.
    pub index: usize,
    /// The limits as in the file.
    pub limit: BucketLimit,
    /// The limits in the units of the arithmetic.
    pub terms: Terms,
    /// How what is asked for is counted, if it may be banned. Boxed, as few buckets have it.
    pub ban: Option<Box<Terms>>,
    /// Whether the limits are enforced, if file and namespace enforce theirs.
    pub enforce: bool,
}

impl Bucket {
    /// A definition with its terms computed from `limit`.
    pub fn new(index: usize, limit: BucketLimit) -> Self {
        let ban = limit.ban_terms(0.0).map(Box::new);
        Self { index, terms: limit.terms(), ban, limit, enforce: true }
    }

    /// Whether the two are the same, wherever they stand.
    pub(super) fn is_defined_as(&self, other: &Self) -> bool {
        let Self { index: _, terms: _, ban: _, limit, enforce } = self;
        (limit, *enforce) == (&other.limit, other.enforce)
    }

    /// The template of a namespace that bounds its dynamic buckets. What was asked for of a bucket has its place then,
    /// and is kept for as long as the bucket's state may exist, so that few states are without a place.
    pub(super) fn bounded(self) -> Self {
        let ban = self.limit.ban_terms(self.terms.longest_life_us()).map(Box::new);
        Self { ban, ..self }
    }
}
