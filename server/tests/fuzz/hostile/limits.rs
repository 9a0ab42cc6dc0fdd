//! Limits files: any text is accepted or refused quickly, with messages of bounded length.

use std::time::{Duration, Instant};

use tollgate_server::config::{parse, to_yaml};

/// Time limit for 64 KiB in an unoptimized build on a busy machine.
const LONGEST: Duration = Duration::from_secs(10);

#[test]
fn any_limits_file() {
    testkit::fuzz::run("limits", &["limits/good", "limits/bad"], |input| {
        let text = String::from_utf8_lossy(input);
        let started = Instant::now();
        match parse(&text) {
            Ok(parsed) => {
                let printed = to_yaml(&parsed.limits);
                assert!(parse(&printed).is_ok(), "the printed limits can't be parsed");
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
