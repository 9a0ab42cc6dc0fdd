//! Numbers of YAML's core schema.

/// A number of YAML's core schema.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Number {
    /// The nearest double. Infinite or NaN if written so; infinite if too large.
    pub(super) value: f64,
    /// The exact value if it is a whole number in range; else `None`.
    pub(super) whole: Option<i128>,
}

/// Parses a number such as `100`, `-1`, `0x1f`, `0o17`, `1.5`, `.5`, `1e3`, `.inf`, `.nan`.
pub(super) fn number(text: &str) -> Option<Number> {
    let radix = |digits: &str, radix| {
        let whole =
            i128::from_str_radix(digits, radix).ok().filter(|_| !digits.starts_with(['+', '-']));
        whole.map(|whole| Number { value: whole as f64, whole: Some(whole) })
    };
    if let Some(digits) = text.strip_prefix("0x") {
        return radix(digits, 16);
    }
    if let Some(digits) = text.strip_prefix("0o") {
        return radix(digits, 8);
    }
    if let Ok(whole) = text.parse::<i128>() {
        return Some(Number { value: whole as f64, whole: Some(whole) });
    }
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let value = match unsigned {
        ".inf" | ".Inf" | ".INF" if text.starts_with('-') => f64::NEG_INFINITY,
        ".inf" | ".Inf" | ".INF" => f64::INFINITY,
        ".nan" | ".NaN" | ".NAN" if text == unsigned => f64::NAN,
        // Rust's parser also accepts "inf", "infinity" and "nan", which YAML does not.
        _ if unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.') => text.parse().ok()?,
        _ => return None,
    };
    let exact = value.fract() == 0.0 && value.abs() <= 2_f64.powi(63);
    Some(Number { value, whole: exact.then_some(value as i128) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_numbers_of_the_core_schema() {
        let whole = [
            ("0", 0),
            ("-1", -1),
            ("+5", 5),
            ("007", 7),
            ("0x1F", 31),
            ("0o17", 15),
            ("1e3", 1000),
            ("100.0", 100),
            ("5.", 5),
            ("-0.0", 0),
            ("9007199254740993", 9_007_199_254_740_993),
            ("99999999999999999999", 99_999_999_999_999_999_999),
        ];
        for (text, expected) in whole {
            assert_eq!(number(text).and_then(|n| n.whole), Some(expected), "{text}");
        }
        for (text, expected) in
            [(".5", 0.5), ("1.5e-3", 0.0015), ("-.25", -0.25), ("1e400", f64::INFINITY)]
        {
            let number = number(text).expect(text);
            assert_eq!((number.value, number.whole), (expected, None), "{text}");
        }
        assert_eq!(number("-.inf").map(|n| n.value), Some(f64::NEG_INFINITY));
        assert!(number(".nan").is_some_and(|n| n.value.is_nan() && n.whole.is_none()));
        for text in [
            "", ".", "-", "1_000", "1,000", "inf", "nan", "NaN", "infinity", "-.nan", "1e", "0x",
            "0x-1", "0x+1", "0b1", "ten", "1 000", "--1", "1.2.3", "0xg", "-0x1", "١",
        ] {
            assert_eq!(number(text), None, "{text:?}");
        }
    }
}
