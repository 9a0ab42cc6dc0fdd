//! Removes an invalid `:authority` from header blocks (RFC 7541), which h2 would refuse. The module
//! `inbound` says why.
//!
//! An entry that is removed from a block is missing in h2's dynamic table, while the client's table
//! has it. So indices are translated: an entry's index in h2's table is its index in the client's
//! table minus the number of newer entries that are missing. h2's table has all other entries: it
//! holds fewer of them in the same size limit, so it evicts none of them earlier.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use http::uri::Authority;

use super::huffman;

const AUTHORITY: &[u8] = b":authority";

/// `:authority` in HPACK's Huffman code.
const AUTHORITY_ENCODED: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// The index of `:authority` with an empty value in the static table.
const AUTHORITY_INDEX: usize = 1;

/// The first bytes of indexed fields of one byte, without that of the static `:authority`, 0x81.
const ONE_BYTE_INDEXED: RangeInclusive<u8> = 0x82..=0xfe;

/// The index of the newest entry of the dynamic table.
const FIRST_DYNAMIC_INDEX: usize = 62;

/// Maximum entries of a dynamic table of 4,096 bytes, which is the size that h2 allows: each entry
/// counts as its name, its value and 32 bytes.
const MAX_ENTRIES: u64 = 4096 / 32;

/// A header block or frame violates its RFC.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// An entry of the client's dynamic table whose name is `:authority`.
#[derive(Clone, Copy, Debug)]
struct AuthorityEntry {
    /// Number of entries that were inserted before it.
    number: u64,
    /// Whether h2's table lacks it.
    missing: bool,
    /// Number of older entries that were removed.
    missing_before: u64,
}

/// The difference between the client's dynamic table and h2's.
#[derive(Default)]
pub(super) struct Table {
    /// Number of entries ever inserted into the client's table.
    inserted: u64,
    /// Entries named `:authority`, oldest first. May contain entries that the client's table has
    /// evicted.
    authorities: VecDeque<AuthorityEntry>,
    /// Number of entries that were removed.
    missing: u64,
}

/// What happens to one field of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Edit {
    Keep,
    Remove,
    /// Replaces the index.
    Reindex(usize),
}

/// An index of the client's dynamic table, translated for h2.
#[derive(Clone, Copy)]
enum Translated {
    /// The index in h2's table.
    Index(usize),
    /// h2's table lacks the entry.
    Missing,
}

impl Table {
    /// Whether the tables have ever differed: then every block must be translated.
    pub(super) fn differs(&self) -> bool {
        self.missing > 0
    }

    /// Translates `block` into `out`, which is never longer. Returns `false` if the block stays
    /// unchanged; `out` is then unused.
    pub(super) fn translate(&mut self, block: &[u8], out: &mut Vec<u8>) -> Result<bool, Malformed> {
        out.clear();
        let mut reader = Reader { block, at: 0 };
        // The block up to here is in `out` or removed.
        let mut done = 0;
        while let Some(&first) = block.get(reader.at) {
            if ONE_BYTE_INDEXED.contains(&first) && !self.differs() {
                // The fast path of most fields.
                reader.at += 1;
                continue;
            }
            let start = reader.at;
            let kind = Representation::of(first);
            let index = reader.integer(kind.prefix())?;
            let index_end = reader.at;
            let edit = match kind {
                Representation::SizeUpdate => Edit::Keep,
                Representation::Indexed => self.indexed(index)?,
                Representation::Literal | Representation::LiteralToIndex => {
                    self.literal(kind, index, &mut reader)?
                }
            };
            match edit {
                Edit::Keep => continue,
                Edit::Remove => {
                    out.extend_from_slice(&block[done..start]);
                    done = reader.at;
                }
                Edit::Reindex(index) => {
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
            AUTHORITY_INDEX => Edit::Remove,
            2..FIRST_DYNAMIC_INDEX => Edit::Keep,
            _ => match self.translate_index(index)? {
                Translated::Missing => Edit::Remove,
                Translated::Index(same) if same == index => Edit::Keep,
                Translated::Index(other) => Edit::Reindex(other),
            },
        })
    }

    fn literal(
        &mut self,
        kind: Representation,
        index: usize,
        reader: &mut Reader<'_>,
    ) -> Result<Edit, Malformed> {
        let mut edit = Edit::Keep;
        let is_authority = match index {
            0 => reader.string()?.is_authority(),
            AUTHORITY_INDEX => true,
            2..FIRST_DYNAMIC_INDEX => false,
            _ if self
                .insertion_number(index)
                .is_some_and(|number| self.authority(number).is_some()) =>
            {
                if self.differs() {
                    // A missing entry has no index in h2's table, but the static table has the same
                    // name.
                    edit = Edit::Reindex(AUTHORITY_INDEX);
                }
                true
            }
            _ => {
                if let Translated::Index(other) = self.translate_index(index)?
                    && other != index
                {
                    edit = Edit::Reindex(other);
                }
                false
            }
        };
        let value = reader.string()?;
        let removed = is_authority && !value.is_valid_authority();
        if kind == Representation::LiteralToIndex {
            self.insert(is_authority, removed);
        }
        Ok(if removed { Edit::Remove } else { edit })
    }

    fn insert(&mut self, is_authority: bool, missing: bool) {
        let number = self.inserted;
        self.inserted += 1;
        if !is_authority {
            return;
        }
        self.authorities.push_back(AuthorityEntry {
            number,
            missing,
            missing_before: self.missing,
        });
        self.missing += u64::from(missing);
        while self.authorities.front().is_some_and(|oldest| oldest.number + MAX_ENTRIES <= number) {
            self.authorities.pop_front();
        }
    }

    /// How many entries were inserted before the entry at `index` of the client's table; `None` if
    /// there is no such entry.
    fn insertion_number(&self, index: usize) -> Option<u64> {
        self.inserted.checked_sub(1 + (index - FIRST_DYNAMIC_INDEX) as u64)
    }

    fn authority(&self, number: u64) -> Option<AuthorityEntry> {
        let at = self.authorities.binary_search_by_key(&number, |entry| entry.number).ok()?;
        self.authorities.get(at).copied()
    }

    fn translate_index(&self, index: usize) -> Result<Translated, Malformed> {
        let number = self.insertion_number(index).ok_or(Malformed)?;
        if !self.differs() {
            return Ok(Translated::Index(index));
        }
        let from = self.authorities.partition_point(|entry| entry.number < number);
        let Some(next) = self.authorities.get(from) else { return Ok(Translated::Index(index)) };
        if next.number == number && next.missing {
            return Ok(Translated::Missing);
        }
        let newer = (self.missing - next.missing_before) as usize;
        index.checked_sub(newer).map(Translated::Index).ok_or(Malformed)
    }
}

/// The representations of a field, or a table size update (RFC 7541, section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Representation {
    Indexed,
    LiteralToIndex,
    SizeUpdate,
    /// Without indexing, or never indexed.
    Literal,
}

impl Representation {
    fn of(first: u8) -> Self {
        match first.leading_zeros() {
            0 => Self::Indexed,
            1 => Self::LiteralToIndex,
            2 => Self::SizeUpdate,
            _ => Self::Literal,
        }
    }

    /// Bits of the first byte that belong to the integer.
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

    /// Reads an integer of at most five bytes, which is the longest that h2 reads.
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

    fn string(&mut self) -> Result<StringLiteral<'a>, Malformed> {
        let encoded = self.block.get(self.at).ok_or(Malformed)? & 0x80 != 0;
        let length = self.integer(7)?;
        let bytes = self.block.get(self.at..self.at + length).ok_or(Malformed)?;
        self.at += length;
        Ok(if encoded { StringLiteral::Encoded(bytes) } else { StringLiteral::Plain(bytes) })
    }
}

/// A string literal.
enum StringLiteral<'a> {
    Plain(&'a [u8]),
    /// Huffman-coded.
    Encoded(&'a [u8]),
}

impl StringLiteral<'_> {
    fn is_authority(&self) -> bool {
        match *self {
            Self::Plain(name) => name == AUTHORITY,
            Self::Encoded(name) => name == AUTHORITY_ENCODED,
        }
    }

    /// Applies the same rules as h2.
    fn is_valid_authority(&self) -> bool {
        let valid = |value: &[u8]| Authority::try_from(value).is_ok();
        match *self {
            Self::Plain(value) => valid(value),
            // h2 refuses strings that can't be decoded.
            Self::Encoded(value) => huffman::decode(value).is_none_or(|value| valid(&value)),
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
