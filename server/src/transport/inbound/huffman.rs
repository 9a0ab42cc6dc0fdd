//! HPACK's Huffman code (RFC 7541, appendix B).

/// The length of each byte's code, in bits. The code is canonical: codes of one length follow one
/// another in the order of their bytes, so that the lengths determine all of them.
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
const LONGEST: usize = 30;

/// All codes of one length.
#[derive(Clone, Copy)]
struct Codes {
    /// The first of them.
    first: u32,
    /// How many there are.
    count: u32,
    /// Where their bytes begin in [`Code::bytes`].
    offset: usize,
}

struct Code {
    /// By length in bits.
    lengths: [Codes; LONGEST + 1],
    /// In the order of their codes.
    bytes: [u8; 256],
}

static CODE: Code = Code::new();

impl Code {
    const fn new() -> Self {
        let mut lengths = [Codes { first: 0, count: 0, offset: 0 }; LONGEST + 1];
        let (mut bytes, mut placed, mut next) = ([0; 256], 0, 0_u32);
        let mut length = 1;
        while length <= LONGEST {
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
            lengths[length] = Codes { first, count: next - first, offset };
            length += 1;
        }
        Self { lengths, bytes }
    }
}

/// The bytes that were encoded; `None` if there is a code among them that stands for no byte.
/// What the last byte is filled up with is not looked at.
pub(super) fn decoded(encoded: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(encoded.len() * 8 / 5);
    let (mut code, mut length) = (0_u32, 0);
    for byte in encoded {
        for shift in (0..8).rev() {
            code = code << 1 | u32::from(byte >> shift & 1);
            length += 1;
            let codes = CODE.lengths.get(length)?;
            let number = code.wrapping_sub(codes.first);
            if number < codes.count {
                bytes.push(CODE.bytes[codes.offset + number as usize]);
                (code, length) = (0, 0);
            }
        }
    }
    Some(bytes)
}

/// Encodes them as clients do.
#[cfg(test)]
pub(super) fn encoded(bytes: &[u8]) -> Vec<u8> {
    let mut bits = Vec::new();
    for byte in bytes {
        let length = usize::from(LENGTHS[usize::from(*byte)]);
        let codes = CODE.lengths[length];
        let end = codes.offset + codes.count as usize;
        let number = CODE.bytes[codes.offset..end].iter().position(|b| b == byte).expect("a code");
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
    fn examples_of_the_specification() {
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
            assert_eq!(decoded(&code).expect("a text"), text.as_bytes());
            assert_eq!(encoded(text.as_bytes()), code);
        }
    }

    #[test]
    fn every_byte_has_a_code_of_its_own() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decoded(&encoded(&all)).expect("all bytes"), all);
        assert_eq!(decoded(&[0xff; 4]), None, "the end of a string is no byte");
    }
}
