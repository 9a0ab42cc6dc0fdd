//! Limits files: any text is understood or refused, in little time, with little to say about it.

use std::time::{Duration, Instant};

use tollgate_server::config::{parse, understood};

/// For a file of 64 KiB, unoptimised, on a machine that does something else besides.
const LONGEST: Duration = Duration::from_secs(10);

#[test]
fn any_limits_file() {
    testkit::fuzz::run("limits", &["limits/good", "limits/bad"], |input| {
        let text = String::from_utf8_lossy(input);
        let started = Instant::now();
        match parse(&text) {
            Ok(parsed) => {
                let printed = understood(&parsed.limits);
                assert!(parse(&printed).is_ok(), "what was understood can't be read again");
            }
            Err(faults) => {
                let said = faults.to_string();
                assert!(!said.is_empty());
                let most = 2000 * (text.lines().count() + 1) + 20 * text.len();
                assert!(said.len() < most, "{} bytes about {}", said.len(), text.len());
            }
        }
        assert!(started.elapsed() < LONGEST, "it took {:?}", started.elapsed());
    });
}
