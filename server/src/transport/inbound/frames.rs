//! Finds the header blocks in what a client sends (RFC 9113, section 4).

use std::ops::Range;

use super::Resets;
use super::block::{Malformed, Table};

/// The bytes of a client's preface.
const PREFACE: usize = 24;

/// The bytes of a frame's head.
const HEAD: usize = 9;

/// The most bytes of a frame's payload, which is what h2 grants.
const LONGEST: usize = 1 << 14;

/// The most bytes of a header block with the heads of its frames. h2 closes the connection for
/// less.
const LONGEST_BLOCK: usize = 4 * (HEAD + LONGEST);

/// The most frames of one. h2 closes the connection for less.
const MOST_FRAMES: usize = 8;

/// The most frames at a time that neither carry a request nor reset one. A client with 200 streams
/// sends hardly more of them in what is read at once.
const MOST_OTHERS: usize = 64;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const CONTINUATION: u8 = 9;

/// The bytes of a RST_STREAM frame's payload.
const RST_LENGTH: usize = 4;

const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// The bytes of a stream's priority.
const PRIORITY_LENGTH: usize = 5;

/// The client sent what is no header block after its table had come to differ from that of h2:
/// h2 can't judge it.
#[derive(Debug, thiserror::Error)]
#[error("a malformed header block")]
pub(super) struct TablesDiffer;

/// What was found in bytes that came.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Checked {
    /// So many from the first on are for h2.
    pub(super) ready: usize,
    /// From here on nothing was looked at, or more is needed before anything can be said.
    pub(super) rest: usize,
    /// There was enough for one time: the rest can be checked before more is read.
    pub(super) more: bool,
}

/// Where a connection is, between two frames or within one.
pub(super) struct Frames {
    /// How many of the next bytes are in no header block.
    skip: usize,
    /// The highest stream that the client has opened; 0: none.
    opened: u32,
    table: Table,
    /// A block as h2 is to read it.
    out: Vec<u8>,
}

impl Default for Frames {
    fn default() -> Self {
        Self { skip: PREFACE, opened: 0, table: Table::default(), out: Vec::new() }
    }
}

impl Frames {
    /// Looks at bytes that follow those before, and writes those that are for h2 to the beginning.
    /// After the first frame that makes no sense all goes on unchanged: h2 judges it.
    pub(super) fn check(
        &mut self,
        bytes: &mut [u8],
        resets: &Resets,
    ) -> Result<Checked, TablesDiffer> {
        let (mut read, mut written) = (0, 0);
        let mut others = 0;
        let more = loop {
            let skipped = self.skip.min(bytes.len() - read);
            if written < read {
                bytes.copy_within(read..read + skipped, written);
            }
            (read, written) = (read + skipped, written + skipped);
            self.skip -= skipped;
            let Some(head) = Head::first_of(&bytes[read..]) else { break false };
            if !matches!(head.kind, DATA | HEADERS | RST_STREAM) {
                others += 1;
                if others > MOST_OTHERS {
                    break true;
                }
            }
            match head.kind {
                RST_STREAM if self.is_unopened(&head) => {
                    let length = HEAD + head.length;
                    if bytes.len() - read < length {
                        break false;
                    }
                    read += length;
                }
                HEADERS => match Block::first_of(&bytes[read..]) {
                    Ok(Some(block)) => match self.translate(&block, &mut bytes[read..]) {
                        Ok(None) => {
                            self.opened = self.opened.max(block.stream);
                            self.skip = block.length;
                        }
                        Ok(Some(length)) => {
                            self.opened = self.opened.max(block.stream);
                            bytes.copy_within(read..read + length, written);
                            (read, written) = (read + block.length, written + length);
                        }
                        Err(Malformed) => self.give_up()?,
                    },
                    Ok(None) => break false,
                    Err(Malformed) => self.give_up()?,
                },
                CONTINUATION => self.give_up()?,
                kind => {
                    if kind == RST_STREAM {
                        resets.seen();
                    }
                    self.skip = HEAD + head.length;
                }
            }
        };
        Ok(Checked { ready: written, rest: read, more })
    }

    /// Whether the frame is of a client's stream that has not been opened.
    fn is_unopened(&self, head: &Head) -> bool {
        head.length == RST_LENGTH && head.stream % 2 == 1 && head.stream > self.opened
    }

    /// Writes the block's frames anew where h2 is to read another one: how long they are then.
    fn translate(&mut self, block: &Block, bytes: &mut [u8]) -> Result<Option<usize>, Malformed> {
        let gathered;
        let fragment = if block.is_one_frame {
            &bytes[block.fragment.clone()]
        } else {
            gathered = block.gathered(bytes);
            &gathered
        };
        let changed = self.table.translate(fragment, &mut self.out)?;
        Ok(changed.then(|| block.rewrite(&self.out, bytes)))
    }

    fn give_up(&mut self) -> Result<(), TablesDiffer> {
        if self.table.differs() {
            return Err(TablesDiffer);
        }
        self.skip = usize::MAX;
        Ok(())
    }
}

/// What precedes a frame's payload.
struct Head {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl Head {
    /// `None`: it is not whole.
    fn first_of(bytes: &[u8]) -> Option<Self> {
        let &[l0, l1, l2, kind, flags, s0, s1, s2, s3] = bytes.first_chunk::<HEAD>()?;
        let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        let stream = u32::from_be_bytes([s0, s1, s2, s3]) & (u32::MAX >> 1);
        Some(Self { length, kind, flags, stream })
    }

    fn write(&self, bytes: &mut [u8]) {
        let [_, length @ ..] = (self.length as u32).to_be_bytes();
        bytes[..3].copy_from_slice(&length);
        bytes[3] = self.kind;
        bytes[4] = self.flags;
        bytes[5..HEAD].copy_from_slice(&self.stream.to_be_bytes());
    }
}

/// A HEADERS frame with the CONTINUATION frames that follow it. Ranges are from its first byte on.
struct Block {
    /// Of all frames, with their heads.
    length: usize,
    flags: u8,
    stream: u32,
    /// Empty if the frame has none.
    priority: Range<usize>,
    /// What the HEADERS frame has of the block.
    fragment: Range<usize>,
    /// There is no CONTINUATION.
    is_one_frame: bool,
}

impl Block {
    /// The one that these bytes begin with; `None`: it is not whole.
    fn first_of(bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        let Some(head) = Head::first_of(bytes) else { return Ok(None) };
        let mut length = HEAD + head.length;
        if head.length > LONGEST {
            return Err(Malformed);
        }
        if bytes.len() < length {
            return Ok(None);
        }
        let (priority, fragment) = parts(&head, bytes)?;
        let (mut is_over, mut frames) = (head.flags & END_HEADERS != 0, 1);
        let is_one_frame = is_over;
        while !is_over {
            let Some(next) = Head::first_of(&bytes[length..]) else { return Ok(None) };
            length += HEAD + next.length;
            frames += 1;
            let follows = next.kind == CONTINUATION && next.stream == head.stream;
            if !follows || next.length > LONGEST || length > LONGEST_BLOCK || frames > MOST_FRAMES {
                return Err(Malformed);
            }
            if bytes.len() < length {
                return Ok(None);
            }
            is_over = next.flags & END_HEADERS != 0;
        }
        let (flags, stream) = (head.flags, head.stream);
        Ok(Some(Self { length, flags, stream, priority, fragment, is_one_frame }))
    }

    /// The parts of all frames.
    fn gathered(&self, bytes: &[u8]) -> Vec<u8> {
        let mut gathered = bytes[self.fragment.clone()].to_vec();
        let payload = |at| Head::first_of(&bytes[at..]).map(|head| at + HEAD + head.length);
        let mut at = payload(0);
        while let Some(start) = at
            && start < self.length
            && let Some(end) = payload(start)
        {
            gathered.extend_from_slice(&bytes[start + HEAD..end]);
            at = Some(end);
        }
        gathered
    }

    /// Writes the frames of another block, which is no longer, over this one, without padding. They
    /// take no more room, as only the last of them is not full.
    fn rewrite(&self, block: &[u8], bytes: &mut [u8]) -> usize {
        let priority = self.priority.len();
        bytes.copy_within(self.priority.clone(), HEAD);
        let (first, rest) = block.split_at(block.len().min(LONGEST - priority));
        let start = HEAD + priority;
        bytes[start..start + first.len()].copy_from_slice(first);
        let mut written = start + first.len();
        let mut last = 0;
        for part in rest.chunks(LONGEST) {
            last = written;
            let (length, stream) = (part.len(), self.stream);
            Head { length, kind: CONTINUATION, flags: 0, stream }.write(&mut bytes[written..]);
            written += HEAD;
            bytes[written..written + part.len()].copy_from_slice(part);
            written += part.len();
        }
        let flags = self.flags & !(PADDED | END_HEADERS);
        let (length, stream) = (priority + first.len(), self.stream);
        Head { length, kind: HEADERS, flags, stream }.write(bytes);
        bytes[last + 4] |= END_HEADERS;
        written
    }
}

/// Where the priority and the block's first part are in a HEADERS frame that is whole.
fn parts(head: &Head, bytes: &[u8]) -> Result<(Range<usize>, Range<usize>), Malformed> {
    let mut start = HEAD;
    let mut end = HEAD + head.length;
    if head.flags & PADDED != 0 {
        let padding = *bytes[start..end].first().ok_or(Malformed)?;
        start += 1;
        end = end.checked_sub(usize::from(padding)).ok_or(Malformed)?;
    }
    let priority =
        if head.flags & PRIORITY != 0 { start..start + PRIORITY_LENGTH } else { start..start };
    if priority.end > end {
        return Err(Malformed);
    }
    if let Some(parent) = bytes[priority.clone()].first_chunk()
        && u32::from_be_bytes(*parent) & (u32::MAX >> 1) == head.stream
    {
        // h2 refuses a stream that depends on itself before it reads the block.
        return Err(Malformed);
    }
    Ok((priority.clone(), priority.end..end))
}
