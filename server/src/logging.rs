//! Log lines: how they look, and that a failure which repeats doesn't flood them.

use std::fmt::{self, Write as _};
use std::io::IsTerminal;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Sends this process's log lines to standard error. `level` is a level, or a filter in
/// tracing's syntax.
pub fn init(format: LogFormat, level: &str) -> Result<(), String> {
    // The filter's syntax takes any other word for a target, and would then log nothing else.
    let word = |part: &&str| !part.contains(['=', '[']) && LevelFilter::from_str(part).is_err();
    if let Some(part) = level.split(',').find(word) {
        return Err(format!(
            "--log-level: {part:?} is no level; use error, warn, info, debug, trace or off, \
             or a filter like info,tollgate_server=debug"
        ));
    }
    let filter = EnvFilter::try_new(level).map_err(|error| format!("--log-level: {error}"))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    }
    .map_err(|error| error.to_string())
}

/// The most characters of a text that a line of the log repeats.
const SHOWN: usize = 300;

/// A text that may have come from elsewhere, as a part of a line of the log: on that line, readable,
/// and not too long.
pub struct Shown<T>(pub T);

impl<T: fmt::Display> fmt::Display for Shown<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        let mut left = SHOWN;
        for c in text.chars() {
            let plain = matches!(c, '"' | '\'' | '\\');
            let length = if plain { 1 } else { c.escape_debug().len() };
            if length > left {
                return f.write_char('…');
            }
            left -= length;
            if plain { f.write_char(c)? } else { c.escape_debug().fmt(f)? }
        }
        Ok(())
    }
}

/// Lets one line a second through, and says how many it held back.
#[derive(Default)]
pub struct Repeating {
    held_back: AtomicU64,
    last: Mutex<Option<Instant>>,
}

impl Repeating {
    /// `Some(n)`: write a line now, n were held back since the last; `None`: don't. Nobody waits for
    /// another thread here.
    pub fn pass(&self) -> Option<u64> {
        let mut last = match self.last.try_lock() {
            Ok(last) => last,
            Err(TryLockError::Poisoned(last)) => last.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.held_back.fetch_add(1, Ordering::Relaxed);
                return None;
            }
        };
        if last.is_some_and(|last| last.elapsed() < Duration::from_secs(1)) {
            self.held_back.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        *last = Some(Instant::now());
        Some(self.held_back.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_from_elsewhere_stays_on_its_line() {
        let shown = |text: &str| Shown(text).to_string();
        assert_eq!(
            shown("no \"quotes\" 'are' \\ changed: ключ"),
            "no \"quotes\" 'are' \\ changed: ключ"
        );
        assert_eq!(shown("a\nb\r\0\u{1b}[31m"), "a\\nb\\r\\0\\u{1b}[31m");
        assert_eq!(shown("\u{202e}\u{2066}\u{feff}\u{85}"), "\\u{202e}\\u{2066}\\u{feff}\\u{85}");
        assert_eq!(shown(&"x".repeat(300)), "x".repeat(300));
        assert_eq!(shown(&"x".repeat(301)), "x".repeat(300) + "…");
        assert!(shown(&"\u{1}".repeat(10_000)).chars().count() <= 301);
    }
}
