//! The hot path against its floor: fetching over loopback from another process, beside plain sockets that move the same
//! bytes without any protocol. Machines differ and are noisy: the ratios of the table at the end are what to read.
#![allow(clippy::disallowed_methods, reason = "the raw socket that a transfer is compared with")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot go on should panic")]
#![allow(missing_docs, reason = "criterion's macros make functions without any")]

use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use criterion::{Criterion, SamplingMode, Throughput};
use tensorferry_core::{Destination, FetchOptions, Item, Publication, Remote, Server, ServerConfig, Stability};
use tensorferry_wire::dtype::Dtype;
use tokio::runtime::Runtime;

const LARGE: usize = 256 << 20;
const LARGE_ENTRIES: usize = 8;
const SMALL: usize = 1 << 10;
const SMALL_ENTRIES: usize = 20_000;
const STEP: i64 = 1;
const ROUNDS: usize = 5;
/// The environment variable that is set in the process that serves.
const SERVER: &str = "TENSORFERRY_BENCH_SERVER";

/// The other process, and the addresses at which it serves.
struct Source {
    child: Child,
    large: String,
    borrowed: String,
    half: String,
    small: String,
    raw: SocketAddr,
}

impl Source {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(SERVER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut next = || lines.next().unwrap();
        let (large, borrowed, half, small) = (next(), next(), next(), next());
        let raw = next().parse().unwrap();
        Self { child, large, borrowed, half, small, raw }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        // The process exits at the end of its input.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Serves until the end of standard input.
fn serve() {
    let runtime = Runtime::new().unwrap();
    let memory = Bytes::from(vec![7_u8; LARGE]);
    let publish = |entries: usize, len: usize, stability: Stability| {
        let server =
            Server::bind(&ServerConfig { same_host: true, ..ServerConfig::default() }, runtime.handle()).unwrap();
        let item =
            |i| Item::bytes(format!("layer.{i}"), Dtype::U8, &[len as u64], memory.slice(i * len..(i + 1) * len));
        let items = (0..entries).map(item).collect();
        let publication = Publication::new(Vec::new(), items, stability, Box::new(())).unwrap();
        server.store().publish(STEP, publication);
        println!("{}", server.url("127.0.0.1"));
        server
    };
    let servers = [
        publish(LARGE_ENTRIES, LARGE / LARGE_ENTRIES, Stability::Private),
        publish(LARGE_ENTRIES, LARGE / LARGE_ENTRIES, Stability::Borrowed),
        publish(LARGE_ENTRIES / 2, LARGE / LARGE_ENTRIES, Stability::Private),
        publish(SMALL_ENTRIES, SMALL, Stability::Private),
    ];
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    println!("{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map(Result::unwrap) {
            let memory = memory.clone();
            std::thread::spawn(move || {
                let mut length = [0; 8];
                stream.read_exact(&mut length).unwrap();
                let length = usize::try_from(u64::from_le_bytes(length)).unwrap();
                // A receiver that has gone away is not an error.
                let _ = memory[..length].chunks(1 << 20).try_for_each(|chunk| stream.write_all(chunk));
            });
        }
    });
    std::io::stdin().read_line(&mut String::new()).unwrap();
    for server in &servers {
        server.shutdown(Duration::from_secs(5));
    }
}

/// The floor: `streams` sockets receive a share of the bytes each, into memory that was touched before.
fn floor(source: &Source, memory: &mut [u8], streams: usize) {
    let share = memory.len() / streams;
    std::thread::scope(|scope| {
        for part in memory.chunks_mut(share) {
            scope.spawn(|| {
                let mut stream = TcpStream::connect(source.raw).unwrap();
                stream.write_all(&(part.len() as u64).to_le_bytes()).unwrap();
                stream.read_exact(black_box(part)).unwrap();
            });
        }
    });
}

/// The route of the bytes.
#[derive(Clone, Copy)]
enum Route {
    Network,
    SameHost,
}

fn open(url: &str, route: Route) -> Remote {
    let options = FetchOptions::within(Duration::from_mins(1));
    let same_host = matches!(route, Route::SameHost);
    Remote::open(&[url], STEP, FetchOptions { same_host, ..options }).unwrap()
}

fn fetch_into(url: &str, route: Route, memory: &mut [u8]) {
    let remote = open(url, route);
    let mut rest = memory;
    let mut addresses = Vec::with_capacity(remote.header().entries().len());
    for entry in remote.header().entries() {
        let (part, after) = rest.split_at_mut(usize::try_from(entry.nbytes()).unwrap());
        addresses.push(Some(part.as_mut_ptr() as usize));
        rest = after;
    }
    // SAFETY: parts of one buffer that do not overlap, borrowed until the fetch has returned.
    black_box(remote.fetch(unsafe { Destination::given(addresses) }).unwrap());
}

fn fetch_fresh(url: &str, route: Route) {
    black_box(open(url, route).fetch(Destination::Fresh).unwrap());
}

/// Two receivers that each fetch half as much, at the same time.
fn two_receivers(source: &Source, memory: &mut [u8]) {
    let (first, second) = memory.split_at_mut(LARGE / 2);
    std::thread::scope(|scope| {
        for half in [first, second] {
            scope.spawn(|| fetch_into(&source.half, Route::Network, half));
        }
    });
}

fn measure(criterion: &mut Criterion, source: &Source, memory: &mut [u8]) {
    let mut group = criterion.benchmark_group("256 MiB");
    group.sampling_mode(SamplingMode::Flat).sample_size(10).throughput(Throughput::Bytes(LARGE as u64));
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(4));
    for streams in [1, 2] {
        group.bench_function(format!("floor, {streams} sockets"), |b| b.iter(|| floor(source, memory, streams)));
    }
    for (name, route) in [("fetch", Route::Network), ("same host", Route::SameHost)] {
        let touched = format!("{name}, touched memory");
        group.bench_function(touched, |b| b.iter(|| fetch_into(&source.large, route, memory)));
        group.bench_function(format!("{name}, fresh memory"), |b| b.iter(|| fetch_fresh(&source.large, route)));
    }
    group.finish();

    let mut group = criterion.benchmark_group("20,000 x 1 KiB");
    let small = SMALL * SMALL_ENTRIES;
    group.sampling_mode(SamplingMode::Flat).sample_size(10).throughput(Throughput::Bytes(small as u64));
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    group.bench_function("floor, 2 sockets", |b| b.iter(|| floor(source, &mut memory[..small], 2)));
    for (name, route) in [("fetch", Route::Network), ("same host", Route::SameHost)] {
        let touched = format!("{name}, touched memory");
        group.bench_function(touched, |b| b.iter(|| fetch_into(&source.small, route, memory)));
        group.bench_function(format!("{name}, fresh memory"), |b| b.iter(|| fetch_fresh(&source.small, route)));
    }
    group.finish();
}

/// What moving some bytes took: seconds of time, and of CPU time of the process that sends and of this one.
struct Cost {
    seconds: f64,
    sender: f64,
    receiver: f64,
}

/// Seconds of CPU time that the process of this number has taken.
fn cpu_seconds(process: u32) -> f64 {
    // What clock_getcpuclockid(3) gives, which the libc crate does not have.
    let clock = !process.cast_signed() << 3 | 2;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to a variable of this function.
    assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut time) }, 0, "a process that exists has a clock");
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn cost(source: &Source, run: impl FnOnce()) -> Cost {
    let cpu = || (cpu_seconds(source.child.id()), cpu_seconds(std::process::id()));
    let (before, started) = (cpu(), Instant::now());
    run();
    let (seconds, after) = (started.elapsed().as_secs_f64(), cpu());
    Cost { seconds, sender: after.0 - before.0, receiver: after.1 - before.1 }
}

/// One row: the rate of what was measured, how it compares with the floor of the same round, and the milliseconds of
/// CPU time that a GiB costs either side.
fn row(name: &str, bytes: usize, rounds: &[(Cost, Cost)]) {
    let spread = |value: &dyn Fn(&(Cost, Cost)) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        (values[values.len() / 2], values[0], values[values.len() - 1])
    };
    let per_gib = |seconds: f64| seconds * 1e3 * f64::from(1 << 30) / bytes as f64;
    let (rate, ..) = spread(&|(_, ours)| bytes as f64 / ours.seconds / 1e9);
    let (ratio, low, high) = spread(&|(floor, ours)| floor.seconds / ours.seconds);
    let (sender, ..) = spread(&|(_, ours)| per_gib(ours.sender));
    let (receiver, ..) = spread(&|(_, ours)| per_gib(ours.receiver));
    let cpu = format!("{sender:>8.0} {receiver:>9.0}");
    println!("{name:<44} {rate:>6.2} GB/s {cpu} {ratio:>9.2} ({low:.2}-{high:.2})");
}

/// A row of the table: its name, how many bytes it moves, and how.
type Row<'a> = (&'a str, usize, &'a dyn Fn(&mut [u8]));

/// Alternates floor and fetch, so that other load on the machine affects both.
fn compare(source: &Source, memory: &mut [u8]) {
    let small = SMALL * SMALL_ENTRIES;
    let (large_url, small_url) = (source.large.as_str(), source.small.as_str());
    let rows: [Row<'_>; 10] = [
        ("one raw socket, 256 MiB, touched", LARGE, &|m| floor(source, m, 1)),
        ("two raw sockets, 256 MiB, touched", LARGE, &|m| floor(source, m, 2)),
        ("fetch, 256 MiB, touched", LARGE, &|m| fetch_into(large_url, Route::Network, m)),
        ("fetch, 256 MiB, touched, borrowed source", LARGE, &|m| fetch_into(&source.borrowed, Route::Network, m)),
        ("fetch, 256 MiB, fresh", LARGE, &|_| fetch_fresh(large_url, Route::Network)),
        ("same host, 256 MiB, touched", LARGE, &|m| fetch_into(large_url, Route::SameHost, m)),
        ("same host, 256 MiB, fresh", LARGE, &|_| fetch_fresh(large_url, Route::SameHost)),
        ("two receivers at once, 2 x 128 MiB, touched", LARGE, &|m| two_receivers(source, m)),
        ("fetch, 20,000 x 1 KiB, touched", small, &|m| fetch_into(small_url, Route::Network, m)),
        ("same host, 20,000 x 1 KiB, touched", small, &|m| fetch_into(small_url, Route::SameHost, m)),
    ];
    let mut rounds: Vec<Vec<(Cost, Cost)>> = rows.iter().map(|_| Vec::new()).collect();
    for _ in 0..ROUNDS {
        for ((_, bytes, run), found) in rows.iter().zip(&mut rounds) {
            let floor = cost(source, || floor(source, &mut memory[..*bytes], 2));
            found.push((floor, cost(source, || run(&mut *memory))));
        }
    }
    println!("\n{ROUNDS} rounds; floor: two raw sockets into touched memory, right before each row");
    println!("{:<44} {:>11} {:>18} {:>9}", "", "", "CPU ms per GiB of", "");
    println!("{:<44} {:>11} {:>8} {:>9} {:>9} (min-max)", "", "median", "sender", "receiver", "of floor");
    for ((name, bytes, _), found) in rows.iter().zip(&rounds) {
        row(name, *bytes, found);
    }
}

fn main() {
    if std::env::var_os(SERVER).is_some() {
        return serve();
    }
    let source = Source::start();
    let mut memory = vec![1_u8; LARGE];
    let mut criterion = Criterion::default().configure_from_args();
    measure(&mut criterion, &source, &mut memory);
    criterion.final_summary();
    // Without --bench criterion only checks that everything runs.
    if std::env::args().any(|a| a == "--bench") {
        compare(&source, &mut memory);
    }
}
