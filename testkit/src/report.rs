//! Rows for the table in `docs/reliability.md`, which `scripts/reliability.sh` assembles.

use std::path::Path;

use serde_json::json;

/// One row: a fault and its effects. Figures state their unit.
pub struct Row<'a> {
    /// The fault.
    pub fault: &'a str,
    /// Answers to clients during the fault.
    pub meanwhile: &'a str,
    /// Slowest decision, such as `12 ms (p99.9 of 2,345)`.
    pub worst: String,
    /// Time from the end of the fault until decisions are shared again.
    pub recovery: String,
    /// Tokens lost or granted in excess.
    pub tokens: String,
    /// Test, as `file::name`.
    pub test: &'a str,
}

impl Row<'_> {
    /// Prints the row. If `TOLLGATE_REPORT` is set, also writes it to
    /// `$TOLLGATE_REPORT/<place>-<test name>.json`; `place` orders the table.
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
