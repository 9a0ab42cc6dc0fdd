//! Finds the header blocks in the bytes of a client (RFC 9113, section 4).

use std::ops::Range;

use super::ResetFlag;
use super::block::{Malformed, Table};

/// Bytes of the client's connection preface.
const PREFACE_LENGTH: usize = 24;

/// Bytes of a frame header.
const FRAME_HEADER_LENGTH: usize = 9;

/// Maximum bytes of a frame's payload: the SETTINGS_MAX_FRAME_SIZE that h2 announces.
const MAX_PAYLOAD: usize = 1 << 14;

/// Maximum bytes of a header block with its frame headers. h2 closes the connection at a lower
/// limit.
const MAX_BLOCK: usize = 4 * (FRAME_HEADER_LENGTH + MAX_PAYLOAD);

/// Maximum frames of a header block. h2 closes the connection at a lower limit.
const MAX_BLOCK_FRAMES: usize = 8;

/// Frames passed on at a time that neither carry a request nor reset one. A client with 200 streams
/// rarely sends more of them in one read.
const MAX_CONTROL_FRAMES: usize = 64;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const CONTINUATION: u8 = 9;

/// Bytes of a RST_STREAM payload.
const RST_LENGTH: usize = 4;

const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Bytes of the priority fields of a HEADERS frame.
const PRIORITY_LENGTH: usize = 5;

/// A malformed header block or frame arrived while the client's dynamic table differs from h2's, so
/// h2 can't judge it.
#[derive(Debug, thiserror::Error)]
#[error("a malformed header block")]
pub(super) struct TablesDiffer;

/// The result of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Checked {
    /// Length of the first part of the bytes, which h2 can read.
    pub(super) ready: usize,
    /// Start of the bytes that are not checked yet, or that are an incomplete frame or header
    /// block.
    pub(super) rest: usize,
    /// Whether the check stopped at [`MAX_CONTROL_FRAMES`]: the rest can be checked before more is
    /// read.
    pub(super) has_unchecked: bool,
}

/// The parser state of one connection.
pub(super) struct Frames {
    /// Bytes to pass on before the next frame header.
    skip: usize,
    /// The highest stream that the client has opened; 0 if it has opened none.
    opened: u32,
    table: Table,
    /// The translated header block.
    out: Vec<u8>,
}

impl Default for Frames {
    fn default() -> Self {
        Self { skip: PREFACE_LENGTH, opened: 0, table: Table::default(), out: Vec::new() }
    }
}

impl Frames {
    /// Checks the next bytes of the connection, and moves those that h2 is to read to their start.
    /// After the first malformed frame all bytes pass unchanged, and h2 reports the error; an error
    /// here if the dynamic tables differ by then.
    pub(super) fn check(
        &mut self,
        bytes: &mut [u8],
        resets: &ResetFlag,
    ) -> Result<Checked, TablesDiffer> {
        let (mut read, mut written) = (0, 0);
        let mut control_frames = 0;
        let has_unchecked = loop {
            let skipped = self.skip.min(bytes.len() - read);
            if written < read {
                bytes.copy_within(read..read + skipped, written);
            }
            (read, written) = (read + skipped, written + skipped);
            self.skip -= skipped;
            let Some(header) = FrameHeader::parse(&bytes[read..]) else { break false };
            if !matches!(header.kind, DATA | HEADERS | RST_STREAM) {
                control_frames += 1;
                if control_frames > MAX_CONTROL_FRAMES {
                    break true;
                }
            }
            match header.kind {
                RST_STREAM if self.is_unopened(&header) => {
                    let length = FRAME_HEADER_LENGTH + header.length;
                    if bytes.len() - read < length {
                        break false;
                    }
                    read += length;
                }
                HEADERS => match self.take_block(bytes, read, written) {
                    Ok(Some(positions)) => (read, written) = positions,
                    Ok(None) => break false,
                    Err(Malformed) => self.pass_through()?,
                },
                CONTINUATION => self.pass_through()?,
                kind => {
                    if kind == RST_STREAM {
                        resets.set();
                    }
                    self.skip = FRAME_HEADER_LENGTH + header.length;
                }
            }
        };
        Ok(Checked { ready: written, rest: read, has_unchecked })
    }

    /// Whether a RST_STREAM frame is well-formed and its stream is a client's, but not opened.
    fn is_unopened(&self, header: &FrameHeader) -> bool {
        header.length == RST_LENGTH && header.stream % 2 == 1 && header.stream > self.opened
    }

    /// Translates the header block at `read`, and moves it to `written` if it changes. Returns the
    /// positions after it; those before it if it stays as it is, to be passed on by `skip`. `None`
    /// if the block is incomplete.
    fn take_block(
        &mut self,
        bytes: &mut [u8],
        read: usize,
        written: usize,
    ) -> Result<Option<(usize, usize)>, Malformed> {
        let Some(block) = Block::parse(&bytes[read..])? else { return Ok(None) };
        let translated = self.translate(&block, &mut bytes[read..])?;
        self.opened = self.opened.max(block.stream);
        let Some(length) = translated else {
            self.skip = block.length;
            return Ok(Some((read, written)));
        };
        bytes.copy_within(read..read + length, written);
        Ok(Some((read + block.length, written + length)))
    }

    /// Translates a header block, and rewrites its frames if it changes. Returns the new length of
    /// the frames; `None` if they stay as they are.
    fn translate(&mut self, block: &Block, bytes: &mut [u8]) -> Result<Option<usize>, Malformed> {
        let joined;
        let fragment = if block.is_one_frame {
            &bytes[block.fragment.clone()]
        } else {
            joined = block.joined(bytes);
            &joined
        };
        let changed = self.table.translate(fragment, &mut self.out)?;
        Ok(changed.then(|| block.rewrite(&self.out, bytes)))
    }

    fn pass_through(&mut self) -> Result<(), TablesDiffer> {
        if self.table.differs() {
            return Err(TablesDiffer);
        }
        self.skip = usize::MAX;
        Ok(())
    }
}

/// A frame header.
struct FrameHeader {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl FrameHeader {
    /// Parses the header at the start of `bytes`; `None` if it is incomplete.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let &[l0, l1, l2, kind, flags, s0, s1, s2, s3] =
            bytes.first_chunk::<FRAME_HEADER_LENGTH>()?;
        let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        let stream = u32::from_be_bytes([s0, s1, s2, s3]) & (u32::MAX >> 1);
        Some(Self { length, kind, flags, stream })
    }

    fn write(&self, bytes: &mut [u8]) {
        let [_, length @ ..] = (self.length as u32).to_be_bytes();
        bytes[..3].copy_from_slice(&length);
        bytes[3] = self.kind;
        bytes[4] = self.flags;
        bytes[5..FRAME_HEADER_LENGTH].copy_from_slice(&self.stream.to_be_bytes());
    }
}

/// A HEADERS frame with its CONTINUATION frames. Ranges count from its first byte.
struct Block {
    /// Bytes of all frames with their headers.
    length: usize,
    flags: u8,
    stream: u32,
    /// The priority fields; empty if the frame has none.
    priority: Range<usize>,
    /// The part of the header block in the HEADERS frame.
    fragment: Range<usize>,
    /// Whether there is no CONTINUATION frame.
    is_one_frame: bool,
}

impl Block {
    /// Parses the frames of a header block at the start of `bytes`; `None` if they are incomplete.
    fn parse(bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        let Some(header) = FrameHeader::parse(bytes) else { return Ok(None) };
        let mut length = FRAME_HEADER_LENGTH + header.length;
        if header.length > MAX_PAYLOAD {
            return Err(Malformed);
        }
        if bytes.len() < length {
            return Ok(None);
        }
        let (priority, fragment) = parts(&header, bytes)?;
        let (mut ended, mut frames) = (header.flags & END_HEADERS != 0, 1);
        let is_one_frame = ended;
        while !ended {
            let Some(next) = FrameHeader::parse(&bytes[length..]) else { return Ok(None) };
            length += FRAME_HEADER_LENGTH + next.length;
            frames += 1;
            let follows = next.kind == CONTINUATION && next.stream == header.stream;
            if !follows
                || next.length > MAX_PAYLOAD
                || length > MAX_BLOCK
                || frames > MAX_BLOCK_FRAMES
            {
                return Err(Malformed);
            }
            if bytes.len() < length {
                return Ok(None);
            }
            ended = next.flags & END_HEADERS != 0;
        }
        let (flags, stream) = (header.flags, header.stream);
        Ok(Some(Self { length, flags, stream, priority, fragment, is_one_frame }))
    }

    /// Joins the parts of the header block.
    fn joined(&self, bytes: &[u8]) -> Vec<u8> {
        let mut joined = bytes[self.fragment.clone()].to_vec();
        let payload = |at| {
            FrameHeader::parse(&bytes[at..]).map(|header| at + FRAME_HEADER_LENGTH + header.length)
        };
        let mut at = payload(0);
        while let Some(start) = at
            && start < self.length
            && let Some(end) = payload(start)
        {
            joined.extend_from_slice(&bytes[start + FRAME_HEADER_LENGTH..end]);
            at = Some(end);
        }
        joined
    }

    /// Overwrites the frames with those of `block`, which is not longer, without padding. Returns
    /// their length. They fit, because each of them but the last is full.
    fn rewrite(&self, block: &[u8], bytes: &mut [u8]) -> usize {
        let priority = self.priority.len();
        bytes.copy_within(self.priority.clone(), FRAME_HEADER_LENGTH);
        let (first, rest) = block.split_at(block.len().min(MAX_PAYLOAD - priority));
        let start = FRAME_HEADER_LENGTH + priority;
        bytes[start..start + first.len()].copy_from_slice(first);
        let mut written = start + first.len();
        let mut last = 0;
        for part in rest.chunks(MAX_PAYLOAD) {
            last = written;
            let (length, stream) = (part.len(), self.stream);
            FrameHeader { length, kind: CONTINUATION, flags: 0, stream }
                .write(&mut bytes[written..]);
            written += FRAME_HEADER_LENGTH;
            bytes[written..written + part.len()].copy_from_slice(part);
            written += part.len();
        }
        let flags = self.flags & !(PADDED | END_HEADERS);
        let (length, stream) = (priority + first.len(), self.stream);
        FrameHeader { length, kind: HEADERS, flags, stream }.write(bytes);
        bytes[last + 4] |= END_HEADERS;
        written
    }
}

/// The ranges of the priority fields and of the header block in a complete HEADERS frame.
fn parts(header: &FrameHeader, bytes: &[u8]) -> Result<(Range<usize>, Range<usize>), Malformed> {
    let mut start = FRAME_HEADER_LENGTH;
    let mut end = FRAME_HEADER_LENGTH + header.length;
    if header.flags & PADDED != 0 {
        let padding = *bytes[start..end].first().ok_or(Malformed)?;
        start += 1;
        end = end.checked_sub(usize::from(padding)).ok_or(Malformed)?;
    }
    let priority =
        if header.flags & PRIORITY != 0 { start..start + PRIORITY_LENGTH } else { start..start };
    if priority.end > end {
        return Err(Malformed);
    }
    if let Some(parent) = bytes[priority.clone()].first_chunk()
        && u32::from_be_bytes(*parent) & (u32::MAX >> 1) == header.stream
    {
        // h2 refuses a stream that depends on itself before it reads the block.
        return Err(Malformed);
    }
    Ok((priority.clone(), priority.end..end))
}
