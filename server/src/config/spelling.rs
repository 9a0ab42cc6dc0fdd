//! Suggestions for misspelt keys and words.

/// The closest of `names` to the misspelt `word`; `None` if none is close. Ignores case, `_` and
/// `-`, so that `fillRate` matches `fill_rate`. Allows one edit per three letters.
pub(super) fn nearest<'k>(word: &str, names: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    if word.len() > 64 {
        return None;
    }
    let bare = |word: &str| word.replace(['_', '-'], "").to_lowercase();
    let word = bare(word);
    let max_distance = (word.chars().count() / 3).max(1);
    names
        .map(|name| (strsim::osa_distance(&word, &bare(name)), name))
        .filter(|(distance, name)| *distance <= max_distance && *distance < name.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_names() {
        let names = ["size", "fill_rate", "max_debt_millis", "max_idle_millis"];
        let cases = [
            ("fil_rate", Some("fill_rate")),
            ("fillRate", Some("fill_rate")),
            ("FILL-RATE", Some("fill_rate")),
            ("sise", Some("size")),
            ("max_dept_millis", Some("max_debt_millis")),
            ("rate", None),
            ("", None),
            ("xyz", None),
        ];
        for (word, expected) in cases {
            assert_eq!(nearest(word, names.into_iter()), expected, "{word}");
        }
        assert_eq!(nearest(&"size".repeat(1000), names.into_iter()), None);
    }
}
