//! `tollgate health`: the health check of an image that has no other HTTP client.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(2);

#[derive(clap::Args)]
pub(super) struct Args {
    /// The node's HTTP address; one that means every interface is asked on loopback
    #[arg(
        long,
        env = "TOLLGATE_HTTP_LISTEN",
        value_name = "ADDR",
        default_value = "127.0.0.1:10991"
    )]
    http: SocketAddr,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    let mut address = args.http;
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    let answer = ask(address).map_err(|error| format!("{address}: {error}"))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    print!("{body}");
    Ok(ExitCode::from(u8::from(!head.starts_with("HTTP/1.1 200 "))))
}

fn ask(address: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    write!(stream, "GET /readyz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(64 * 1024).read_to_string(&mut answer)?;
    Ok(answer)
}
