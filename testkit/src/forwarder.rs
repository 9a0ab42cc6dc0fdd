//! A TCP proxy between a node and Redis with a variable target and delay.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Forwards each connection to the target that was set when it was opened.
pub struct Forwarder {
    port: u16,
    target: Arc<AtomicU16>,
    delay_ms: Arc<AtomicU64>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Forwarder {
    /// Starts a proxy on a free port for `target`, a port on loopback.
    pub fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (target, delay_ms) = (Arc::new(AtomicU16::new(target)), Arc::new(AtomicU64::new(0)));
        let open = Arc::new(Mutex::new(Vec::new()));
        let forwarder = Self {
            port,
            target: Arc::clone(&target),
            delay_ms: Arc::clone(&delay_ms),
            open: Arc::clone(&open),
        };
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(("127.0.0.1", target.load(Ordering::SeqCst)))
                else {
                    continue;
                };
                near.set_nodelay(true).unwrap();
                far.set_nodelay(true).unwrap();
                let mut list = open.lock().unwrap();
                list.extend([near.try_clone().unwrap(), far.try_clone().unwrap()]);
                let (near_again, far_again) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let delay = Arc::clone(&delay_ms);
                thread::spawn(move || copy(near, far, &delay));
                thread::spawn(move || copy(far_again, near_again, &AtomicU64::new(0)));
            }
        });
        forwarder
    }

    /// Store URL of the proxy.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sets the target of future connections.
    pub fn lead_to(&self, target: u16) {
        self.target.store(target, Ordering::SeqCst);
    }

    /// Sets the delay of requests.
    pub fn delay(&self, delay: Duration) {
        self.delay_ms.store(delay.as_millis() as u64, Ordering::SeqCst);
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        for stream in self.open.lock().unwrap().drain(..) {
            // Fails if the stream is closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, delay_ms: &AtomicU64) {
    let mut buffer = [0; 16 * 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        thread::sleep(Duration::from_millis(delay_ms.load(Ordering::SeqCst)));
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
