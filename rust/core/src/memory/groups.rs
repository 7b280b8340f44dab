//! What control groups let this process have, version 1 and version 2.
//!
//! A group's memory is limited by its own setting and by those of all groups that it lies in, so every level between
//! the process's group and the mounted root is looked at. In a container the path of `/proc/self/cgroup` may be that of
//! another namespace, and the groups above the container may not be mounted: then the levels that can be seen count,
//! and version 1 says in `memory.stat` what those above them allow.
//!
//! A file that is missing or cannot be read limits nothing.

use std::path::{Component, Path, PathBuf};

/// The files of a version of control groups.
struct Names {
    most: &'static str,
    used: &'static str,
    /// The field of `memory.stat` with the bytes of files that nobody has used for a while.
    cache: &'static str,
    /// Where no mount is listed.
    mounted: &'static str,
}

const V1: Names = Names {
    most: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: "total_inactive_file",
    mounted: "/sys/fs/cgroup/memory",
};
const V2: Names =
    Names { most: "memory.max", used: "memory.current", cache: "inactive_file", mounted: "/sys/fs/cgroup" };

/// A level of the groups that limits memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Level {
    /// The most bytes that its processes can have together, without swap.
    pub(super) most: u64,
    /// The most bytes of memory and swap together, where that is limited, too.
    pub(super) with_swap: Option<u64>,
    /// What its processes have now, without what the kernel takes back before anything else happens; unknown for groups
    /// that are not mounted.
    pub(super) used: Option<u64>,
}

/// The levels that limit the memory of this process; `root` is where the file system begins, `/` but in tests.
pub(super) fn levels(root: &Path) -> Vec<Level> {
    let Some(own) = text(root, "/proc/self/cgroup") else { return Vec::new() };
    let mounts = text(root, "/proc/self/mountinfo").unwrap_or_default();
    let mut found = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let names = if controllers.is_empty() {
            &V2
        } else if controllers.split(',').any(|one| one == "memory") {
            &V1
        } else {
            continue;
        };
        let (top, seen_as) = mount(&mounts, names).unwrap_or((names.mounted.to_owned(), "/".to_owned()));
        for folder in folders(root, &top, &seen_as, path) {
            found.extend(level(&folder, names));
        }
    }
    found
}

/// The folders of the group at `path` and of all groups that it lies in, as far as they are mounted at `top`, whose own
/// path is `seen_as`.
fn folders(root: &Path, top: &str, seen_as: &str, path: &str) -> Vec<PathBuf> {
    let top = within(root, top);
    // Paths from another namespace contain `..`, or do not exist here.
    let is_plain = !Path::new(path).components().any(|part| matches!(part, Component::ParentDir));
    let candidates = [Path::new(path).strip_prefix(seen_as).ok(), Some(Path::new(path.trim_start_matches('/')))];
    let own = candidates.into_iter().flatten().map(|below| top.join(below)).find(|folder| is_plain && folder.is_dir());
    let own = own.unwrap_or_else(|| top.clone());
    own.ancestors().take_while(|folder| folder.starts_with(&top)).map(Path::to_path_buf).collect()
}

/// Where groups are mounted that limit memory, and the path of the group that is the top there.
fn mount(mounts: &str, names: &Names) -> Option<(String, String)> {
    mounts.lines().find_map(|line| {
        // proc(5): id, parent, device, root, mount point, options, fields that may be missing, "-", type, source, options.
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(3);
        let (seen_as, top) = (before.next()?, before.next()?);
        let mut after = after.split(' ');
        let kind = after.next()?;
        let is_it = if names.most == V2.most {
            kind == "cgroup2"
        } else {
            kind == "cgroup" && after.nth(1)?.split(',').any(|option| option == "memory")
        };
        is_it.then(|| (top.to_owned(), seen_as.to_owned()))
    })
}

/// The limits that the group in `folder` sets, in files with these names; none where it sets none.
fn level(folder: &Path, names: &Names) -> Vec<Level> {
    let number = |file: &str| std::fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
    let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let field = |name: &str| stat.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok());
    let mut levels = Vec::new();
    if let Some(most) = number(names.most) {
        let swap = if names.most == V2.most {
            number("memory.swap.max").map(|swap| most.saturating_add(swap))
        } else {
            number("memory.memsw.limit_in_bytes")
        };
        let used = number(names.used).map(|used: u64| used.saturating_sub(field(names.cache).unwrap_or(0)));
        levels.push(Level { most, with_swap: swap, used });
    }
    // Version 2 does not have it.
    if let Some(most) = field("hierarchical_memory_limit") {
        levels.push(Level { most, with_swap: field("hierarchical_memsw_limit"), used: None });
    }
    levels
}

fn text(root: &Path, path: &str) -> Option<String> {
    std::fs::read_to_string(within(root, path)).ok()
}

fn within(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}
