//! Log output: its format, its filter, and rate limits for repeated messages.

use std::fmt::{self, Write as _};
use std::io::IsTerminal;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

pub use tollgate_common::LogThrottle;

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Human-readable text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Installs the logger of this process, which writes to standard error. `level` is a level, or a
/// filter in the syntax of `tracing_subscriber::EnvFilter`.
pub fn init(format: LogFormat, level: &str) -> Result<(), String> {
    // `EnvFilter` takes an unknown level for a target, and then logs nothing else.
    let unknown_level =
        |part: &&str| !part.contains(['=', '[']) && LevelFilter::from_str(part).is_err();
    if let Some(part) = level.split(',').find(unknown_level) {
        return Err(format!(
            "--log-level: {part:?} is no level; use error, warn, info, debug, trace or off, \
             or a filter like info,tollgate_server=debug"
        ));
    }
    let filter = EnvFilter::try_new(level).map_err(|error| format!("--log-level: {error}"))?;
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let all = tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .with(http2_layer(&HTTP2_FAULTS));
    all.try_init().map_err(|error| error.to_string())
}

/// Warnings and errors of the HTTP libraries since the process started.
static HTTP2_FAULTS: AtomicU64 = AtomicU64::new(0);

/// Warnings and errors of the HTTP libraries since the process started, logged or not.
pub fn http2_faults() -> u64 {
    HTTP2_FAULTS.load(Ordering::Relaxed)
}

/// Counts warnings and errors of the HTTP libraries, and passes one per second. Unauthenticated
/// clients can cause thousands per second.
fn http2_layer<S: Subscriber + for<'a> LookupSpan<'a>>(
    counter: &'static AtomicU64,
) -> impl Layer<S> {
    let warnings = ["h2", "hyper", "hyper_util"].map(|library| (library, Level::WARN));
    Http2Layer { counter, throttle: LogThrottle::default() }
        .with_filter(Targets::new().with_targets(warnings))
}

struct Http2Layer {
    counter: &'static AtomicU64,
    throttle: LogThrottle,
}

impl<S: Subscriber> Layer<S> for Http2Layer {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        // Only the libraries' warnings arrive here, unless another layer enables more.
        if *event.metadata().level() > Level::WARN {
            return true;
        }
        self.counter.fetch_add(1, Ordering::Relaxed);
        self.throttle.pass().is_some()
    }
}

/// Maximum characters of an untrusted text in a log line.
const MAX_SANITIZED: usize = 300;

/// Displays an untrusted text as part of a log line: control characters escaped, so that it stays
/// on its line, and truncated.
pub struct Sanitized<T>(pub T);

impl<T: fmt::Display> fmt::Display for Sanitized<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        let mut left = MAX_SANITIZED;
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

/// Whether a character of untrusted text must not be shown as it is: controls, Unicode's
/// bidirectional controls and other invisible format characters. They can move the cursor, and
/// reorder or hide the text around them.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn http_library_warnings_are_counted_and_logged_once_per_second() {
        static COUNTED: AtomicU64 = AtomicU64::new(0);
        let shown = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&shown);
        let lines = tracing_subscriber::fmt::layer()
            .with_writer(move || LogBuffer(Arc::clone(&written)))
            .with_filter(EnvFilter::new("info"));
        let all = tracing_subscriber::registry().with(lines).with(http2_layer(&COUNTED));
        tracing::subscriber::with_default(all, || {
            for number in 0..1000 {
                tracing::warn!(target: "h2::proto::streams", number, "a fault");
                tracing::debug!(target: "h2::proto::streams", "nobody asked for it");
                tracing::warn!(target: "tollgate_server", number, "our own");
            }
        });
        let shown = String::from_utf8(shown.lock().expect("not poisoned").clone()).expect("text");
        let count = |text| shown.matches(text).count();
        assert_eq!(COUNTED.load(Ordering::Relaxed), 1000);
        assert_eq!((count("our own"), count("nobody")), (1000, 0));
        assert!((1..=10).contains(&count("a fault")), "{}", count("a fault"));
    }

    /// Collects log output.
    struct LogBuffer(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for LogBuffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("not poisoned").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn untrusted_text_stays_on_its_line() {
        let sanitized = |text: &str| Sanitized(text).to_string();
        assert_eq!(
            sanitized("no \"quotes\" 'are' \\ changed: ключ"),
            "no \"quotes\" 'are' \\ changed: ключ"
        );
        assert_eq!(sanitized("a\nb\r\0\u{1b}[31m"), "a\\nb\\r\\0\\u{1b}[31m");
        assert_eq!(
            sanitized("\u{202e}\u{2066}\u{feff}\u{85}"),
            "\\u{202e}\\u{2066}\\u{feff}\\u{85}"
        );
        assert_eq!(sanitized(&"x".repeat(300)), "x".repeat(300));
        assert_eq!(sanitized(&"x".repeat(301)), "x".repeat(300) + "…");
        assert!(sanitized(&"\u{1}".repeat(10_000)).chars().count() <= 301);
    }
}
