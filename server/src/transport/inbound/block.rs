//! What a header block (RFC 7541) says of `:authority`, and the same block without what h2 would
//! refuse.
//!
//! An entry that is left out of a block is missing in the dynamic table of h2, too, while the
//! client's has it. So indices are translated: an entry's index in h2's table is the client's
//! less the number of newer entries that are missing. h2's table has every other entry that the
//! client's has, because it has fewer that take room.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use http::uri::Authority;

use super::huffman;

const AUTHORITY: &[u8] = b":authority";

/// The same in Huffman's code.
const AUTHORITY_ENCODED: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// The entry `:authority` without a value, in the static table.
const AUTHORITY_INDEX: usize = 1;

/// Representations of one byte, which refer to another entry.
const ONE_BYTE: RangeInclusive<u8> = 0x82..=0xfe;

/// The index of the newest entry of the dynamic table.
const NEWEST: usize = 62;

/// The most entries of a dynamic table of 4,096 bytes, which is what h2 grants: each counts as
/// its name, its value and 32 bytes.
const ENTRIES: u64 = 4096 / 32;

/// The block is not as RFC 7541 says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// An entry of the client's dynamic table whose name is `:authority`.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// How many were inserted before it.
    number: u64,
    /// h2's table does not have it.
    missing: bool,
    /// How many older ones h2's table never got.
    missing_before: u64,
}

/// How the client's dynamic table differs from that of h2.
#[derive(Default)]
pub(super) struct Table {
    /// How many entries were ever inserted into the client's.
    inserted: u64,
    /// Oldest first; those that are not in the client's any more may be among them.
    authorities: VecDeque<Entry>,
    /// How many entries h2's table never got.
    missing: u64,
}

/// What becomes of one representation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Edit {
    Keep,
    LeaveOut,
    /// Its index becomes this one.
    Index(usize),
}

/// What an index of the dynamic table refers to.
#[derive(Clone, Copy)]
enum Referred {
    /// The entry of this index in h2's table.
    Entry(usize),
    /// One that h2's table does not have.
    Missing,
}

impl Table {
    /// The tables differ, so that nothing may be handed on without a look at it.
    pub(super) fn differs(&self) -> bool {
        self.missing > 0
    }

    /// Writes the block as h2 is to read it to `out`; `false` if it is to read it as it is. It
    /// never grows.
    pub(super) fn translate(&mut self, block: &[u8], out: &mut Vec<u8>) -> Result<bool, Malformed> {
        out.clear();
        let mut reader = Reader { block, at: 0 };
        // All before this is in `out`, or left out.
        let mut done = 0;
        while let Some(&first) = block.get(reader.at) {
            if ONE_BYTE.contains(&first) && !self.differs() {
                // Nearly all are such ones.
                reader.at += 1;
                continue;
            }
            let start = reader.at;
            let kind = Kind::of(first);
            let index = reader.integer(kind.prefix())?;
            let index_end = reader.at;
            let edit = match kind {
                Kind::SizeUpdate => Edit::Keep,
                Kind::Indexed => self.indexed(index)?,
                Kind::Literal | Kind::LiteralToIndex => self.literal(kind, index, &mut reader)?,
            };
            match edit {
                Edit::Keep => continue,
                Edit::LeaveOut => {
                    out.extend_from_slice(&block[done..start]);
                    done = reader.at;
                }
                Edit::Index(index) => {
                    out.extend_from_slice(&block[done..start]);
                    write_integer(first, kind.prefix(), index, out);
                    done = index_end;
                }
            }
        }
        if done == 0 {
            return Ok(false);
        }
        out.extend_from_slice(&block[done..]);
        Ok(true)
    }

    fn indexed(&self, index: usize) -> Result<Edit, Malformed> {
        Ok(match index {
            0 => return Err(Malformed),
            AUTHORITY_INDEX => Edit::LeaveOut,
            2..NEWEST => Edit::Keep,
            _ => match self.referred(index)? {
                Referred::Missing => Edit::LeaveOut,
                Referred::Entry(same) if same == index => Edit::Keep,
                Referred::Entry(other) => Edit::Index(other),
            },
        })
    }

    fn literal(
        &mut self,
        kind: Kind,
        index: usize,
        reader: &mut Reader<'_>,
    ) -> Result<Edit, Malformed> {
        let mut edit = Edit::Keep;
        let is_authority = match index {
            0 => reader.string()?.is_authority(),
            AUTHORITY_INDEX => true,
            2..NEWEST => false,
            _ if self.number(index).is_some_and(|number| self.authority(number).is_some()) => {
                if self.differs() {
                    // Missing entries have no index in h2's table, but this name always has one.
                    edit = Edit::Index(AUTHORITY_INDEX);
                }
                true
            }
            _ => {
                if let Referred::Entry(other) = self.referred(index)?
                    && other != index
                {
                    edit = Edit::Index(other);
                }
                false
            }
        };
        let value = reader.string()?;
        let left_out = is_authority && !value.is_valid_authority();
        if kind == Kind::LiteralToIndex {
            self.insert(is_authority, left_out);
        }
        Ok(if left_out { Edit::LeaveOut } else { edit })
    }

    fn insert(&mut self, is_authority: bool, missing: bool) {
        let number = self.inserted;
        self.inserted += 1;
        if !is_authority {
            return;
        }
        self.authorities.push_back(Entry { number, missing, missing_before: self.missing });
        self.missing += u64::from(missing);
        while self.authorities.front().is_some_and(|oldest| oldest.number + ENTRIES <= number) {
            self.authorities.pop_front();
        }
    }

    /// The number of the entry with this index in the client's table.
    fn number(&self, index: usize) -> Option<u64> {
        self.inserted.checked_sub(1 + (index - NEWEST) as u64)
    }

    fn authority(&self, number: u64) -> Option<Entry> {
        let at = self.authorities.binary_search_by_key(&number, |entry| entry.number).ok()?;
        self.authorities.get(at).copied()
    }

    fn referred(&self, index: usize) -> Result<Referred, Malformed> {
        let number = self.number(index).ok_or(Malformed)?;
        if !self.differs() {
            return Ok(Referred::Entry(index));
        }
        let from = self.authorities.partition_point(|entry| entry.number < number);
        let Some(next) = self.authorities.get(from) else { return Ok(Referred::Entry(index)) };
        if next.number == number && next.missing {
            return Ok(Referred::Missing);
        }
        let newer = (self.missing - next.missing_before) as usize;
        index.checked_sub(newer).map(Referred::Entry).ok_or(Malformed)
    }
}

/// Representations (RFC 7541, section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Indexed,
    LiteralToIndex,
    SizeUpdate,
    /// Without indexing, or never indexed.
    Literal,
}

impl Kind {
    fn of(first: u8) -> Self {
        match first.leading_zeros() {
            0 => Self::Indexed,
            1 => Self::LiteralToIndex,
            2 => Self::SizeUpdate,
            _ => Self::Literal,
        }
    }

    /// How many bits of the first byte belong to the integer.
    fn prefix(self) -> u32 {
        match self {
            Self::Indexed => 7,
            Self::LiteralToIndex => 6,
            Self::SizeUpdate => 5,
            Self::Literal => 4,
        }
    }
}

struct Reader<'a> {
    block: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn byte(&mut self) -> Result<u8, Malformed> {
        let byte = *self.block.get(self.at).ok_or(Malformed)?;
        self.at += 1;
        Ok(byte)
    }

    /// An integer of at most five bytes, which is all that h2 reads.
    fn integer(&mut self, prefix: u32) -> Result<usize, Malformed> {
        let mask = (1_usize << prefix) - 1;
        let mut value = usize::from(self.byte()?) & mask;
        if value < mask {
            return Ok(value);
        }
        for shift in [0, 7, 14, 21] {
            let byte = usize::from(self.byte()?);
            value += (byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    fn string(&mut self) -> Result<Text<'a>, Malformed> {
        let encoded = self.block.get(self.at).ok_or(Malformed)? & 0x80 != 0;
        let length = self.integer(7)?;
        let bytes = self.block.get(self.at..self.at + length).ok_or(Malformed)?;
        self.at += length;
        Ok(if encoded { Text::Encoded(bytes) } else { Text::Plain(bytes) })
    }
}

/// A string literal.
enum Text<'a> {
    Plain(&'a [u8]),
    /// In Huffman's code.
    Encoded(&'a [u8]),
}

impl Text<'_> {
    fn is_authority(&self) -> bool {
        match *self {
            Self::Plain(name) => name == AUTHORITY,
            Self::Encoded(name) => name == AUTHORITY_ENCODED,
        }
    }

    /// Judges by the same rules as h2.
    fn is_valid_authority(&self) -> bool {
        let valid = |value: &[u8]| Authority::try_from(value).is_ok();
        match *self {
            Self::Plain(value) => valid(value),
            // What can't be decoded is left for h2 to refuse.
            Self::Encoded(value) => huffman::decoded(value).is_none_or(|value| valid(&value)),
        }
    }
}

fn write_integer(first: u8, prefix: u32, value: usize, out: &mut Vec<u8>) {
    let mask = (1_usize << prefix) - 1;
    let kind = first & !(mask as u8);
    if value < mask {
        out.push(kind | value as u8);
        return;
    }
    out.push(kind | mask as u8);
    let mut rest = value - mask;
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

#[cfg(test)]
mod tests;
