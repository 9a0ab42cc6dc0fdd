//! Plot of a simulation as a self-contained SVG: capacity, wants and has over time, and mishaps.

use std::fmt::Write as _;
use std::time::Duration;

use crate::commands::scenario::measure::{Column, Range};
use crate::commands::scenario::plan::CAPACITY;

const WIDTH: f64 = 1280.0;
const HEIGHT: f64 = 760.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;

/// Vertical ranges of the panels. Wants have their own panel, since in an overload they exceed the
/// capacity many times.
const HAS_PANEL: (f64, f64) = (72.0, 480.0);
const WANTS_PANEL: (f64, f64) = (512.0, 672.0);

const CAPACITY_COLOUR: &str = "#c62828";
const WANTS_COLOUR: &str = "#9e9e9e";
const HAS_COLOUR: &str = "#1565c0";
const MISHAP_COLOUR: &str = "#ef6c00";

/// Content of a plot.
#[derive(Clone, Debug)]
pub struct Plot<'a> {
    /// Title.
    pub title: String,
    /// One-line summary.
    pub subtitle: String,
    /// Length of the run.
    pub duration: Duration,
    /// Value ranges, one per column.
    pub columns: &'a [Column],
    /// Mishaps and their times.
    pub mishaps: Vec<(Duration, String)>,
}

/// A value axis from `foot` up to `head`, in px.
#[derive(Clone, Copy)]
struct Axis {
    head: f64,
    foot: f64,
    /// Value at `head`.
    most: f64,
}

impl Axis {
    /// An axis up to a round number above `highest`.
    fn new((head, foot): (f64, f64), highest: f64) -> Self {
        let step = round_step(highest * 1.05 / 10.0);
        Self { head, foot, most: (highest * 1.05 / step).ceil() * step }
    }

    fn y(self, value: f64) -> f64 {
        self.foot - value / self.most * (self.foot - self.head)
    }
}

impl Plot<'_> {
    /// Renders the plot.
    pub fn svg(&self) -> String {
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        text(&mut svg, LEFT, 28.0, "start", " font-size=\"18\"", &self.title);
        text(&mut svg, LEFT, 50.0, "start", " fill=\"#555\"", &self.subtitle);
        self.minutes(&mut svg);
        self.panel(&mut svg, HAS_PANEL, |column| column.has, HAS_COLOUR);
        self.panel(&mut svg, WANTS_PANEL, |column| column.wants, WANTS_COLOUR);
        self.mishaps(&mut svg);
        legend(&mut svg, !self.mishaps.is_empty());
        svg.push_str("</svg>\n");
        svg
    }

    fn panel(
        &self,
        svg: &mut String,
        place: (f64, f64),
        range: fn(&Column) -> Option<Range>,
        colour: &str,
    ) {
        let highest = self.columns.iter().filter_map(range).map(|range| range.high);
        let axis = Axis::new(place, highest.fold(CAPACITY, f64::max));
        let line = |svg: &mut String, y: f64, style: &str| {
            let end = WIDTH - RIGHT;
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{end}\" y2=\"{y:.1}\" {style}/>"
            );
        };
        let step = round_step(axis.most * 24.0 / (axis.foot - axis.head));
        for value in (0..).map(|n| f64::from(n) * step).take_while(|value| *value <= axis.most) {
            let y = axis.y(value);
            line(svg, y, "stroke=\"#e5e5e5\"");
            text(svg, LEFT - 8.0, y + 4.5, "end", "", &value.to_string());
        }
        line(svg, axis.y(CAPACITY), &format!("stroke=\"{CAPACITY_COLOUR}\" stroke-width=\"1.5\""));
        let points = self.points(axis, range);
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" \
             stroke-linejoin=\"round\" points=\"{points}\"/>"
        );
    }

    fn x(&self, at: Duration) -> f64 {
        LEFT + at.as_secs_f64() / self.duration.as_secs_f64() * (WIDTH - LEFT - RIGHT)
    }

    fn minutes(&self, svg: &mut String) {
        let minutes = self.duration.as_secs_f64() / 60.0;
        let step = round_step(minutes / 12.0);
        let ((head, _), (_, foot)) = (HAS_PANEL, WANTS_PANEL);
        for minute in (0..).map(|n| f64::from(n) * step).take_while(|minute| *minute <= minutes) {
            let x = self.x(Duration::from_secs_f64(minute * 60.0));
            let _ = writeln!(
                svg,
                "<line x1=\"{x:.1}\" y1=\"{head}\" x2=\"{x:.1}\" y2=\"{foot}\" stroke=\"#f0f0f0\"/>"
            );
            text(svg, x, foot + 32.0, "middle", "", &format!("{minute} min"));
        }
    }

    /// Points of a line through the minimum and maximum of each column.
    fn points(&self, axis: Axis, range: fn(&Column) -> Option<Range>) -> String {
        let mut points = String::new();
        let width = (WIDTH - LEFT - RIGHT) / self.columns.len().max(1) as f64;
        let mut last: Option<f64> = None;
        for (number, column) in self.columns.iter().enumerate() {
            let Some(Range { low, high }) = range(column) else { continue };
            let x = LEFT + (number as f64 + 0.5) * width;
            // Starts at the end that is nearer to the previous point.
            let rising = last.is_none_or(|last| (last - low).abs() <= (last - high).abs());
            let ends = if rising { [low, high] } else { [high, low] };
            let ends = if low == high { &ends[..1] } else { &ends[..] };
            for value in ends {
                let _ = write!(points, "{x:.1},{:.1} ", axis.y(*value));
            }
            last = ends.last().copied();
        }
        points.truncate(points.trim_end().len());
        points
    }

    fn mishaps(&self, svg: &mut String) {
        let (_, foot) = WANTS_PANEL;
        for (at, what) in &self.mishaps {
            let x = self.x(*at);
            let what = escape(what);
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {foot} l-4 10 h8 z\" fill=\"{MISHAP_COLOUR}\">\
                 <title>{what}</title></path>"
            );
        }
    }
}

/// Smallest round number of at least `least`: 1, 2 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.max(1e-9).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    step.into_iter().find(|step| *step >= least * (1.0 - 1e-9)).unwrap_or(least)
}

fn legend(svg: &mut String, mishaps: bool) {
    let entries = [
        ("capacity", CAPACITY_COLOUR),
        ("clients want", WANTS_COLOUR),
        ("clients have", HAS_COLOUR),
        ("mishap", MISHAP_COLOUR),
    ];
    let shown = if mishaps { &entries[..] } else { &entries[..3] };
    for (number, (name, colour)) in shown.iter().enumerate() {
        let x = LEFT + number as f64 * 120.0;
        let y = HEIGHT - 20.0;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{}\" width=\"18\" height=\"4\" fill=\"{colour}\"/>",
            y - 6.0
        );
        text(svg, x + 24.0, y, "start", "", name);
    }
}

/// Writes a text element; `anchor` is `start`, `middle` or `end`.
pub(crate) fn text(svg: &mut String, x: f64, y: f64, anchor: &str, style: &str, content: &str) {
    let content = escape(content);
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"{style}>{content}</text>"
    );
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(columns: &[Column]) -> Plot<'_> {
        Plot {
            title: "a <b> & c".to_owned(),
            subtitle: String::new(),
            duration: Duration::from_secs(3600),
            columns,
            mishaps: vec![(Duration::from_secs(1800), "x > y".to_owned())],
        }
    }

    fn column(low: f64, high: f64) -> Column {
        Column { wants: Some(Range { low: 0.0, high: 0.0 }), has: Some(Range { low, high }) }
    }

    #[test]
    fn lines_start_at_the_nearer_end_of_each_column() {
        let columns =
            [column(0.0, 600.0), column(300.0, 500.0), Column::default(), column(600.0, 600.0)];
        let axis = Axis { head: 72.0, foot: 576.0, most: 600.0 };
        let points = plot(&columns).points(axis, |column| column.has);
        let points: Vec<_> =
            points.split(' ').map(|point| point.split_once(',').unwrap()).collect();
        let ys: Vec<_> = points.iter().map(|(_, y)| *y).collect();
        assert_eq!(ys, ["576.0", "72.0", "156.0", "324.0", "72.0"]);
        assert_eq!(points[0].0, "213.0");
        assert_eq!(points[4].0, "1107.0");
    }

    #[test]
    fn a_plot_is_well_formed_and_names_what_it_shows() {
        let columns = [column(0.0, 100.0), column(100.0, 620.0)];
        let svg = plot(&columns).svg();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a &lt;b&gt; &amp; c"));
        assert!(svg.contains("<title>x &gt; y</title>"));
        for name in ["capacity", "clients want", "clients have", "mishap", ">60 min<", ">600<"] {
            assert!(svg.contains(name), "{name}");
        }
        assert_eq!(svg.matches("<polyline").count(), 2);
        for tag in ["text", "title", "path", "svg"] {
            let (open, close) = (format!("<{tag}"), format!("</{tag}>"));
            assert_eq!(svg.matches(&open).count(), svg.matches(&close).count(), "{tag}");
        }
    }

    #[test]
    fn steps_are_round() {
        for (least, step) in [(0.9, 1.0), (1.0, 1.0), (1.2, 2.0), (75.0, 100.0), (2.1, 5.0)] {
            assert_eq!(round_step(least), step, "{least}");
        }
    }
}
