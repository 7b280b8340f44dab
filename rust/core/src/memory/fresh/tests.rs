use super::super::mapping::{Mapping, resident};
use super::*;

const MS: u64 = 1_000_000;

/// Populates `mib` MiB in calls of 4 MiB, huge pages one by one, where a MiB costs what `cost` says of the kind and of what was populated
/// before. Returns what was spent and how many tries there were.
fn simulate(mib: u64, cost: impl Fn(PageSize, u64) -> u64) -> (u64, u32) {
    let (mut choice, mut at, mut spent, mut tries) = (Choice::new(mib << 20), 0, 0, 0);
    while at < mib {
        if let Some(kind) = choice.begin_try() {
            assert!(choice.begin_try().is_none(), "one try at a time");
            spent += 2 * cost(kind, at);
            choice.tried(kind, 2 * cost(kind, at));
            (at, tries) = (at + 2, tries + 1);
        }
        let len = if choice.used == PageSize::Huge { 2 } else { 4 };
        let time = len * cost(choice.used, at);
        choice.note(choice.used, len << 20, time);
        (at, spent) = (at + len, spent + time);
    }
    (spent, tries)
}

#[test]
fn the_cheaper_kind_is_used_whichever_it_is() {
    for (small, huge) in [(MS, MS / 6), (MS / 4, MS / 8), (2 * MS, 20 * MS), (MS / 4, 3 * MS), (MS, MS)] {
        let (spent, tries) = simulate(1024, |kind, _| if kind == PageSize::Small { small } else { huge });
        let best = 1024 * small.min(huge);
        // The first try, and what tries later on may cost.
        let most = best + best / 16 + 2 * huge + 8 * small;
        assert!(spent <= most, "small {small}, huge {huge}: {spent} instead of {best}, {tries} tries");
    }
}

/// `then` from `from` MiB on, and `first` before.
fn changing(at: u64, from: u64, first: u64, then: u64) -> u64 {
    if at < from { first } else { then }
}

#[test]
fn the_choice_follows_when_the_costs_change() {
    // Fragments that the host left alone run out after 512 MiB.
    let (spent, _) = simulate(1024, |kind, at| match kind {
        PageSize::Small => changing(at, 512, MS / 4, MS / 4 + 20 * MS),
        PageSize::Huge => 5 * MS,
    });
    let best = 512 * MS / 4 + 512 * 5 * MS;
    assert!(spent < best + best / 10, "{spent} instead of {best}");
    // Huge pages were dear, and are cheap from the middle on: noticed by the next try.
    let (spent, tries) = simulate(1024, |kind, at| match kind {
        PageSize::Small => MS,
        PageSize::Huge => changing(at, 512, 3 * MS, MS / 6),
    });
    assert!(spent < 512 * MS + 6 * MS * u64::from(tries) + 512 * MS / 6 + 200 * MS, "{spent}, {tries} tries");
    assert!((2..8).contains(&tries), "{tries}");
    // A few huge pages at hand mislead for no longer than they last.
    for at_hand in [6, 8, 20] {
        let (spent, tries) = simulate(300, |kind, at| match kind {
            PageSize::Small => MS / 4,
            PageSize::Huge => changing(at, at_hand, MS / 8, 4 * MS),
        });
        assert_eq!(tries, 1, "{at_hand}");
        // The one page that showed it.
        assert!(spent < 300 * MS / 4 + 2 * 4 * MS + 2 * MS, "{spent} where {at_hand} MiB were at hand");
    }
}

#[test]
fn little_memory_is_not_worth_a_try_that_may_be_dear() {
    let costs = |kind, _| if kind == PageSize::Small { MS / 4 } else { 10 * MS };
    assert_eq!(simulate(128, costs), (128 * MS / 4, 0));
    assert_eq!(simulate(1024, costs).1, 1);
    // Where small pages are dear as well, there is more to be gained.
    assert!(simulate(128, |kind, _| if kind == PageSize::Small { MS } else { MS / 6 }).1 > 0);
}

#[test]
fn pages_are_populated_where_they_were_asked_for_and_nowhere_else() {
    for len in [8 << 20, 64 << 20_usize] {
        let mapping = Mapping::new(len as u64, true).unwrap();
        let start = mapping.start.as_ptr() as usize;
        // The first and the last MiB belong to somebody else.
        let fresh = FreshPages::new(start + (1 << 20)..start + len - (1 << 20));
        fresh.populate(start..start + (6 << 20));
        assert_eq!(resident(start, 1 << 20), 0, "{len}: in front of the range");
        assert_eq!(resident(start + (1 << 20), 5 << 20), 5 << 8, "{len}");
        fresh.populate(start + len - (3 << 20)..start + len + (4 << 20));
        assert_eq!(resident(start + len - (3 << 20), 2 << 20), 2 << 8, "{len}");
    }
}

#[test]
fn touching_pages_makes_them_present_and_changes_no_byte() {
    let mapping = Mapping::new(4 << 20, true).unwrap();
    let start = mapping.start.as_ptr() as usize;
    // SAFETY: inside the mapping, which nobody else knows.
    unsafe { mapping.start.as_ptr().add(PAGE).write(7) };
    touch(start..start + (1 << 20));
    assert_eq!(resident(start, 1 << 20), 1 << 8);
    // SAFETY: as before; the pages are there.
    let bytes = unsafe { std::slice::from_raw_parts(start as *const u8, 1 << 20) };
    assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == if at == PAGE { 7 } else { 0 }));
}

#[test]
fn bytes_written_while_the_kind_of_page_changes_are_kept() {
    const PART: usize = 3 << 20;
    let mapping = Mapping::new(32 * PART as u64, true).unwrap();
    let start = mapping.start.as_ptr() as usize;
    let fresh = FreshPages::new(start..start + 32 * PART);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| {
            for kind in [PageSize::Huge, PageSize::Small].into_iter().cycle() {
                advise(&fresh.range, kind);
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let writers: Vec<_> = (0..4_usize)
            .map(|thread| {
                let fresh = &fresh;
                scope.spawn(move || {
                    for part in (thread..32).step_by(4) {
                        let at = start + part * PART;
                        let value = u8::try_from(part + 1).unwrap();
                        fresh.populate(at..at + PART);
                        // SAFETY: each part of the mapping has one writer.
                        unsafe { std::ptr::write_bytes(at as *mut u8, value, PART) };
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        changing.join().unwrap();
    });
    for part in 0..32 {
        // SAFETY: inside the mapping, which nobody writes to any more.
        let bytes = unsafe { std::slice::from_raw_parts((start + part * PART) as *const u8, PART) };
        assert!(bytes.iter().all(|&byte| usize::from(byte) == part + 1), "part {part}");
    }
}
