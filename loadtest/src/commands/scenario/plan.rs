//! The scenarios of doorman's design document.

use std::time::Duration;

/// Capacity at the root, in all scenarios.
pub const CAPACITY: f64 = 500.0;

/// Lease length and learning time, at every level.
pub const LEASE: Duration = Duration::from_secs(60);

/// Refresh interval of the clients of a leaf; it doubles with each level towards the root.
pub const REFRESH: Duration = Duration::from_secs(4);

/// Which scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Scenario {
    /// One root, five clients that want 100 each at first.
    One,
    /// A root, three regions, three data centres in each, five clients in each of those that want
    /// 14 each at first.
    Five,
    /// As five, and every minute a mishap: a client suddenly wants 100 more, a cluster can't be
    /// reached for up to a minute, or a cluster's store is lost.
    Seven,
}

/// How clusters share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Algorithm {
    /// An equal share, and of what others leave in proportion to what is wanted beyond that.
    ProportionalShare,
    /// Weighted max-min.
    FairShare,
}

impl Algorithm {
    /// Name in a limits file.
    pub fn name(self) -> &'static str {
        match self {
            Self::ProportionalShare => "PROPORTIONAL_SHARE",
            Self::FairShare => "FAIR_SHARE",
        }
    }
}

/// Figures that the design document reports for a scenario.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Published {
    /// Percentage of the available capacity that was leased.
    pub utilisation_percent: Option<f64>,
    /// How often more than the capacity was leased.
    pub shortfalls: Option<u64>,
    /// Most capacity leased.
    pub max: Option<f64>,
    /// Mean capacity leased during shortfalls.
    pub mean_over: Option<f64>,
}

impl Scenario {
    /// Name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::Five => "five",
            Self::Seven => "seven",
        }
    }

    /// Figures of the design document.
    pub fn published(self) -> Published {
        match self {
            Self::One => Published::default(),
            Self::Five => Published { utilisation_percent: Some(96.8), ..Published::default() },
            Self::Seven => Published {
                utilisation_percent: Some(96.6),
                shortfalls: Some(14),
                max: Some(530.24),
                mean_over: Some(509.99),
            },
        }
    }

    /// Clusters and clients of the scenario.
    pub fn plan(self) -> Plan {
        match self {
            Self::One => Plan::new(&[], 5, 100.0, false),
            Self::Five => Plan::new(&[3, 3], 5, 14.0, false),
            Self::Seven => Plan::new(&[3, 3], 5, 14.0, true),
        }
    }
}

/// A cluster of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Name.
    pub name: String,
    /// Number of the parent cluster; `None` for the root.
    pub parent: Option<usize>,
    /// Refresh interval of the leases that it grants.
    pub refresh: Duration,
}

/// A client of a leaf cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct Client {
    /// Name.
    pub name: String,
    /// Number of its cluster.
    pub cluster: usize,
    /// Initial wants.
    pub wants: f64,
}

/// Clusters and clients of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The clusters: the root first, each one after its parent.
    pub clusters: Vec<Cluster>,
    /// The clients.
    pub clients: Vec<Client>,
    /// Whether mishaps are simulated.
    pub mishaps: bool,
}

impl Plan {
    /// A tree in which each cluster of level n has `children[n]` child clusters, and each leaf
    /// `clients` clients with initial wants of `wants`.
    pub fn new(children: &[usize], clients: usize, wants: f64, mishaps: bool) -> Self {
        const LEVELS: [&str; 3] = ["root", "region", "dc"];
        let refresh = |level: usize| REFRESH * (1 << (children.len() - level));
        let mut clusters =
            vec![Cluster { name: LEVELS[0].to_owned(), parent: None, refresh: refresh(0) }];
        let mut parents = 0..1;
        for (level, children) in (1..).zip(children) {
            let next = clusters.len();
            for parent in parents {
                for child in 1..=*children {
                    let path = clusters[parent].name.split_once(':').map(|(_, path)| path);
                    let kind = LEVELS.get(level).unwrap_or(&"cluster");
                    let name = match path {
                        Some(path) => format!("{kind}:{path}:{child}"),
                        None => format!("{kind}:{child}"),
                    };
                    clusters.push(Cluster { name, parent: Some(parent), refresh: refresh(level) });
                }
            }
            parents = next..clusters.len();
        }
        let of_leaf = |leaf: usize| (1..=clients).map(move |number| (leaf, number));
        let clients = parents.flat_map(of_leaf).map(|(cluster, number)| Client {
            name: format!("{}/client:{number}", clusters[cluster].name),
            cluster,
            wants,
        });
        let clients = clients.collect();
        Self { clusters, clients, mishaps }
    }

    /// Time from a start with empty stores until every cluster has learned.
    pub fn learning(&self) -> Duration {
        LEASE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_a_root_with_five_clients() {
        let plan = Scenario::One.plan();
        assert_eq!(
            plan.clusters,
            [Cluster { name: "root".to_owned(), parent: None, refresh: REFRESH }]
        );
        assert_eq!(plan.clients.len(), 5);
        assert!(plan.clients.iter().all(|client| client.cluster == 0 && client.wants == 100.0));
    }

    #[test]
    fn five_is_a_tree_of_thirteen_clusters_with_45_clients() {
        let plan = Scenario::Five.plan();
        let names: Vec<_> = plan.clusters.iter().map(|cluster| cluster.name.as_str()).collect();
        assert_eq!(names[..5], ["root", "region:1", "region:2", "region:3", "dc:1:1"]);
        assert_eq!((names.len(), names[12]), (13, "dc:3:3"));
        let refresh: Vec<_> = plan.clusters.iter().map(|one| one.refresh.as_secs()).collect();
        assert_eq!((refresh[0], refresh[3], refresh[12]), (16, 8, 4));
        assert_eq!(plan.clusters[12].parent, Some(3));
        assert_eq!(plan.clients.len(), 45);
        assert_eq!(plan.clients[44].name, "dc:3:3/client:5");
        assert_eq!(plan.clients[44].cluster, 12);
        assert!(plan.clients.iter().all(|client| client.cluster >= 4));
        assert!(!plan.mishaps && Scenario::Seven.plan().mishaps);
    }
}
