//! Progress on stderr, once a second.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::load::tally::{LiveCounts, Window};

/// How progress is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Not at all.
    Silent,
    /// As one line, overwritten each second.
    LiveCounts,
    /// As one line per second.
    Lines,
}

impl Style {
    /// `Lines` on request, else `LiveCounts` on a terminal, else `Silent`.
    pub fn choose(lines: bool) -> Self {
        match lines {
            true => Self::Lines,
            false if std::io::stderr().is_terminal() => Self::LiveCounts,
            false => Self::Silent,
        }
    }
}

/// Prints progress until `finished` disconnects. `granted` names the outcome that [`LiveCounts::granted`]
/// counts.
pub fn watch(
    finished: &Receiver<()>,
    lives: &[Arc<LiveCounts>],
    window: Window,
    style: Style,
    granted: &str,
) {
    let mut before = LiveTotals::default();
    let mut next = window.start + Duration::from_secs(1);
    loop {
        let pause = next.saturating_duration_since(Instant::now());
        if !matches!(finished.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
            break;
        }
        if style != Style::Silent {
            let totals = LiveTotals::now(lives);
            print(style, &line(window, next, &totals, &before, granted));
            before = totals;
        }
        next += Duration::from_secs(1);
    }
    if style == Style::LiveCounts {
        print(style, "");
    }
}

fn print(style: Style, line: &str) {
    // Ignores a closed stderr.
    let _ = match style {
        Style::LiveCounts => write!(std::io::stderr(), "\r\x1b[K{line}"),
        _ => writeln!(std::io::stderr(), "{line}"),
    };
}

#[derive(Debug, Default)]
struct LiveTotals {
    decided: u64,
    granted: u64,
    failed: u64,
}

impl LiveTotals {
    fn now(lives: &[Arc<LiveCounts>]) -> Self {
        lives.iter().fold(Self::default(), |sum, live| Self {
            decided: sum.decided + live.decided.load(Ordering::Relaxed),
            granted: sum.granted + live.granted.load(Ordering::Relaxed),
            failed: sum.failed + live.failed.load(Ordering::Relaxed),
        })
    }
}

/// Summary of the second that ended at `now`.
fn line(
    window: Window,
    now: Instant,
    totals: &LiveTotals,
    before: &LiveTotals,
    label: &str,
) -> String {
    let since = |when: Instant| now.saturating_duration_since(when).as_secs_f64();
    let total = (window.end - window.start).as_secs_f64();
    let decided = totals.decided - before.decided;
    let mut line = format!("{:.0} s of {total:.0} s: {decided} requests/s", since(window.start));
    if decided > 0 {
        let granted = (totals.granted - before.granted) as f64 / decided as f64;
        let _ = write!(line, ", {:.1} % {label}", granted * 100.0);
    }
    if totals.failed > 0 {
        let _ = write!(line, ", {} failed so far", totals.failed);
    }
    if now <= window.measure_from {
        line.push_str(" (warming up)");
    } else if now > window.end {
        line.push_str(" (waiting for the last answers)");
    }
    line
}

/// Prints a line to stderr. A closed stderr is ignored.
pub fn log_line(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_covers_the_last_second() {
        let second = Duration::from_secs(1);
        let window = Window::new(Instant::now(), second, 9 * second);
        let before = LiveTotals { decided: 1000, granted: 1000, failed: 0 };
        let totals = LiveTotals { decided: 3000, granted: 1500, failed: 7 };
        assert_eq!(
            line(window, window.start + second, &before, &LiveTotals::default(), "granted"),
            "1 s of 10 s: 1000 requests/s, 100.0 % granted (warming up)"
        );
        assert_eq!(
            line(window, window.start + 2 * second, &totals, &before, "in full"),
            "2 s of 10 s: 2000 requests/s, 25.0 % in full, 7 failed so far"
        );
        assert_eq!(
            line(window, window.end + second, &before, &before, "granted"),
            "11 s of 10 s: 0 requests/s (waiting for the last answers)"
        );
    }
}
