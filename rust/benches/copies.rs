//! Copies of a state by several threads, beside one `memcpy` of as many bytes by as many threads.
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on should panic")]
#![allow(missing_docs, reason = "criterion's macros make functions without any")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use tensorferry_core::{SharedBuffer, Transfer, copy_all};

const TOTAL: usize = 512 << 20;
const THREADS: usize = 2;

/// The floor: each thread copies a part in one piece.
fn memcpy(source: &[u8], target: usize) {
    let share = source.len() / THREADS;
    std::thread::scope(|scope| {
        for (at, part) in source.chunks(share).enumerate() {
            scope.spawn(move || {
                let to = (target + at * share) as *mut u8;
                // SAFETY: the target is as long as the source, and no other thread has this part of it.
                unsafe { std::ptr::copy_nonoverlapping(black_box(part).as_ptr(), to, part.len()) };
            });
        }
    });
}

fn copies(criterion: &mut Criterion) {
    let source = vec![1_u8; TOTAL];
    // What a checkpointer copies to: shared memory whose pages are there.
    let target = SharedBuffer::new(TOTAL as u64, THREADS).unwrap();
    let mut group = criterion.benchmark_group("copies of 512 MiB");
    group.sampling_mode(SamplingMode::Flat).sample_size(10).throughput(Throughput::Bytes(TOTAL as u64));
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    group.bench_function("floor, memcpy", |b| b.iter(|| memcpy(&source, target.address())));
    for len in [TOTAL, 1 << 20, 16 << 10, 1 << 10] {
        let transfers: Vec<_> = (0..TOTAL / len)
            .map(|n| Transfer { from: source.as_ptr() as usize + n * len, to: target.address() + n * len, len })
            .collect();
        // SAFETY: both have as many bytes, and nobody else knows the target.
        group
            .bench_function(format!("tensors of {len} bytes"), |b| b.iter(|| unsafe { copy_all(&transfers, THREADS) }));
    }
    group.finish();
}

criterion_group!(benches, copies);
criterion_main!(benches);
