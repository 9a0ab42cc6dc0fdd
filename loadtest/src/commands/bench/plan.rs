//! The measurements of a round, in their order. A round makes each once, and goals compare figures of
//! the same round.

use std::fmt;

/// System under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// A server that answers at once: the empty RPC.
    Empty,
    /// A server that makes one EVALSHA per request.
    OneCall,
    /// A node with the embedded store.
    Embedded,
    /// A node with the Redis store.
    Redis,
}

/// Requested buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Keys {
    /// One bucket that grants every request.
    Hot,
    /// One bucket that refuses nearly every request.
    Refused,
    /// All buckets, uniformly distributed.
    Uniform,
    /// All buckets, Zipf-distributed with exponent 1.
    Zipf,
}

/// One run of Allow requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// System under test.
    pub backend: Backend,
    /// Requested buckets.
    pub keys: Keys,
    /// HTTP/2 connections.
    pub connections: u32,
    /// Concurrent callers per connection.
    pub in_flight: u32,
    /// Open loop at this share of the closed-loop peak rate; `None` for a closed loop.
    pub pace: Option<f64>,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Point {
    /// Allow requests.
    Load(Load),
    /// h2load on the hot bucket, 4 connections with 32 streams each.
    H2load,
    /// Lease decisions on a resource with this many clients.
    Leases(usize),
    /// This many nodes on as many shards.
    Scale(usize),
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "empty",
            Self::OneCall => "one-call",
            Self::Embedded => "embedded",
            Self::Redis => "redis",
        })
    }
}

impl fmt::Display for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hot => "hot",
            Self::Refused => "refused",
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        })
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, keys, connections, in_flight, pace } = self;
        match pace {
            Some(share) => write!(f, "{backend}/{keys}/{:.0}%", share * 100.0),
            None => write!(f, "{backend}/{keys}/{}", connections * in_flight),
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(load) => load.fmt(f),
            Self::H2load => f.write_str("h2load/hot/128"),
            Self::Leases(clients) => write!(f, "leases/{clients}"),
            Self::Scale(nodes) => write!(f, "scale/{nodes}x{nodes}"),
        }
    }
}

/// Connections and callers per connection, for each total concurrency.
const CONCURRENCY: [(u32, u32); 4] = [(4, 32), (16, 32), (4, 2), (1, 1)];

/// Shares of the peak rate at which latency is measured.
const PEAK_SHARES: [f64; 2] = [0.5, 0.8];

/// The closed loops, and whether they run at every concurrency. All run at the first, 128, to
/// which most goals refer.
const LOADS: [(Backend, Keys, bool); 8] = [
    (Backend::Empty, Keys::Hot, true),
    (Backend::Embedded, Keys::Uniform, false),
    (Backend::Embedded, Keys::Hot, true),
    (Backend::Redis, Keys::Uniform, true),
    (Backend::Redis, Keys::Zipf, true),
    (Backend::Redis, Keys::Hot, true),
    (Backend::Redis, Keys::Refused, false),
    (Backend::OneCall, Keys::Uniform, true),
];

/// All measurements, in order.
pub fn all() -> Vec<Point> {
    let mut all = Vec::new();
    for (number, (connections, in_flight)) in CONCURRENCY.into_iter().enumerate() {
        let first = number == 0;
        let load =
            |backend, keys, pace| Point::Load(Load { backend, keys, connections, in_flight, pace });
        for (backend, keys, _) in LOADS.into_iter().filter(|(.., every)| first || *every) {
            all.push(load(backend, keys, None));
            if first && (backend, keys) == (Backend::Redis, Keys::Hot) {
                all.push(Point::H2load);
            }
        }
        if first {
            for keys in [Keys::Hot, Keys::Uniform] {
                all.extend(PEAK_SHARES.map(|share| load(Backend::Redis, keys, Some(share))));
            }
        }
    }
    all.extend([10, 1000, 100_000].map(Point::Leases));
    all.extend([1, 2, 3].map(Point::Scale));
    all
}

/// The measurements whose names contain any of `parts`, and those that they depend on. All of them
/// if `parts` is empty.
pub fn select(parts: &[String]) -> Vec<Point> {
    let all = all();
    let names: Vec<String> = all.iter().map(Point::to_string).collect();
    let asked =
        |name: &String| parts.is_empty() || parts.iter().any(|part| matches_part(name, part));
    let mut wanted: Vec<bool> = names.iter().map(asked).collect();
    for (at, point) in all.iter().enumerate() {
        let needed = match point {
            Point::Load(load) if wanted[at] && load.pace.is_some() => load.peak(),
            Point::H2load if wanted[at] => "redis/hot/128".to_owned(),
            _ => continue,
        };
        if let Some(peak) = names.iter().position(|name| *name == needed) {
            wanted[peak] = true;
        }
    }
    all.into_iter().zip(wanted).filter_map(|(point, wanted)| wanted.then_some(point)).collect()
}

/// Whether `name` contains `part`. A number at the end of `part` matches only a whole number:
/// `redis/hot/8` does not match `redis/hot/80%`.
fn matches_part(name: &str, part: &str) -> bool {
    name.match_indices(part).any(|(at, _)| {
        let next = name[at + part.len()..].chars().next();
        let goes_on = next.is_some_and(|next| next.is_ascii_digit() || next == '%');
        !(goes_on && part.ends_with(|last: char| last.is_ascii_digit()))
    })
}

impl Load {
    /// Name of the closed-loop run whose rate is the peak of this load.
    pub fn peak(&self) -> String {
        Self { pace: None, ..*self }.to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn names(parts: &[&str]) -> Vec<String> {
        let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
        select(&parts).iter().map(Point::to_string).collect()
    }

    #[test]
    fn names_are_unique() {
        let all = names(&[]);
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        for name in ["empty/hot/128", "redis/zipf/512", "one-call/uniform/1", "redis/hot/80%"] {
            assert!(all.iter().any(|found| found == name), "{name}");
        }
    }

    #[test]
    fn selection_includes_dependencies() {
        assert_eq!(names(&["uniform/50%"]), ["redis/uniform/128", "redis/uniform/50%"]);
        assert_eq!(names(&["h2load"]), ["redis/hot/128", "h2load/hot/128"]);
        assert_eq!(names(&["leases/1000", "redis/hot/8"]), ["redis/hot/8", "leases/1000"]);
        assert_eq!(names(&["zipf"]).len(), 4);
        assert!(names(&["nothing"]).is_empty());
    }
}
