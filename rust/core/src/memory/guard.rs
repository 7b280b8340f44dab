//! The handler of SIGBUS: it puts zeros in the place of pages of a file that cannot be read.
//!
//! Invariants:
//!
//! * the handler acts on addresses of guards that exist, and calls the handler before it for all others;
//! * it takes no lock and allocates nothing.

use crate::sync::Locked;
use std::ffi::{c_int, c_void};
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

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

/// Installs the handler, once in a process. Threads that come meanwhile wait until it is there.
pub(super) fn install() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.locked();
    if *installed {
        return Ok(());
    }
    // SAFETY: zeros are a valid `sigaction`; the pointers are to structures of this frame.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) != 0 {
            return Err(io::Error::last_os_error());
        }
        let _ = BEFORE.set(before);
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_bus_error as WithInfo as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        if libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    *installed = true;
    Ok(())
}

type WithInfo = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
type Plain = extern "C" fn(c_int);

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid structure. The signal of an access has a positive code and an address, one that
    // was sent has a sender.
    let (code, address, is_own) =
        unsafe { ((*info).si_code, (*info).si_addr().addr(), (*info).si_pid() == libc::getpid()) };
    let mut next = GUARDS.load(Ordering::Acquire);
    // SAFETY: guards are never freed.
    while let Some(guard) = unsafe { next.as_ref() } {
        // A handler that was installed after this one, such as Python's faulthandler, puts this one back and raises the
        // signal again. The access is repeated after that, and decides.
        let may_be_repeated = code == libc::SI_TKILL && is_own && guard.start.load(Ordering::Acquire) != 0;
        if may_be_repeated || (code > 0 && guard.mend(address)) {
            return;
        }
        next = guard.next;
    }
    let Some(before) = BEFORE.get() else { return };
    // SAFETY: the flags say which kind of function the handler is; the calls are fit for handlers.
    unsafe {
        match before.sa_sigaction {
            libc::SIG_IGN if code <= 0 => {}
            // The system ignores no signal of an access.
            libc::SIG_DFL | libc::SIG_IGN => {
                libc::signal(signal, libc::SIG_DFL);
                if code <= 0 {
                    libc::raise(signal);
                }
            }
            handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
                std::mem::transmute::<usize, WithInfo>(handler)(signal, info, context);
            }
            handler => std::mem::transmute::<usize, Plain>(handler)(signal),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsRawFd;
    use std::os::unix::process::ExitStatusExt;
    use std::path::{Path, PathBuf};

    use super::super::FilePages;
    use super::*;

    /// Names the case that a child process runs, and the folder that it may use.
    const CASE: &str = "TENSORFERRY_GUARD_CASE";
    const FOLDER: &str = "TENSORFERRY_GUARD_FOLDER";
    /// The mapping of the handler that was there before.
    static FOREIGN: AtomicUsize = AtomicUsize::new(0);
    const LEN: usize = 1 << 16;

    fn path(name: &str) -> PathBuf {
        Path::new(&std::env::var(FOLDER).unwrap()).join(name)
    }

    /// Reads a page behind the end of the file at `path`, which is mapped at `start`.
    fn read_behind_the_end(path: &Path, start: usize) -> u8 {
        OpenOptions::new().write(true).open(path).unwrap().set_len(1).unwrap();
        // SAFETY: in a mapping, and a handler puts a page there.
        unsafe { ptr::read_volatile((start + LEN - 1) as *const u8) }
    }

    fn guarded(name: &str) -> u8 {
        let path = path(name);
        std::fs::write(&path, vec![7; LEN]).unwrap();
        let pages = FilePages::map(&path).unwrap();
        read_behind_the_end(&path, pages.address())
    }

    fn foreign(name: &str) -> u8 {
        let path = path(name);
        std::fs::write(&path, vec![7; LEN]).unwrap();
        let file = File::open(&path).unwrap();
        // SAFETY: a new mapping touches no existing memory.
        let start =
            unsafe { libc::mmap(ptr::null_mut(), LEN, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
        FOREIGN.store(start as usize, Ordering::Relaxed);
        read_behind_the_end(&path, start as usize)
    }

    fn handle(action: usize, flags: c_int) {
        // SAFETY: zeros are a valid `sigaction`, and the handlers below are fit for signals.
        unsafe {
            let mut new: libc::sigaction = std::mem::zeroed();
            (new.sa_sigaction, new.sa_flags) = (action, flags);
            assert_eq!(libc::sigaction(libc::SIGBUS, &raw const new, ptr::null_mut()), 0);
        }
    }

    /// Makes the pages of the foreign mapping readable, as this module does with those of its own.
    fn mend_foreign(address: usize) {
        let start = FOREIGN.load(Ordering::Relaxed);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: the range is that mapping, or the process ends.
        unsafe {
            if start == 0 || !(start..start + LEN).contains(&address) {
                libc::_exit(42);
            }
            libc::mmap(start as *mut c_void, LEN, libc::PROT_READ, flags, -1, 0);
        }
    }

    extern "C" fn with_address(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
        // SAFETY: the signal of an access has an address.
        mend_foreign(unsafe { (*info).si_addr() } as usize);
    }

    extern "C" fn without_address(_: c_int) {
        mend_foreign(FOREIGN.load(Ordering::Relaxed));
        // Once for each mapping: it would be asked again and again for pages of others.
        FOREIGN.store(0, Ordering::Relaxed);
    }

    /// As Python's faulthandler: puts the handler back that was there before it, and raises the signal again.
    extern "C" fn raises_again(signal: c_int) {
        // SAFETY: both calls are fit for handlers.
        unsafe {
            libc::sigaction(signal, OURS.load(Ordering::Relaxed), ptr::null_mut());
            libc::raise(signal);
        }
    }

    static OURS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

    fn run(case: &str) {
        let with_address = with_address as WithInfo as usize;
        match case {
            "a handler before this one" => handle(with_address, libc::SA_SIGINFO),
            "one without an address" => handle(without_address as Plain as usize, 0),
            "ignored before" => handle(libc::SIG_IGN, 0),
            // Rust's own handles it in programs of its own.
            _ => handle(libc::SIG_DFL, 0),
        }
        install().unwrap();
        match case {
            "a handler after this one" => {
                // SAFETY: zeros are a valid `sigaction`.
                let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
                // SAFETY: the pointer is to a structure of this frame.
                unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut ours) };
                OURS.store(Box::leak(Box::new(ours)), Ordering::Relaxed);
                handle(raises_again as Plain as usize, libc::SA_NODEFER);
                assert_eq!([guarded("a"), guarded("b")], [0, 0]);
            }
            "sent to the process" | "ignored before" => {
                // SAFETY: a signal to this process.
                unsafe { libc::kill(libc::getpid(), libc::SIGBUS) };
                assert_eq!(case, "ignored before");
            }
            "a page of nobody" => assert_eq!(foreign("a"), 0),
            _ => {
                for round in ["a", "b", "c"] {
                    assert_eq!((guarded(round), foreign(round)), (0, 0));
                }
            }
        }
    }

    #[test]
    fn other_handlers_are_called_and_stay() {
        if let Ok(case) = std::env::var(CASE) {
            return run(&case);
        }
        let folder = std::env::temp_dir().join(format!("tensorferry-guard-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        for (case, signal) in [
            ("a handler before this one", None),
            ("one without an address", None),
            ("a handler after this one", None),
            ("a page of nobody", Some(libc::SIGBUS)),
            ("ignored before", None),
            ("sent to the process", Some(libc::SIGBUS)),
        ] {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let name = "memory::guard::tests::other_handlers_are_called_and_stay";
            let ended = child.args([name, "--exact"]).env(CASE, case).env(FOLDER, &folder).output().unwrap();
            let code = if signal.is_none() { Some(0) } else { None };
            assert_eq!((ended.status.signal(), ended.status.code()), (signal, code), "{case}: {ended:?}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
