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
        Self {
            index,
            terms: limit.terms(),
            ban: limit.ban_terms().map(Box::new),
            limit,
            enforce: true,
        }
    }
}
