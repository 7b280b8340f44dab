//! Containers in files: they are valid safetensors, slices of them can be read, and every damage is noticed.

use std::fs;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::{BLOCK, State};
use crate::slices::{Part, expected, repeat, slices};
use safetensors::SafeTensors;
use tensorferry_core::{
    Cancel, Container, DIRECT_FROM, Error, ErrorKind, FileOptions, FileReport, FileWriting, Item, Memory, write_file,
};
use tensorferry_wire::container::DIGESTS_ENTRY;
use tensorferry_wire::dtype::Dtype;

/// A folder that is removed when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("tensorferry-file-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn write(state: &State, path: &Path) {
    put(path, state.items(), &FileOptions::default()).unwrap();
}

fn put(path: &Path, items: Vec<Item>, options: &FileOptions) -> Result<FileReport, Error> {
    let metadata = vec![("format".into(), "pt".into())];
    write_file(path, &path.with_extension("partial"), metadata, items, options).map(|written| written.report)
}

fn threads(threads: usize) -> FileOptions {
    FileOptions { threads: Some(threads), ..FileOptions::default() }
}

/// Reads parts of entries, and asserts that their bytes are right.
fn read_parts(path: &Path, state: &State, parts: &[Part<'_>], count: usize) -> Result<FileReport, Error> {
    let (wanted, mut buffers): (Vec<_>, Vec<_>) = parts.iter().map(|part| expected(state, part)).unzip();
    let report = Container::open(path)?.read(&slices(state, parts, &mut buffers), &threads(count))?;
    assert!(wanted == buffers, "{parts:?} of {} has wrong bytes", path.display());
    Ok(report)
}

fn state() -> State {
    State::of(&[0, 1, 4095, 4096, 4097, 100_000, 9 * BLOCK + 77, 5 * BLOCK, 0, 33], 3)
}

#[test]
fn what_is_written_is_a_safetensors_file_and_is_read_back() {
    let (folder, state) = (Folder::new(), state());
    let path = folder.0.join("rank.safetensors");
    for count in [1, 2, 5] {
        put(&path, state.items(), &threads(count)).unwrap();
        let file = fs::read(&path).unwrap();
        let read_back = SafeTensors::deserialize(&file).unwrap();
        for (name, bytes) in &state.0 {
            assert!(read_back.tensor(name).unwrap().data() == &bytes[..], "{name}");
        }
        let all: Vec<Part<'_>> =
            state.0.iter().map(|(name, bytes)| (&name[..], 0, bytes.len() as u64, vec![])).collect();
        assert!(read_parts(&path, &state, &all, count).unwrap().bytes <= file.len() as u64);
    }
    assert_eq!(folder.names(), ["rank.safetensors"]);
}

#[test]
fn a_large_file_goes_past_the_page_cache_and_is_the_same() {
    let folder = Folder::new();
    let (path, cached) = (folder.0.join("direct"), folder.0.join("cached"));
    // It does not end on a whole page, and none of its memory is aligned to pages.
    let state = State::of(&[40 * BLOCK + 12_345, 7, 40 * BLOCK + 4096], 3);
    for count in [1, 3] {
        let options = FileOptions { cached: Some(false), ..threads(count) };
        let direct = put(&path, state.items(), &options).unwrap();
        let options = FileOptions { cached: Some(true), ..threads(count) };
        let through = put(&cached, state.items(), &options).unwrap();
        assert_eq!(through.direct, 0);
        // The first one is not in the page cache, the second one is.
        for path in [&path, &cached] {
            let container = Container::open(path).unwrap();
            for (name, bytes) in &state.0 {
                assert!(container.entry(name, &threads(count)).unwrap().unwrap() == *bytes, "{name}");
            }
        }
        assert_eq!(direct.bytes, through.bytes);
        let unasked = put(&folder.0.join("unasked"), state.items(), &threads(count)).unwrap();
        assert_eq!(unasked.bytes, through.bytes);
        assert!(fs::read(folder.0.join("unasked")).unwrap() == fs::read(&cached).unwrap());
        assert!(fs::read(&path).unwrap() == fs::read(&cached).unwrap());
        let pages = direct.wanted / 4096 * 4096;
        assert_eq!(direct.direct, if can_write_directly(&folder.0) { pages } else { 0 });
        assert!(direct.wanted > DIRECT_FROM);
    }
    let small = put(&path, State::of(&[BLOCK], 3).items(), &threads(1)).unwrap();
    assert_eq!(small.direct, 0);
}

/// Whether the file system here supports writing a page past the cache.
fn can_write_directly(folder: &Path) -> bool {
    let path = folder.join("probe");
    let memory = vec![0_u8; 8192];
    let page = &memory[memory.as_ptr().align_offset(4096)..][..4096];
    let open = fs::OpenOptions::new().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(&path);
    let able = open.and_then(|file| file.write_all_at(page, 0)).is_ok();
    let _ = fs::remove_file(path);
    able
}

#[test]
fn rows_of_pages_begin_where_blocks_do() {
    let folder = Folder::new();
    let path = folder.0.join("f");
    let state = State::of(&[5000, 512 * 8192, 77], 3);
    write(&state, &path);
    let report = read_parts(&path, &state, &[("w1", 512, 1536, vec![repeat(512, 8192, 1536)])], 1).unwrap();
    assert!(report.bytes * 100 <= report.wanted * 103, "{report:?}");
}

#[test]
fn an_empty_container_is_one() {
    let folder = Folder::new();
    let path = folder.0.join("empty");
    write(&State(Vec::new()), &path);
    let container = Container::open(&path).unwrap();
    let names: Vec<_> = container.header().entries().iter().map(|e| e.name.as_str()).collect();
    assert_eq!(names, [DIGESTS_ENTRY]);
    assert_eq!(container.read(&[], &FileOptions::default()).unwrap().wanted, 0);
}

#[test]
fn a_slice_costs_hardly_more_than_itself() {
    let (folder, state) = (Folder::new(), state());
    let path = folder.0.join("f");
    write(&state, &path);
    for (start, len) in [(1, 300_000), (BLOCK / 3, 3 * BLOCK), (0, 9 * BLOCK + 77), (9 * BLOCK, 77)] {
        let report = read_parts(&path, &state, &[("w6", start as u64, len as u64, vec![])], 2).unwrap();
        // The header takes a page, however little is read.
        assert!(len < 300_000 || report.bytes - 4096 <= (len + len / 20) as u64, "{report:?} for {len}");
    }
    // With strides and long gaps: the gaps are not read.
    let far = ("w6", 0, 8192, vec![repeat(16, BLOCK as u64 / 2, 8192)]);
    let report = read_parts(&path, &state, &[far], 1).unwrap();
    assert!(report.bytes <= 16 * (8192 + 512) + 16 * 17 * 8 + 4096 + 64, "{report:?}");
}

#[test]
fn every_flipped_byte_is_an_error_or_of_no_consequence() {
    let folder = Folder::new();
    let state = State::of(&[5000, 9000], 1);
    let path = folder.0.join("f");
    write(&state, &path);
    let good = fs::read(&path).unwrap();
    let container = Container::open(&path).unwrap();
    let start = good.len() as u64 - container.header().payload_len();
    let data = start..start + 14_000;
    let damaged = folder.0.join("damaged");
    let mut unnoticed = 0;
    for at in (0..good.len()).step_by(37).chain([0, 7, 8, good.len() - 1]) {
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        fs::write(&damaged, &bytes).unwrap();
        let parts = [("w0", 0, 5000, vec![]), ("w1", 0, 9000, vec![])];
        let errors: Vec<_> =
            parts.into_iter().filter_map(|part| read_parts(&damaged, &state, &[part], 1).err()).collect();
        for e in &errors {
            assert!(matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Protocol), "{e}");
            assert!(e.to_string().contains("damaged"), "the file is named: {e}");
        }
        if data.contains(&(at as u64)) {
            let error = errors.first().expect("damage in a tensor is noticed");
            let block = (at as u64 - start) / 512;
            let name = if at as u64 - start < 5000 { "w0" } else { "w1" };
            let text = error.to_string();
            assert!(text.contains(&format!("block {block} ")) && text.contains(name), "byte {at}: {text}");
        } else if errors.is_empty() {
            unnoticed += 1;
        }
    }
    // Only the table's own checksum is damaged. A reader that compares every block with its checksum does not need it.
    assert!(unnoticed <= 2, "{unnoticed}");
}

#[test]
fn names_that_changed_places_are_noticed() {
    let folder = Folder::new();
    let path = folder.0.join("f");
    let state = State::of(&[5000, 5000], 1);
    write(&state, &path);
    let mut bytes = fs::read(&path).unwrap();
    let at = |bytes: &[u8], name: &[u8]| bytes.windows(4).position(|w| w == name).unwrap();
    let (one, other) = (at(&bytes, b"\"w0\""), at(&bytes, b"\"w1\""));
    bytes[one..one + 4].copy_from_slice(b"\"w1\"");
    bytes[other..other + 4].copy_from_slice(b"\"w0\"");
    SafeTensors::deserialize(&bytes).expect("it is still a valid file");
    fs::write(&path, &bytes).unwrap();
    let refused = Container::open(&path).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
}

#[test]
fn files_that_are_cut_short_or_something_else_are_refused_by_name() {
    let folder = Folder::new();
    let state = State::of(&[5000, 9000], 1);
    let path = folder.0.join("good");
    write(&state, &path);
    let good = fs::read(&path).unwrap();
    let other = folder.0.join("other-file");
    let refused = |bytes: &[u8]| {
        fs::write(&other, bytes).unwrap();
        let error = Container::open(&other).unwrap_err();
        assert!(error.to_string().contains("other-file"), "{error}");
        error.kind()
    };
    for len in [0, 1, 7, 8, 100, 4096, 5000, good.len() - 1] {
        assert_eq!(refused(&good[..len]), ErrorKind::Corrupt, "{len}");
    }
    assert_eq!(refused(&[&good[..], b"x"].concat()), ErrorKind::Corrupt);
    assert_eq!(refused(b"something else entirely"), ErrorKind::Protocol);
    let plain = safetensors::tensor::serialize(
        [("a", safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![3], &[1, 2, 3]).unwrap())],
        None,
    );
    assert_eq!(refused(&plain.unwrap()), ErrorKind::Protocol);
    let gone = Container::open(&folder.0.join("gone")).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::System);
    assert!(gone.to_string().contains("gone"), "{gone}");
}

#[test]
fn the_file_before_stays_until_the_new_one_is_complete() {
    let folder = Folder::new();
    let path = folder.0.join("f");
    let (old, new) = (State::of(&[5000], 1), State::of(&[6 * BLOCK], 2));
    write(&old, &path);
    let cancel = Cancel::new();
    cancel.cancel();
    let options = FileOptions { cancel, ..FileOptions::default() };
    let refused = put(&path, new.items(), &options).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Cancelled);
    let twice = [new.items(), new.items()].concat();
    assert_eq!(put(&path, twice, &FileOptions::default()).unwrap_err().kind(), ErrorKind::Invalid);
    read_parts(&path, &old, &[("w0", 0, 5000, vec![])], 1).unwrap();
    assert_eq!(folder.names(), ["f"], "nothing is left of what failed");
    write(&new, &path);
    read_parts(&path, &new, &[("w0", 0, 6 * BLOCK as u64, vec![])], 1).unwrap();
    assert_eq!(folder.names(), ["f"]);
    let nowhere = put(&folder.0.join("no/f"), old.items(), &FileOptions::default()).unwrap_err();
    assert_eq!(nowhere.kind(), ErrorKind::System);
    assert!(nowhere.to_string().contains("no/f"), "{nowhere}");
}

#[test]
fn a_file_that_somebody_else_writes_is_left_alone() {
    let (folder, state) = (Folder::new(), State::of(&[5000], 1));
    let (path, partial) = (folder.0.join("f"), folder.0.join("f.partial"));
    fs::write(&partial, b"of somebody else").unwrap();
    let refused = put(&path, state.items(), &FileOptions::default()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::System);
    assert!(refused.to_string().contains("f.partial"), "{refused}");
    assert_eq!(fs::read(&partial).unwrap(), b"of somebody else");
    assert_eq!(folder.names(), ["f.partial"]);
}

#[test]
fn a_file_is_locked_until_its_writer_is_done_with_it() {
    let (folder, state) = (Folder::new(), State::of(&[5000], 1));
    let path = folder.0.join("f");
    let written = write_file(&path, &folder.0.join("p"), Vec::new(), state.items(), &FileOptions::default()).unwrap();
    let other = fs::File::open(&path).unwrap();
    assert!(other.try_lock().is_err());
    drop(written);
    other.try_lock().unwrap();
}

#[test]
fn a_file_written_part_by_part_through_one_buffer_is_the_same() {
    let (folder, state) = (Folder::new(), state());
    let (expected, path, partial) = (folder.0.join("a"), folder.0.join("b"), folder.0.join("p"));
    let options = FileOptions::default();
    write_file(&expected, &partial, Vec::new(), state.items(), &options).unwrap();
    // SAFETY: each part is placed before it is written.
    let nowhere = |len: usize| unsafe { Memory::borrowed(0, len) };
    for step in [512, 5000, 1 << 20] {
        let late: Vec<_> = state
            .0
            .iter()
            .map(|(name, bytes)| Item::new(name.clone(), Dtype::U8, &[bytes.len() as u64], nowhere(bytes.len())))
            .collect();
        let mut writing = FileWriting::begin(&path, &partial, Vec::new(), late, &options).unwrap();
        let mut buffer = vec![0_u8; 2 * step];
        let (starts, end) = (writing.starts(), usize::try_from(writing.end()).unwrap());
        let mut at = 0;
        while at < end {
            // What is less than a block is written with the next part.
            let (from, stop, mut used) = (at / 512 * 512, at + step, 0);
            for ((_, bytes), &start) in state.0.iter().zip(&starts) {
                let start = usize::try_from(start).unwrap();
                let (low, high) = (from.max(start), stop.min(start + bytes.len()));
                if low < high {
                    buffer[used..used + high - low].copy_from_slice(&bytes[low - start..high - start]);
                    writing.place(low as u64, buffer[used..].as_ptr() as usize);
                    used += high - low;
                }
            }
            writing.write(stop as u64, &options).unwrap();
            at = stop;
        }
        assert!(!path.exists());
        let written = writing.finish().unwrap();
        assert_eq!(written.report.bytes, fs::metadata(&path).unwrap().len());
        assert!(fs::read(&path).unwrap() == fs::read(&expected).unwrap(), "{step}");
        fs::remove_file(&path).unwrap();
    }
    drop(FileWriting::begin(&path, &partial, Vec::new(), state.items(), &options).unwrap());
    assert_eq!(folder.names(), ["a"]);
}

#[test]
fn another_file_of_the_same_layout_is_told_from_the_one_that_was_written() {
    let (folder, state) = (Folder::new(), State::of(&[5000], 1));
    let one = |name: &str| {
        let metadata = vec![("tensorferry.file".into(), name.into())];
        let path = folder.0.join(name);
        write_file(&path, &folder.0.join("p"), metadata, state.items(), &FileOptions::default()).unwrap().header
    };
    let (a, b) = (one("a"), one("b"));
    let container = Container::open(&folder.0.join("a")).unwrap();
    container.check_header_checksum(a).unwrap();
    let refused = container.check_header_checksum(b).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Corrupt);
    assert!(refused.to_string().contains("not the file that was written"), "{refused}");
    assert_eq!(container.entry("w0", &FileOptions::default()).unwrap().unwrap()[..], state.bytes("w0")[..]);
    assert!(container.entry("w1", &FileOptions::default()).unwrap().is_none());
}

#[test]
fn slices_of_another_container_are_refused() {
    let (folder, state) = (Folder::new(), State::of(&[5000], 1));
    let path = folder.0.join("f");
    write(&state, &path);
    let other = State::of(&[5001], 1);
    let refused = read_parts(&path, &other, &[("w0", 0, 10, vec![])], 1).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Protocol);
    assert!(refused.to_string().contains("w0") && refused.to_string().contains("5001"), "{refused}");
}
