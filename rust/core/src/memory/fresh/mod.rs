//! Pages for memory that was never touched: small or huge ones, whichever cost less here and now.
//!
//! Where the machine has its memory at hand, huge pages are up to six times cheaper to populate. On a virtual machine
//! whose host takes free memory back ("free page reporting", 2 MiB at a time), a huge page is always one that the host
//! has to back first, while small pages also come from fragments that it left alone: there huge pages are several times
//! dearer (docs/explanation/decisions.md). No setting of the kernel tells the two apart, and one turns into the
//! other while memory is being taken. So [`FreshPages`] measures: every call that populates notes what it cost, and now
//! and then one huge page's worth is populated with the kind of page that is not in use.
//!
//! Invariants:
//!
//! * huge pages are tried for the first time when the small ones that are still to come could cost a good deal more;
//!   after that, a try costs at most a [`PATIENCE`]th of what was spent since the one before;
//! * contents do not depend on the choice: pages are zeros either way, and advice that a kernel does not follow costs
//!   speed alone;
//! * nothing outside the range that [`FreshPages::new`] was given is advised or populated.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use super::PAGE;
use super::mapping::HUGE;
use crate::sync::Locked;

/// The kind of page not in use is tried again when this many times the cost of its last try has been spent.
const PATIENCE: u64 = 32;
/// Nanoseconds that huge pages would have to save, if a MiB of them cost [`HUGE_AT_BEST`], for the first try of them:
/// a few times what it costs where they are dear (6 ms were measured).
const WORTH_A_TRY: u64 = 20_000_000;
/// Nanoseconds for a MiB of huge pages where the machine has its memory at hand (measured: 60 to 200 us).
const HUGE_AT_BEST: u64 = 100_000;
/// Shorter ranges have small pages, and nothing about them is measured.
const MEASURED: usize = 32 << 20;
/// A huge page that costs so many times what small ones do ends their use: the machine has no more of them at hand, as
/// happens after a try that found one of a few.
const DEAR: u64 = 2;
/// How many bytes it takes for new costs to count as much as all earlier ones.
const MEMORY: u64 = 8 << 20;
/// Shorter runs of pages are not timed: reading the clock would be a good part of what they cost.
const TIMED: usize = 256 << 10;

const MIB: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageSize {
    Small,
    Huge,
}

impl PageSize {
    /// The other of the two kinds of pages.
    fn other(self) -> Self {
        match self {
            Self::Small => Self::Huge,
            Self::Huge => Self::Small,
        }
    }
}

/// Which pages are used, decided by what they have cost. Times are in nanoseconds of the thread's CPU time, in which
/// the host's work on a virtual machine's memory shows.
#[derive(Debug)]
struct Choice {
    used: PageSize,
    /// What a MiB costs in small pages and in huge ones, once something is known of it.
    costs: [Option<u64>; 2],
    /// Bytes that are still to be populated.
    left: u64,
    /// Spent on pages since the other kind was last tried.
    spent: u64,
    /// Whether a thread is at a try.
    trying: bool,
}

impl Choice {
    fn new(len: u64) -> Self {
        Self { used: PageSize::Small, costs: [None; 2], left: len, spent: 0, trying: false }
    }

    fn cost(&self, kind: PageSize) -> Option<u64> {
        self.costs[kind as usize]
    }

    /// The kind to be tried now, if it is time. The caller reports the outcome with [`Choice::tried`].
    fn begin_try(&mut self) -> Option<PageSize> {
        let other = self.used.other();
        let due = if let Some(cost) = self.cost(other) {
            self.spent >= PATIENCE * cost * (HUGE as u64 / MIB)
        } else {
            let excess = self.cost(self.used).map_or(0, |cost| cost.saturating_sub(HUGE_AT_BEST));
            excess.saturating_mul(self.left / MIB) >= WORTH_A_TRY
        };
        if !due || self.trying {
            return None;
        }
        self.trying = true;
        Some(other)
    }

    /// A try of `kind` took `time` for as much memory as a huge page has. Returns whether `kind` is used from now on.
    fn tried(&mut self, kind: PageSize, time: u64) -> bool {
        self.trying = false;
        self.spent = 0;
        self.left = self.left.saturating_sub(HUGE as u64);
        self.costs[kind as usize] = Some(time / (HUGE as u64 / MIB));
        self.reconsider()
    }

    /// `len` bytes in pages of `kind` took `time`. Returns whether another kind is used from now on.
    fn note(&mut self, kind: PageSize, len: u64, time: u64) -> bool {
        self.spent += time;
        self.left = self.left.saturating_sub(len);
        let now = time.saturating_mul(MIB) / len.max(1);
        let before = self.cost(kind).unwrap_or(now);
        let average = (before * MEMORY + now.saturating_mul(len)) / (MEMORY + len);
        // Less than a huge page may still have taken a whole one.
        let huge = time / (HUGE as u64 / MIB);
        let is_dear = self.cost(PageSize::Small).is_some_and(|small| huge > DEAR * small);
        self.costs[kind as usize] = Some(if kind == PageSize::Huge && is_dear { huge } else { average });
        self.reconsider()
    }

    /// Changes to the other kind if that costs less. Huge pages, from which later accesses profit, are left only for
    /// pages that cost a fifth less.
    fn reconsider(&mut self) -> bool {
        let [Some(small), Some(huge)] = self.costs else { return false };
        let better = match self.used {
            PageSize::Small if huge < small => PageSize::Huge,
            PageSize::Huge if small < huge - huge / 5 => PageSize::Small,
            used => used,
        };
        std::mem::replace(&mut self.used, better) != better
    }
}

/// A range of fresh memory that several threads populate, part by part, while they fill it.
#[derive(Debug)]
pub(crate) struct FreshPages {
    range: Range<usize>,
    choice: Mutex<Choice>,
}

impl FreshPages {
    /// For the memory at the addresses `range`, which nobody has touched. It begins with small pages.
    pub(super) fn new(range: Range<usize>) -> Self {
        let choice = Mutex::new(Choice::new(range.len() as u64));
        let new = Self { range, choice };
        if new.is_measured() {
            // Where huge pages are the rule, there would be no small ones to compare them with.
            advise(&new.range, PageSize::Small);
        }
        new
    }

    fn is_measured(&self) -> bool {
        self.range.len() >= MEASURED
    }

    /// Gives the process the pages at the addresses `pages`, as far as they lie in this memory, before bytes arrive:
    /// one call instead of a fault for each page. The memory must still be there.
    pub(crate) fn populate(&self, pages: Range<usize>) {
        let pages = pages.start.max(self.range.start)..pages.end.min(self.range.end);
        if !self.is_measured() || pages.len() < TIMED {
            return populate(pages);
        }
        let whole = pages.start.next_multiple_of(HUGE);
        let attempt = (whole + HUGE <= pages.end).then(|| self.choice.locked().begin_try()).flatten();
        let Some(kind) = attempt else { return self.populate_timed(pages) };
        let tried = whole..whole + HUGE;
        advise(&tried, kind);
        let ((), time) = timed(|| populate(tried.clone()));
        let mut choice = self.choice.locked();
        // All of the memory has one kind again.
        let affected = if choice.tried(kind, time) { &self.range } else { &tried };
        advise(affected, choice.used);
        drop(choice);
        self.populate_timed(pages.start..tried.start);
        self.populate_timed(tried.end..pages.end);
    }

    /// Populates `pages`, huge ones one at a time: the next may cost many times what this one does.
    fn populate_timed(&self, pages: Range<usize>) {
        let mut at = pages.start;
        while at < pages.end {
            let used = self.choice.locked().used;
            let end = match used {
                PageSize::Small => pages.end,
                PageSize::Huge => pages.end.min((at + 1).next_multiple_of(HUGE)),
            };
            let ((), time) = timed(|| populate(at..end));
            let mut choice = self.choice.locked();
            if choice.note(used, (end - at) as u64, time) {
                advise(&self.range, choice.used);
            }
            at = end;
        }
    }
}

/// Asks for pages of `kind` at addresses that are touched for the first time from now on. A kernel without huge pages
/// refuses, and stays with small ones.
fn advise(pages: &Range<usize>, kind: PageSize) {
    let advice = match kind {
        PageSize::Small => libc::MADV_NOHUGEPAGE,
        PageSize::Huge => libc::MADV_HUGEPAGE,
    };
    // SAFETY: advice about the size of pages changes no contents.
    unsafe { libc::madvise(pages.start as *mut libc::c_void, pages.len(), advice) };
}

/// Makes `pages` present and writable, without a change to what they contain.
fn populate(pages: Range<usize>) {
    // SAFETY: MADV_POPULATE_WRITE changes no contents; addresses outside of mappings are answered with an error.
    let done = unsafe { libc::madvise(pages.start as *mut libc::c_void, pages.len(), libc::MADV_POPULATE_WRITE) };
    if done != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
        touch(pages);
    }
}

/// As [`populate`], for kernels before 5.14, which cannot do it in one call.
pub(super) fn touch(pages: Range<usize>) {
    for page in pages.step_by(PAGE) {
        // SAFETY: the memory of a receive is writable and mapped while it is filled.
        let byte = unsafe { AtomicU8::from_ptr(page as *mut u8) };
        // Another thread may be writing here: a byte is only ever replaced by its own value. (An "or" of nothing would
        // be compiled to a read.)
        let value = byte.load(Ordering::Relaxed);
        let _ = byte.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// What `work` returns, and the CPU time that it takes this thread, in nanoseconds: waiting for a core does not count,
/// the host of a virtual machine that has to find memory does.
pub(crate) fn timed<R>(work: impl FnOnce() -> R) -> (R, u64) {
    let now = || {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes the one struct it is given.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
    };
    let before = now();
    let result = work();
    (result, now().saturating_sub(before))
}

#[cfg(test)]
mod tests;
