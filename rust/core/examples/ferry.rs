//! Serves random bytes and fetches them again, to show the engine's speed on this machine or between two.
//!
//! ```text
//! cargo run --release --example ferry -- serve [--mib N]    prints a URL, serves step 1 until Enter or end of input
//! cargo run --release --example ferry -- fetch URL STEP     fetches, prints size, time, rate and the digest of it all
//! cargo run --release --example ferry -- both [--mib N]     both in one process
//! ```

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use tensorferry_core::{Destination, FetchOptions, Item, Publication, Remote, Server, ServerConfig, Stability};
use tensorferry_wire::digest::Hasher;
use tensorferry_wire::dtype::Dtype;
use tokio::runtime::Runtime;

const STEP: i64 = 1;
const ENTRIES: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve"] => serve(256),
        ["serve", "--mib", mib] => serve(mib.parse()?),
        ["fetch", url, step] => fetch(url, step.parse()?),
        ["both"] => both(256),
        ["both", "--mib", mib] => both(mib.parse()?),
        _ => Err("usage: ferry serve [--mib N] | fetch URL STEP | both [--mib N]".into()),
    }
}

fn serve(mib: usize) -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::new()?;
    let server = publish(mib, &runtime)?;
    println!("{}", server.url("127.0.0.1"));
    println!("serving {mib} MiB as step {STEP}; press Enter to stop");
    std::io::stdin().read_line(&mut String::new())?;
    server.shutdown(Duration::from_secs(5));
    Ok(())
}

fn both(mib: usize) -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::new()?;
    let server = publish(mib, &runtime)?;
    fetch(&server.url("127.0.0.1"), STEP)
}

/// Starts a server with `mib` MiB in a few entries.
fn publish(mib: usize, runtime: &Runtime) -> Result<Server, Box<dyn Error>> {
    let server = Server::bind(&ServerConfig::default(), runtime.handle())?;
    let mut items = Vec::with_capacity(ENTRIES);
    for i in 0..ENTRIES {
        let len = (mib << 20) / ENTRIES;
        let bytes: Vec<u8> = (0..len).map(|at| ((at * 31 + i) >> 3).to_le_bytes()[0]).collect();
        items.push(Item::bytes(format!("layer.{i}"), Dtype::U8, &[len as u64], Bytes::from(bytes)));
    }
    // The items own their bytes, so there is no other owner to keep.
    server.store().publish(STEP, Publication::new(Vec::new(), items, Stability::Private, Box::new(()))?);
    Ok(server)
}

fn fetch(url: &str, step: i64) -> Result<(), Box<dyn Error>> {
    let remote = Remote::open(&[url], step, FetchOptions::within(Duration::from_mins(10)))?;
    let header = remote.header().clone();
    let arrived = remote.fetch(Destination::Fresh)?;
    let mut digest = Hasher::new();
    for (entry, offset) in header.entries().iter().zip(arrived.offsets()) {
        if let Some(offset) = offset {
            digest.update(arrived.arena().bytes(*offset, usize::try_from(entry.nbytes())?));
        }
    }
    let report = arrived.report();
    let seconds = (report.opening + report.fetching).as_secs_f64();
    println!(
        "{} entries, {:.1} MiB in {seconds:.3} s: {:.2} GB/s over {} lanes, {} retries, digest {:016x}",
        header.entries().len(),
        header.payload_len() as f64 / f64::from(1 << 20),
        header.payload_len() as f64 / seconds / 1e9,
        report.lanes,
        report.retries,
        digest.finish(),
    );
    Ok(())
}
