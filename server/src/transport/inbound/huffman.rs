//! HPACK's Huffman code (RFC 7541, appendix B).

/// The length of each byte's code, in bits. The code is canonical: codes of one length are
/// consecutive, in the order of their bytes, so the lengths determine all codes.
#[rustfmt::skip]
const LENGTHS: [u8; 256] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5,
    6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
];

/// The longest code, in bits.
const MAX_CODE_BITS: usize = 30;

/// The codes of one length.
#[derive(Clone, Copy)]
struct CodeRange {
    /// The first code.
    first: u32,
    /// Number of codes.
    count: u32,
    /// Index of their first byte in [`CodeTable::bytes`].
    offset: usize,
}

struct CodeTable {
    /// By code length in bits.
    lengths: [CodeRange; MAX_CODE_BITS + 1],
    /// The bytes in the order of their codes.
    bytes: [u8; 256],
}

static CODE_TABLE: CodeTable = CodeTable::new();

impl CodeTable {
    const fn new() -> Self {
        let mut lengths = [CodeRange { first: 0, count: 0, offset: 0 }; MAX_CODE_BITS + 1];
        let (mut bytes, mut placed, mut next) = ([0; 256], 0, 0_u32);
        let mut length = 1;
        while length <= MAX_CODE_BITS {
            next <<= 1;
            let (first, offset) = (next, placed);
            let mut byte = 0;
            while byte < LENGTHS.len() {
                if LENGTHS[byte] as usize == length {
                    bytes[placed] = byte as u8;
                    placed += 1;
                    next += 1;
                }
                byte += 1;
            }
            lengths[length] = CodeRange { first, count: next - first, offset };
            length += 1;
        }
        Self { lengths, bytes }
    }
}

/// Decodes a string; `None` if it contains a code that stands for no byte. Ignores the padding of
/// the last byte.
pub(super) fn decode(encoded: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(encoded.len() * 8 / 5);
    let (mut code, mut length) = (0_u32, 0);
    for byte in encoded {
        for shift in (0..8).rev() {
            code = code << 1 | u32::from(byte >> shift & 1);
            length += 1;
            let codes = CODE_TABLE.lengths.get(length)?;
            let number = code.wrapping_sub(codes.first);
            if number < codes.count {
                bytes.push(CODE_TABLE.bytes[codes.offset + number as usize]);
                (code, length) = (0, 0);
            }
        }
    }
    Some(bytes)
}

/// Encodes a string as clients do.
#[cfg(test)]
pub(super) fn encode(bytes: &[u8]) -> Vec<u8> {
    let mut bits = Vec::new();
    for byte in bytes {
        let length = usize::from(LENGTHS[usize::from(*byte)]);
        let codes = CODE_TABLE.lengths[length];
        let end = codes.offset + codes.count as usize;
        let number =
            CODE_TABLE.bytes[codes.offset..end].iter().position(|b| b == byte).expect("a code");
        let code = codes.first + number as u32;
        bits.extend((0..length).rev().map(|shift| code >> shift & 1));
    }
    bits.resize(bits.len().next_multiple_of(8), 1);
    bits.chunks(8).map(|bits| bits.iter().fold(0, |byte, bit| byte << 1 | *bit as u8)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_of_rfc_7541() {
        // RFC 7541, C.4 and C.6.
        for (text, code) in [
            ("www.example.com", "f1e3c2e5f23a6ba0ab90f4ff"),
            ("no-cache", "a8eb10649cbf"),
            ("custom-value", "25a849e95bb8e8b4bf"),
            ("Mon, 21 Oct 2013 20:13:21 GMT", "d07abe941054d444a8200595040b8166e082a62d1bff"),
        ] {
            let code: Vec<u8> = (0..code.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&code[at..at + 2], 16).expect("digits"))
                .collect();
            assert_eq!(decode(&code).expect("a text"), text.as_bytes());
            assert_eq!(encode(text.as_bytes()), code);
        }
    }

    #[test]
    fn every_byte_has_its_own_code() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)).expect("all bytes"), all);
        assert_eq!(decode(&[0xff; 4]), None, "EOS is not a byte");
    }
}
