//! HAProxy (Debian's package) with the configuration of `docker-compose.yml`, for three nodes.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::cluster::Cluster;
use super::http;
use super::{Node, eventually, free_port, in_repository};

/// An HAProxy process, killed when dropped.
pub struct HaProxy {
    child: Child,
    /// gRPC address.
    pub grpc: SocketAddr,
    /// HTTP API address.
    pub http: SocketAddr,
    /// Address of HAProxy's own statistics page.
    pub stats: SocketAddr,
}

impl HaProxy {
    /// Starts HAProxy for the nodes of `cluster`, and waits until its health checks pass.
    pub fn start(cluster: &Cluster) -> Self {
        let balancer = Self::start_for(&cluster.nodes, &[]);
        balancer.wait_until_checks_pass();
        balancer
    }

    /// Starts HAProxy for three nodes, with additional environment variables.
    pub fn start_for(nodes: &[Node], variables: &[(&str, &str)]) -> Self {
        let config = in_repository("config/haproxy.cfg");
        let [grpc, http, stats] = [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())));
        // /usr/sbin is not in the PATH of every user.
        let installed = "/usr/sbin/haproxy";
        let haproxy = if Path::new(installed).exists() { installed } else { "haproxy" };
        let mut command = Command::new(haproxy);
        command
            .args(["-db", "-f"])
            .arg(config)
            .env("TOLLGATE_LB_GRPC", grpc.to_string())
            .env("TOLLGATE_LB_HTTP", http.to_string())
            .env("TOLLGATE_LB_STATS", stats.to_string())
            .envs(variables.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        for (node, number) in nodes.iter().zip(1..) {
            command
                .env(format!("NODE{number}_HOST"), node.grpc.ip().to_string())
                .env(format!("NODE{number}_GRPC_PORT"), node.grpc.port().to_string())
                .env(format!("NODE{number}_HTTP_PORT"), node.http.port().to_string());
        }
        let child = command.spawn().expect("haproxy is installed by scripts/test.sh");
        Self { child, grpc, http, stats }
    }

    /// Waits until the latest health check of every node has passed.
    pub fn wait_until_checks_pass(&self) {
        eventually("haproxy has checked every node", Duration::from_secs(10), || {
            self.check_results().is_some_and(|statuses| statuses == ["L7OK"; 6])
        });
    }

    /// Latest health check result of each node, per backend; `None` if the statistics are
    /// unavailable.
    pub fn check_results(&self) -> Option<Vec<String>> {
        let csv = http::send(self.stats, "GET", "/;csv", "", b"").ok()?.body;
        let mut lines = csv.lines();
        let column = lines.next()?.split(',').position(|title| title == "check_status")?;
        let servers = lines.filter(|line| line.contains("_nodes,node"));
        Some(servers.filter_map(|line| Some(line.split(',').nth(column)?.to_owned())).collect())
    }
}

impl Drop for HaProxy {
    fn drop(&mut self) {
        // Fails if the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
