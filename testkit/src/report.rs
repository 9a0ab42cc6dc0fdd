//! Rows for the table of `docs/reliability.md`, which `scripts/reliability.sh` puts together.

use std::path::Path;

use serde_json::json;

/// One row: what was done to a cluster, and what came of it. Every figure says what it counts.
pub struct Row<'a> {
    /// What is broken, and how.
    pub fault: &'a str,
    /// What clients are answered while it is.
    pub meanwhile: &'a str,
    /// The slowest decision, such as `12 ms (p99.9 of 2,345)`.
    pub worst: String,
    /// From the end of the fault until decisions are shared again.
    pub recovery: String,
    /// Tokens lost or granted too many.
    pub tokens: String,
    /// `file::name` of the test.
    pub test: &'a str,
}

impl Row<'_> {
    /// Prints it, and writes it to `$TOLLGATE_REPORT/<place>-<name of the test>.json` where that
    /// is set. The table is in the order of the places.
    pub fn write(&self, place: u32) {
        let Self { fault, meanwhile, worst, recovery, tokens, test } = self;
        println!("{fault} | {meanwhile} | {worst} | {recovery} | {tokens} | {test}");
        let Some(dir) = std::env::var_os("TOLLGATE_REPORT") else { return };
        let name = test.rsplit("::").next().unwrap_or(test);
        let row = json!({
            "place": place, "fault": fault, "meanwhile": meanwhile, "worst": worst,
            "recovery": recovery, "tokens": tokens, "test": test,
        });
        let path = Path::new(&dir).join(format!("{place:04}-{name}.json"));
        std::fs::write(&path, format!("{row:#}\n")).unwrap();
    }
}
