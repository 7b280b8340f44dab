//! Parts of entries, fetched into the caller's memory: the bytes are exact and verified, and few others are sent.

use crate::common::faults::{ALWAYS, Fault, Proxy};
use crate::common::{BLOCK, Rig, STEP, State, lanes};
use tensorferry_core::{
    EntryRef, Error, ErrorKind, FetchOptions, Remote, Repeat, Report, Secret, ServerConfig, Slice, SliceRequest,
    Stability, fetch_slices,
};
use tensorferry_wire::dtype::Dtype;

/// The part of an entry to fetch, `(entry, start, run, repeats)`; it goes into a buffer of its own.
pub(crate) type Part<'a> = (&'a str, u64, u64, Vec<Repeat>);

pub(crate) fn repeat(count: u64, entry_stride: u64, memory_stride: u64) -> Repeat {
    Repeat { count, entry_stride, memory_stride }
}

/// The expected bytes of a part, and a buffer to fetch it into.
pub(crate) fn expected(state: &State, (entry, start, run, repeats): &Part<'_>) -> (Vec<u8>, Vec<u8>) {
    let reach = repeats.iter().map(|r| (r.count - 1) * r.memory_stride).sum::<u64>() + run;
    let mut bytes = vec![0xEE; usize::try_from(reach).unwrap()];
    let blank = bytes.clone();
    let mut places = vec![(*start, 0)];
    for r in repeats {
        places = places
            .iter()
            .flat_map(|&(a, b)| (0..r.count).map(move |i| (a + i * r.entry_stride, b + i * r.memory_stride)))
            .collect();
    }
    for (from, to) in places {
        let (from, to, run) =
            (usize::try_from(from).unwrap(), usize::try_from(to).unwrap(), usize::try_from(*run).unwrap());
        bytes[to..to + run].copy_from_slice(&state.bytes(entry)[from..from + run]);
    }
    (bytes, blank)
}

pub(crate) fn slices(state: &State, parts: &[Part<'_>], buffers: &mut [Vec<u8>]) -> Vec<Slice> {
    let make = |((entry, start, run, repeats), buffer): (&Part<'_>, &mut Vec<u8>)| {
        let nbytes = state.bytes(entry).len() as u64;
        // SAFETY: each part has a buffer of its own, as long as its reach, which nobody touches meanwhile.
        unsafe {
            Slice::new(*entry, (Dtype::U8, nbytes), (*start, *run), buffer.as_mut_ptr() as usize, repeats.clone())
        }
    };
    parts.iter().zip(buffers).map(make).collect()
}

pub(crate) fn fetch(rig: &Rig, state: &State, parts: &[Part<'_>], options: FetchOptions) -> Result<Report, Error> {
    let (wanted, mut buffers): (Vec<_>, Vec<_>) = parts.iter().map(|p| expected(state, p)).unzip();
    let remote = Remote::open(&[&rig.url()], STEP, options)?;
    let report = remote.fetch_slices(&slices(state, parts, &mut buffers))?;
    for ((part, wanted), found) in parts.iter().zip(wanted).zip(buffers) {
        assert!(wanted == found, "{part:?} arrived with wrong bytes");
    }
    Ok(report)
}

fn sliced(count: usize) -> FetchOptions {
    FetchOptions { ahead: 4096, ..lanes(count) }
}

fn state() -> State {
    State::of(&[3, 0, 5 * BLOCK + 77, 17, 2 * BLOCK, 100_000], 3)
}

#[test]
fn parts_of_any_shape_arrive_and_nothing_beside_them() {
    let state = state();
    let parts: Vec<Part<'_>> = vec![
        ("w0", 1, 2, vec![]),
        ("w2", 0, 1, vec![]),
        ("w2", 4095, 3 * BLOCK as u64, vec![]),
        ("w2", 5 * BLOCK as u64, 77, vec![]),
        ("w4", 5, 100, vec![repeat(1000, 2000, 150)]),
        ("w4", 200, 3, vec![repeat(3, 600_000, 70), repeat(7, 500, 9)]),
        ("w5", 0, 100_000, vec![]),
        // The same bytes, requested a second time for another place.
        ("w5", 10, 90_000, vec![]),
        ("w1", 0, 0, vec![]),
    ];
    let (private, borrowed) = (Rig::serving(&state), Rig::new());
    borrowed.server.store().publish(STEP, state.publication(Stability::Borrowed));
    for rig in [&private, &borrowed] {
        for count in [1, 2, 5] {
            let report = fetch(rig, &state, &parts, sliced(count)).unwrap();
            assert_eq!(report.retries, 0);
            let wanted: u64 = parts.iter().map(|p| p.2 * p.3.iter().map(|r| r.count).product::<u64>()).sum();
            assert_eq!(report.wanted, wanted);
        }
    }
}

#[test]
fn a_small_container_comes_with_its_header() {
    let state = State::of(&[300, 9], 1);
    let rig = Rig::serving(&state);
    let report = fetch(&rig, &state, &[("w0", 7, 200, vec![]), ("w1", 0, 9, vec![])], lanes(2)).unwrap();
    assert_eq!((report.bytes, report.wanted), (309, 209));
    let here = std::net::IpAddr::from([127, 0, 0, 1]);
    assert_eq!((report.lanes, report.routes), (1, [(here, here)].into()), "that connection is the only one");
}

#[test]
fn the_way_depends_on_all_that_is_asked_for() {
    let large = 20 * BLOCK as u64;
    let state = State::of(&[20 * BLOCK], 3);
    let rig = Rig::serving(&state);
    // Bytes that are requested twice come in two transfers: here a short one first, then two of half the size each.
    let short_first = [("w0", 0, 10, vec![]), ("w0", 0, large, vec![])];
    let halves = [("w0", 0, large / 2, vec![]), ("w0", 0, large / 2, vec![])];
    for parts in [short_first, halves] {
        assert!(fetch(&rig, &state, &parts, sliced(2)).unwrap().same_host, "{parts:?}");
    }
    let little = [("w0", 0, 10, vec![]), ("w0", 0, large / 4, vec![])];
    assert!(!fetch(&rig, &state, &little, sliced(2)).unwrap().same_host);
}

#[test]
fn a_contiguous_slice_costs_hardly_more_than_itself() {
    let state = State::of(&[32 * BLOCK], 3);
    let rig = Rig::serving(&state);
    for (start, len) in [(1, BLOCK / 4), (BLOCK / 2 + 3, 5 * BLOCK), (12_345, 11 * BLOCK + 1), (0, 32 * BLOCK)] {
        let report = fetch(&rig, &state, &[("w0", start as u64, len as u64, vec![])], sliced(2)).unwrap();
        assert!(report.bytes * 100 <= report.wanted * 105, "{} bytes for {}", report.bytes, report.wanted);
    }
    // With strides: long gaps are not transferred.
    let far = [("w0", 0, 65_536, vec![repeat(16, 2 * BLOCK as u64, 65_536)])];
    assert_eq!(fetch(&rig, &state, &far, sliced(2)).unwrap().bytes, 16 * (65_536 + 8));
    // Nor are short gaps, whether there are few or many.
    for count in [16, 100, 2000] {
        let near = [("w0", 0, 8192, vec![repeat(count, 16_384, 8192)])];
        assert_eq!(fetch(&rig, &state, &near, sliced(2)).unwrap().bytes, count * (8192 + 2 * 8));
    }
}

#[test]
fn columns_cost_no_more_than_their_blocks_whatever_the_way() {
    let state = State::of(&[3, 48 * BLOCK, 5], 3);
    let secret = Secret::new(&[7; 32]).unwrap();
    for secret in [None, Some(secret)] {
        let config = ServerConfig { secret: secret.clone(), ..ServerConfig::default() };
        let rig = Rig::configured(&config).publishing(state.publication(Stability::Borrowed));
        for same_host in [false, true] {
            let options = FetchOptions { same_host, secret: secret.clone(), ..sliced(3) };
            // 48 MiB as rows of 12 KiB, of which the middle third is requested; then runs that begin anywhere.
            let thirds = [("w1", 4096, 4096, vec![repeat(4096, 12_288, 4096)])];
            let report = fetch(&rig, &state, &thirds, options.clone()).unwrap();
            assert_eq!((report.bytes, report.same_host), (4096 * (4096 + 8), same_host));
            let odd = [("w1", 4000, 5000, vec![repeat(3900, 12_345, 5001)])];
            let report = fetch(&rig, &state, &odd, options).unwrap();
            assert!(report.bytes <= 3900 * 11 * (512 + 8), "{report:?}");
        }
    }
}

#[test]
fn slices_that_do_not_fit_are_refused_before_anything_is_written() {
    let state = state();
    let rig = Rig::serving(&state);
    let mut buffer = vec![0xEE_u8; 1 << 20];
    let address = buffer.as_mut_ptr() as usize;
    let (size, dtype) = (state.bytes("w2").len() as u64, Dtype::U8);
    let end = usize::MAX - 10;
    let cases = [
        ("w2", (dtype, size), (size, 1), address, vec![], ErrorKind::Invalid),
        ("w2", (dtype, size), (0, size + 1), address, vec![], ErrorKind::Invalid),
        ("w2", (dtype, size), (u64::MAX, 2), address, vec![], ErrorKind::Invalid),
        ("w2", (dtype, size), (0, 10), address, vec![repeat(2, size - 9, 10)], ErrorKind::Invalid),
        ("w2", (dtype, size), (0, 10), address, vec![repeat(u64::MAX, u64::MAX, 10)], ErrorKind::Invalid),
        ("w2", (dtype, size), (0, 1), address, vec![repeat(u64::MAX, 0, 0)], ErrorKind::Invalid),
        ("w2", (dtype, size), (0, 10), end, vec![repeat(2, 10, 10)], ErrorKind::Invalid),
        ("w2", (Dtype::I8, size), (0, 10), address, vec![], ErrorKind::Protocol),
        ("w2", (dtype, size - 1), (0, 10), address, vec![], ErrorKind::Protocol),
        ("w9", (dtype, 10), (0, 10), address, vec![], ErrorKind::Protocol),
    ];

    for (entry, kind, part, address, repeats, expected) in cases {
        // SAFETY: `buffer` is long enough for what fits, and what does not is never written.
        let slice = unsafe { Slice::new(entry, kind, part, address, repeats) };
        let remote = Remote::open(&[&rig.url()], STEP, sliced(1)).unwrap();
        let refused = remote.fetch_slices(std::slice::from_ref(&slice)).unwrap_err();
        assert_eq!(refused.kind(), expected, "{slice:?}: {refused}");
        assert!(refused.to_string().contains(entry), "{refused}");
    }
    assert!(buffer.iter().all(|b| *b == 0xEE));
}

#[test]
fn entries_are_found_by_their_numbers_as_well() {
    let (state, mut buffer) = (state(), [0; 8]);
    let rig = Rig::serving(&state);
    let size = state.bytes("w2").len() as u64;
    let mut fetch = |number| {
        let (kind, address) = ((Dtype::U8, size), buffer.as_mut_ptr() as usize);
        // SAFETY: `buffer` has room for the run, and nobody else uses it.
        let slice = unsafe { Slice::new(EntryRef::Number(number), kind, (5, 8), address, vec![]) };
        Remote::open(&[&rig.url()], STEP, sliced(1)).unwrap().fetch_slices(&[slice])
    };
    fetch(2).unwrap();
    for number in [4, 6] {
        let refused = fetch(number).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Protocol, "{number}: {refused}");
    }
    assert_eq!(buffer, state.bytes("w2")[5..13]);
}

#[test]
fn slices_of_many_sources_are_gathered_and_the_first_failure_ends_it() {
    let states: Vec<_> = (0..5).map(|i| State::of(&[BLOCK + i, 7], i as u64 * 10)).collect();
    let rigs: Vec<_> = states.iter().map(Rig::serving).collect();
    let part = |i: usize| [("w0", 3, (BLOCK / 2 + i) as u64, vec![])];
    let mut buffers: Vec<_> = (0..5).map(|i| expected(&states[i], &part(i)[0]).1).collect();
    let orders = |buffers: &mut [Vec<u8>], step: i64| -> Vec<SliceRequest> {
        let order = |(i, buffer): (usize, &mut Vec<u8>)| SliceRequest {
            urls: vec![rigs[i].url()],
            step: if i == 3 { step } else { STEP },
            slices: slices(&states[i], &part(i), std::slice::from_mut(buffer)),
            is_shared: false,
        };
        buffers.iter_mut().enumerate().map(order).collect()
    };
    let report = fetch_slices(orders(&mut buffers, STEP), &sliced(4)).unwrap();
    for (i, buffer) in buffers.iter().enumerate() {
        assert!(*buffer == expected(&states[i], &part(i)[0]).0, "source {i}");
    }
    assert_eq!(report.wanted, (0..5).map(|i| (BLOCK / 2 + i) as u64).sum::<u64>());
    let options = sliced(4);
    let refused = fetch_slices(orders(&mut buffers, STEP + 1), &options).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Status(400), "{refused}");
    fetch_slices(orders(&mut buffers, STEP), &options).expect("a failure ends itself alone");
    options.cancel.cancel();
    let refused = fetch_slices(orders(&mut buffers, STEP), &options).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Cancelled);
    assert_eq!(fetch_slices(Vec::new(), &sliced(4)).unwrap().bytes, 0);
}

#[test]
fn damaged_blocks_are_fetched_again_and_named_when_that_does_not_help() {
    let state = state();
    let rig = Rig::serving(&state);
    let (once, always) =
        (Proxy::new(&rig.url(), Fault::FlipEvery(BLOCK / 2), 0), Proxy::new(&rig.url(), Fault::FlipEvery(4500), 0));
    for (proxy, times) in [(once, 1), (always, ALWAYS)] {
        proxy.arm(0);
        let part = [("w2", 4096, 2 * BLOCK as u64, vec![])];
        let (wanted, blank) = expected(&state, &part[0]);
        let mut buffers = vec![blank];
        let remote = Remote::open(&[proxy.url()], STEP, sliced(1)).unwrap();
        proxy.arm(times);
        let result = remote.fetch_slices(&slices(&state, &part, &mut buffers));
        if times == ALWAYS {
            let refused = result.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
            assert!(refused.to_string().contains("w2"), "{refused}");
        } else {
            assert!(result.unwrap().retries > 0);
            assert!(buffers[0] == wanted);
        }
    }
}
