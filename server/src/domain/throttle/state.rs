//! Histories as `lua/throttle.lua` encodes them.

use super::{Entered, History};
use crate::domain::log::Log;
use crate::domain::time::Micros;

/// Reads numbers and bytes, each from where the last one ended.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    /// A little-endian number of up to 7 bytes.
    fn number(&mut self, bytes: usize) -> Option<i64> {
        let mut number = [0; 8];
        number[..bytes].copy_from_slice(self.bytes(bytes)?);
        Some(i64::from_le_bytes(number))
    }
}

impl History {
    /// Decodes a value that the script has written; `None` for any other. The script describes the format.
    pub fn decode(value: &[u8]) -> Option<Self> {
        let mut reader = Reader(value);
        let count = reader.number(1)?;
        let last = reader.number(7)?;
        let heads: Option<Vec<_>> =
            (0..count).map(|_| Some((reader.number(7)?, reader.number(2)?))).collect();
        let mut all = heads?.into_iter().map(|(at, length)| {
            let log = Log::decode(reader.bytes(usize::try_from(length).ok()?)?)?;
            let at = Some(Micros(at)).filter(|at| at.0 > 0);
            (at.is_none_or(|at| at.0 <= last)).then_some(Entered { at, log })
        });
        let second = all.next().unwrap_or_else(|| Some(Entered::default()))?;
        let tiers = all.collect::<Option<_>>()?;
        Some(Self { last: Micros(last), second, tiers })
    }
}
