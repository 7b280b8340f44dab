//! Scheduling: a trainer's own threads go first when cores are scarce.
//!
//! The server's threads and the lanes of a receive on the source's own machine run at a lower priority. They still get
//! half of an ordinary thread's share, so that a busy trainer slows a transfer and never starves it.

/// Half of the weight of an ordinary thread. With it the source's main loop keeps as much of its rate as beside one raw
/// stream of other processes, and a third of the weight made heals slower and the loop no faster.
const NICE: i32 = 3;
/// How long a thread runs at a stretch while others wait, in nanoseconds: a tenth of what they otherwise would wait.
const SLICE: u64 = 300_000;

/// Lowers the priority of the calling thread: it gets a smaller share of a core that others want, in shorter slices.
///
/// The runtime's threads of a source call this, and lanes that receive from a source on their own machine. If the
/// system refuses, the thread stays as it was; kernels before 6.12 take the weight and ignore the slice.
pub fn lower_priority() {
    let attributes = libc::sched_attr {
        size: u32::try_from(size_of::<libc::sched_attr>()).unwrap_or(0),
        sched_policy: libc::SCHED_OTHER.cast_unsigned(),
        sched_flags: 0,
        sched_nice: NICE,
        sched_priority: 0,
        sched_runtime: SLICE,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: 0 is the calling thread, and the structure is complete and says how long it is.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}
