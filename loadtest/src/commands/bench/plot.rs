//! Bar chart as a self-contained SVG: rate of each store and key pattern relative to the empty RPC.

use std::fmt::Write as _;

use crate::commands::bench::report::Report;
use crate::commands::bench::stats::Stat;
use crate::commands::scenario::svg::text;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 230.0;
const RIGHT: f64 = 110.0;
const HEAD: f64 = 84.0;
const ROW: f64 = 38.0;
const BAR: f64 = 22.0;

/// Ratio at the right edge.
const MAX_RATIO: f64 = 1.2;

const EMBEDDED: &str = "#6a1b9a";
const REDIS: &str = "#1565c0";
const OTHER: &str = "#9e9e9e";

/// The bars: label, colour, figure.
const BARS: [(&str, &str, &str); 7] = [
    ("embedded, one hot bucket", EMBEDDED, "embedded/hot/128.rate"),
    ("embedded, uniform", EMBEDDED, "embedded/uniform/128.rate"),
    ("Redis, one hot bucket", REDIS, "redis/hot/128.rate"),
    ("Redis, refusals", REDIS, "redis/refused/128.rate"),
    ("Redis, zipf", REDIS, "redis/zipf/128.rate"),
    ("Redis, uniform", REDIS, "redis/uniform/128.rate"),
    ("one EVALSHA a request, uniform", OTHER, "one-call/uniform/128.rate"),
];

fn x(ratio: f64) -> f64 {
    LEFT + ratio.clamp(0.0, MAX_RATIO) / MAX_RATIO * (WIDTH - LEFT - RIGHT)
}

/// Renders the chart.
pub fn svg(report: &Report) -> String {
    let bars: Vec<_> = BARS
        .iter()
        .filter_map(|(name, colour, figure)| Some((name, colour, report.of_empty(figure)?)))
        .collect();
    let foot = HEAD + ROW * bars.len() as f64;
    let height = foot + 48.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let title = "Decisions a second, of an empty RPC's";
    text(&mut svg, 24.0, 30.0, "start", " font-size=\"18\"", title);
    let subtitle = "128 requests under way, one thread; bars are medians, lines the lowest and the \
                    highest round";
    text(&mut svg, 24.0, 52.0, "start", " fill=\"#555\"", subtitle);
    grid(&mut svg, foot);
    for (number, (name, colour, stat)) in bars.iter().enumerate() {
        let y = HEAD + ROW * number as f64;
        text(&mut svg, LEFT - 10.0, y + BAR / 2.0 + 4.5, "end", "", name);
        bar(&mut svg, y, colour, stat);
    }
    svg.push_str("</svg>\n");
    svg
}

/// A vertical line and its label at each fifth; the line of the empty RPC is red.
fn grid(svg: &mut String, foot: f64) {
    for fifth in 0..=(MAX_RATIO * 5.0).round() as u32 {
        let ratio = f64::from(fifth) / 5.0;
        let (x, colour) = (x(ratio), if fifth == 5 { "#c62828" } else { "#e5e5e5" });
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{foot:.1}\" stroke=\"{colour}\"/>",
            HEAD - 8.0
        );
        text(svg, x, foot + 20.0, "middle", "", &format!("{ratio:.1}"));
    }
}

/// The bar of a median, with a line from the lowest to the highest round, and the median as text.
fn bar(svg: &mut String, y: f64, colour: &str, stat: &Stat) {
    let middle = y + BAR / 2.0;
    let _ = writeln!(
        svg,
        "<rect x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"{colour}\" \
         fill-opacity=\"0.75\"/>\n\
         <line x1=\"{:.1}\" y1=\"{middle:.1}\" x2=\"{:.1}\" y2=\"{middle:.1}\" \
         stroke=\"#212121\" stroke-width=\"2\"/>",
        x(stat.median) - LEFT,
        x(stat.min),
        x(stat.max)
    );
    let beyond = x(stat.max.max(stat.median)) + 8.0;
    let value = format!("{:.2}", stat.median);
    text(svg, beyond, middle + 4.5, "start", " font-weight=\"bold\"", &value);
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::commands::bench::BenchArgs;
    use crate::commands::bench::stats::Round;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: BenchArgs,
    }

    #[test]
    fn bars_are_as_long_as_their_ratios() {
        let figures = [("empty/hot/128.rate", 100.0), ("redis/hot/128.rate", 60.0)];
        let round: Round = figures.map(|(name, rate)| (name.to_owned(), rate)).into();
        let svg = svg(&Report::new(&Cli::parse_from(["bench"]).args, vec![round]));
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("fill-opacity").count(), 1, "{svg}");
        // Half of the 620 px between the edges, which span 0 to 1.2.
        assert!(svg.contains("width=\"310.0\""), "{svg}");
        assert!(svg.contains(">0.60<") && svg.contains(">Redis, one hot bucket<"), "{svg}");
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }
}
