//! The handler of SIGBUS: it puts zeros in the place of pages of a file that cannot be read.
//!
//! Invariants:
//!
//! * the handler acts on addresses of guards that exist, and leaves all others to the handler before it;
//! * it takes no lock and allocates nothing.

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// A range of addresses that the handler watches. It is never freed, since a handler may be reading it.
pub(super) struct Guard {
    /// 0 once the pages are gone.
    pub(super) start: AtomicUsize,
    end: usize,
    /// Whether zeros were put in the place of some page, or a change was noticed otherwise.
    pub(super) broken: AtomicBool,
    next: *mut Guard,
}

/// All guards, the newest first.
static GUARDS: AtomicPtr<Guard> = AtomicPtr::new(ptr::null_mut());
/// What handled SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

impl Guard {
    /// Has the handler watch `[start, end)`, the pages of a mapping.
    pub(super) fn add(start: usize, end: usize) -> &'static Self {
        let (start, broken) = (AtomicUsize::new(start), AtomicBool::new(false));
        let guard = Box::leak(Box::new(Self { start, end, broken, next: ptr::null_mut() }));
        let mut first = GUARDS.load(Ordering::Acquire);
        loop {
            guard.next = first;
            match GUARDS.compare_exchange_weak(first, guard, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return guard,
                Err(now) => first = now,
            }
        }
    }

    /// Puts zeros in the place of all bytes from the 64 KiB on that `address` lies in, if this guard watches it; says
    /// whether it did.
    fn mend(&self, address: usize) -> bool {
        let start = self.start.load(Ordering::Acquire);
        if start == 0 || !(start..self.end).contains(&address) {
            return false;
        }
        // Before the zeros can be read.
        self.broken.store(true, Ordering::Release);
        // A mapping starts at a page, and no page is larger than 64 KiB.
        let first = (address & !0xffff).max(start);
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
        );
        // SAFETY: the range is inside the mapping of this guard, whose readers accept any bytes and ask afterwards.
        let made = unsafe { libc::mmap(first as *mut c_void, self.end - first, protection, flags, -1, 0) };
        made != libc::MAP_FAILED
    }
}

/// Installs the handler, once in a process.
pub(super) fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    if INSTALLED.get().is_some() {
        return Ok(());
    }
    // SAFETY: zeros are a valid `sigaction`; the pointers are to structures of this frame.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) != 0 {
            return Err(io::Error::last_os_error());
        }
        // The first of two threads counts: what the second one finds may be our own handler.
        if BEFORE.set(before).is_err() {
            return Ok(());
        }
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_bus_error as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        if libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let _ = INSTALLED.set(());
    Ok(())
}

extern "C" fn on_bus_error(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a valid structure, which has an address for this signal.
    let address = unsafe { (*info).si_addr() }.addr();
    let mut next = GUARDS.load(Ordering::Acquire);
    // SAFETY: guards are never freed.
    while let Some(guard) = unsafe { next.as_ref() } {
        if guard.mend(address) {
            return;
        }
        next = guard.next;
    }
    // Not ours. The access is repeated after this, and the signal goes to the handler that was there before.
    if let Some(before) = BEFORE.get() {
        // SAFETY: a structure that the system has filled.
        unsafe { libc::sigaction(libc::SIGBUS, before, ptr::null_mut()) };
    }
}
