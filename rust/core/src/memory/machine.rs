//! How much memory this process can have: the one place that knows.
//!
//! A source announces lengths before it sends bytes, and a hostile or damaged one can announce any number. Everything
//! that allocates in proportion to such a number asks here first. So does everything that takes a share of the memory,
//! or wants to know what is left of it.
//!
//! Three things limit it: the machine's memory, the control groups of the process ([`super::groups`]), and the limit of
//! its address space (`RLIMIT_AS`).

use std::fmt;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::groups;
use crate::error::{Error, ErrorKind};

/// Lengths up to this one are not worth a look at files of the system.
const LITTLE: u64 = 64 << 10;
/// For how long an answer about the machine and its groups is used again.
const FRESH: Duration = Duration::from_secs(1);

/// The most bytes that this process can have, and what sets that limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit {
    nbytes: u64,
    by: By,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Machine,
    Group,
    AddressSpace,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nbytes = self.nbytes;
        match self.by {
            By::Machine => write!(f, "all memory of this machine is {nbytes}"),
            By::Group => write!(f, "the control group of this process may have {nbytes}"),
            By::AddressSpace => write!(f, "the address space of this process may have {nbytes} (ulimit -v)"),
        }
    }
}

/// Refuses `len` bytes for `what` where this process cannot have as many: where the machine has fewer, swap included, or
/// a control group or the limit of the address space allows fewer.
///
/// A source can announce any length, and even the bookkeeping for each MiB of it would cost memory. If the system does
/// not say how much memory there is, nothing is refused.
///
/// ```
/// use tensorferry_core::check_machine_has;
///
/// assert!(check_machine_has(4096, "a page").is_ok());
/// assert!(check_machine_has(u64::MAX, "the received state").is_err());
/// ```
///
/// # Errors
/// [`ErrorKind::System`], naming `what`.
pub fn check_machine_has(len: u64, what: &str) -> Result<(), Error> {
    if len <= LITTLE {
        return Ok(());
    }
    match least(current_limit().into_iter().chain(address_space())) {
        Some(limit) if len > limit.nbytes => {
            let message = format!("{what} has {len} bytes, and {limit}");
            Err(Error::new(ErrorKind::System, message))
        }
        _ => Ok(()),
    }
}

/// Bytes that this process can have at most, without swap; `None` if the system does not say.
///
/// ```
/// use tensorferry_core::{available_memory, memory_limit};
///
/// assert!(memory_limit().unwrap() >= available_memory().unwrap());
/// ```
#[must_use]
pub fn memory_limit() -> Option<u64> {
    least(limit_of(Path::new("/"), false).into_iter().chain(address_space())).map(|limit| limit.nbytes)
}

/// Bytes that this process can have now before others are swapped out, or it or others are killed; `None` if the system
/// does not say.
///
/// Shared memory counts towards the control group of whoever touches it first, like any other memory.
#[must_use]
pub fn available_memory() -> Option<u64> {
    let left = address_space().map(|limit| limit.nbytes.saturating_sub(mapped(Path::new("/")).unwrap_or(0)));
    available(Path::new("/")).into_iter().chain(left).min()
}

/// What the machine and its control groups allow, swap included, as it was at most a second ago.
fn current_limit() -> Option<Limit> {
    static LAST: Mutex<Option<(Instant, Option<Limit>)>> = Mutex::new(None);
    // Never waited for: a child may have been forked while another thread had it.
    let mut last = LAST.try_lock().ok();
    if let Some(Some((asked, limit))) = last.as_deref()
        && asked.elapsed() < FRESH
    {
        return *limit;
    }
    let limit = limit_of(Path::new("/"), true);
    if let Some(last) = &mut last {
        **last = Some((Instant::now(), limit));
    }
    limit
}

/// What the machine and the control groups below `root` allow.
fn limit_of(root: &Path, with_swap: bool) -> Option<Limit> {
    let meminfo = meminfo(root);
    let swap = if with_swap { field(&meminfo, "SwapTotal:").unwrap_or(0) } else { 0 };
    let machine = field(&meminfo, "MemTotal:").map(|all| Limit { nbytes: all.saturating_add(swap), by: By::Machine });
    let levels = groups::levels(root).into_iter().map(|level| {
        let both = level.with_swap.filter(|_| with_swap).unwrap_or(u64::MAX);
        Limit { nbytes: level.most.saturating_add(swap).min(both), by: By::Group }
    });
    least(machine.into_iter().chain(levels))
}

/// What is left of the machine's memory, and of that of the control groups below `root`.
fn available(root: &Path) -> Option<u64> {
    let machine = field(&meminfo(root), "MemAvailable:");
    let left = groups::levels(root).into_iter().filter_map(|level| Some(level.most.saturating_sub(level.used?)));
    machine.into_iter().chain(left).min()
}

/// The first of the lowest limits: the machine's, where a group allows all of its memory.
fn least(limits: impl Iterator<Item = Limit>) -> Option<Limit> {
    limits.min_by_key(|limit| limit.nbytes)
}

/// The limit of the address space (`RLIMIT_AS`); `None` if there is none.
fn address_space() -> Option<Limit> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
    limit.map(|nbytes| Limit { nbytes, by: By::AddressSpace })
}

/// Bytes of this process's address space that are in use.
fn mapped(root: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(root.join("proc/self/statm")).ok()?;
    text.split(' ').next()?.parse::<u64>().ok()?.checked_mul(rustix::param::page_size() as u64)
}

fn meminfo(root: &Path) -> String {
    std::fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default()
}

/// A field of `/proc/meminfo`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let kib = text.lines().find_map(|l| l.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok())?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const HERE: &str = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nSwapTotal:       1048576 kB\n";
    const V2: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
    const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";

    /// A folder that looks like the root of a system with these files, removed when it is dropped.
    struct Root(std::path::PathBuf);

    impl Root {
        fn with(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("tensorferry-groups-{}-{name}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            for (path, text) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            Self(root)
        }

        /// The limit with swap and without, and what is available.
        fn found(&self) -> (Option<u64>, Option<u64>, Option<u64>) {
            let nbytes = |with_swap| limit_of(&self.0, with_swap).map(|limit| limit.nbytes);
            (nbytes(true), nbytes(false), available(&self.0))
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_machine_is_the_limit_where_no_group_is() {
        let root = Root::with("machine", &[("proc/meminfo", HERE)]);
        assert_eq!(root.found(), (Some(17 * GIB), Some(16 * GIB), Some(8 * GIB)));
        assert_eq!(Root::with("silent", &[]).found(), (None, None, None));
    }

    #[test]
    fn every_level_of_version_2_counts() {
        let group = "sys/fs/cgroup/job/rank";
        let at = |file: &str| format!("{group}/{file}");
        let (own, used, stat) = (at("memory.max"), at("memory.current"), at("memory.stat"));
        let common = [
            ("proc/meminfo", HERE),
            ("proc/self/cgroup", "0::/job/rank\n"),
            ("proc/self/mountinfo", V2),
            (used.as_str(), "1000000000\n"),
        ];
        let with = |name: &str, more: &[(&str, &str)]| Root::with(name, &[&common[..], more].concat()).found();
        assert_eq!(with("v2-max", &[(&own, "max\n")]), (Some(17 * GIB), Some(16 * GIB), Some(8 * GIB)));
        let found = with("v2-own", &[(&own, "2000000000\n")]);
        assert_eq!(found, (Some(2_000_000_000 + GIB), Some(2_000_000_000), Some(1_000_000_000)));
        let found = with("v2-cache", &[(&own, "2000000000\n"), (&stat, "file 500\ninactive_file 400\n")]);
        assert_eq!(found.2, Some(1_000_000_400));
        let swap = at("memory.swap.max");
        let found = with("v2-no-swap", &[(&own, "2000000000\n"), (&swap, "0\n")]);
        assert_eq!((found.0, found.1), (Some(2_000_000_000), Some(2_000_000_000)));
        // An ancestor, and the group that is mounted itself, as in a container.
        for above in ["sys/fs/cgroup/job/memory.max", "sys/fs/cgroup/memory.max"] {
            let found = with("v2-above", &[(&own, "max\n"), (above, "3000000000\n")]);
            assert_eq!((found.1, found.2), (Some(3_000_000_000), Some(8 * GIB)), "{above}");
        }
        // More than the machine has.
        assert_eq!(with("v2-huge", &[(&own, "99999999999999\n")]).0, Some(17 * GIB));
        assert_eq!(with("v2-nonsense", &[(&own, "-1\n")]).0, Some(17 * GIB));
    }

    #[test]
    fn version_1_has_other_names_and_says_what_lies_above() {
        let own = "sys/fs/cgroup/memory/job/memory.limit_in_bytes";
        let stat = "sys/fs/cgroup/memory/job/memory.stat";
        let none = "9223372036854771712\n";
        let common = [
            ("proc/meminfo", HERE),
            ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n"),
            ("proc/self/mountinfo", V1),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", none),
            ("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "900000000\n"),
        ];
        let with = |name: &str, more: &[(&str, &str)]| Root::with(name, &[&common[..], more].concat()).found();
        assert_eq!(with("v1-none", &[(own, none)]).0, Some(17 * GIB));
        let found = with("v1-own", &[(own, "1000000000\n"), (stat, "total_inactive_file 7\n")]);
        assert_eq!(found, (Some(1_000_000_000 + GIB), Some(1_000_000_000), Some(100_000_007)));
        let swap = "sys/fs/cgroup/memory/job/memory.memsw.limit_in_bytes";
        assert_eq!(with("v1-swap", &[(own, "1000000000\n"), (swap, "1000000005\n")]).0, Some(1_000_000_005));
        // Of groups above the mounted one.
        let found = with("v1-above", &[(own, none), (stat, "cache 1\nhierarchical_memory_limit 70000000\n")]);
        assert_eq!((found.1, found.2), (Some(70_000_000), Some(8 * GIB)));
    }

    #[test]
    fn a_path_of_another_namespace_still_finds_the_groups_that_are_mounted() {
        let top = ("sys/fs/cgroup/memory.max", "3000000000\n");
        let v1 = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000000\n");
        for (name, own, mounts, group, expected) in [
            // The own path as the host sees it.
            ("gone", "0::/kubepods/pod1/x\n", V2, top, 3_000_000_000),
            // Outside of the namespace's root.
            ("outside", "0::/../../other\n", V2, top, 3_000_000_000),
            // The container's own group is mounted, and says so: the path is below it, or it itself.
            (
                "docker",
                "4:memory:/docker/abc\n",
                "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
                v1,
                2_000_000_000,
            ),
            (
                "docker-below",
                "4:memory:/docker/abc/job\n",
                "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
                ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "5000\n"),
                5000,
            ),
            // Mounted elsewhere, and beside groups of version 1.
            (
                "hybrid",
                "4:memory:/\n0::/job\n",
                "42 31 0:38 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n",
                ("sys/fs/cgroup/unified/job/memory.max", "6000\n"),
                6000,
            ),
            // No mount is listed.
            ("unlisted", "0::/a/b\n", "", ("sys/fs/cgroup/a/memory.max", "7000\n"), 3_000_000_000),
            ("unlisted-below", "0::/a\n", "", ("sys/fs/cgroup/a/memory.max", "7000\n"), 7000),
        ] {
            let files =
                [("proc/meminfo", HERE), ("proc/self/cgroup", own), ("proc/self/mountinfo", mounts), top, group];
            assert_eq!(Root::with(name, &files).found().1, Some(expected), "{name}");
        }
    }

    #[test]
    fn files_that_cannot_be_read_limit_nothing() {
        let common =
            [("proc/meminfo", HERE), ("proc/self/cgroup", "0::/job\nno groups\n\n"), ("proc/self/mountinfo", V2)];
        let root = Root::with("unreadable", &[&common[..], &[("sys/fs/cgroup/job/memory.max/a-folder", "")]].concat());
        assert_eq!(root.found(), (Some(17 * GIB), Some(16 * GIB), Some(8 * GIB)));
    }
}
