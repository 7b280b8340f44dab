//! The checksums of entries come out the same from memory, from a file and from a source; damage is found; a receive
//! goes on where another one ended; what a receive has filled is sealed.

use std::fs;
use std::os::unix::fs::FileExt;

use crate::common::{BLOCK, Rig, STEP, State, lanes};
use tensorferry_core::{Container, Destination, ErrorKind, FileOptions, Remote, seal_file, write_file};
use tensorferry_wire::container::DIGESTS_ENTRY;
use tensorferry_wire::digest::checksum;

/// Lengths on both sides of the boundaries of blocks of every size, at many places in them.
fn state() -> State {
    let mut sizes = vec![0, 1, 511, 512, 513, 1024, 4095, 4097, 65_536, 65_537, 3, BLOCK + 1, 5 * BLOCK + 77, 7];
    sizes.extend((0..60).map(|i| 300 + 17 * i));
    State::of(&sizes, 3)
}

#[test]
fn digests_of_entries_are_those_of_their_bytes() {
    let state = state();
    let rig = Rig::serving(&state);
    let remote = Remote::open(&[&rig.url()], STEP, lanes(2)).unwrap();
    let expected: Vec<u64> = remote.header().entries().iter().map(|e| checksum(state.bytes(&e.name))).collect();
    assert_eq!(remote.entry_digests().unwrap().unwrap(), expected);

    let folder = std::env::temp_dir().join(format!("tensorferry-entries-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (path, partial) = (folder.join("a"), folder.join("a.partial"));
    let options = FileOptions::default();
    write_file(&path, &partial, Vec::new(), state.items(), &options).unwrap();
    let container = Container::open(&path).unwrap();
    let found = container.entry_digests(&options).unwrap();
    for (entry, digest) in container.header().entries().iter().zip(&found).filter(|(e, _)| e.name != DIGESTS_ENTRY) {
        assert_eq!(*digest, checksum(state.bytes(&entry.name)), "{}", entry.name);
    }
    assert_eq!(container.damaged(&options).unwrap(), []);

    // Damage in one entry, and in two blocks that follow one another.
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let header = fs::metadata(&path).unwrap().len() - container.header().payload_len();
    for at in [512 * 40 + 5, 512 * 41, 512 * 100] {
        let mut byte = [0];
        file.read_exact_at(&mut byte, header + at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], header + at).unwrap();
    }
    assert_eq!(container.damaged(&options).unwrap(), [(512 * 40, 512 * 42), (512 * 100, 512 * 101)]);

    // The checksums of what is there now are those of a sealed file.
    let sealed = seal_file(&path, &options).unwrap();
    assert_eq!(sealed, container.checksum());
    let container = Container::open(&path).unwrap();
    assert_eq!(container.damaged(&options).unwrap(), []);
    // The last bytes of a file are the checksum of its table.
    let end = fs::metadata(&path).unwrap().len();
    let mut last = [0];
    file.read_exact_at(&mut last, end - 1).unwrap();
    file.write_all_at(&[last[0] ^ 1], end - 1).unwrap();
    let payload = container.header().payload_len();
    assert_eq!(container.damaged(&options).unwrap(), [(payload - 8, payload)]);
    file.set_len(fs::metadata(&path).unwrap().len() - 1).unwrap();
    assert_eq!(seal_file(&path, &options).unwrap_err().kind(), ErrorKind::Invalid);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_receive_goes_on_where_another_one_ended() {
    let state = State::of(&[9 * BLOCK + 5, 12 * BLOCK], 9);
    let rig = Rig::serving(&state);
    let names: Vec<_> = state.0.iter().map(|(name, _)| name.clone()).collect();
    // One block of each entry is missing, and a bit of another one is wrong.
    let mut memory: Vec<Vec<u8>> = state.0.iter().map(|(_, bytes)| bytes.to_vec()).collect();
    memory[0][5 * BLOCK..6 * BLOCK].fill(0);
    memory[1][10 * BLOCK + 3] ^= 4;
    for resume in [true, false] {
        let remote = Remote::open(&[&rig.url()], STEP, lanes(3)).unwrap();
        let mut held = memory.clone();
        let address = |name: &str, held: &mut Vec<Vec<u8>>| {
            names.iter().position(|n| n == name).map(|i| held[i].as_mut_ptr() as usize)
        };
        let entries = remote.header().entries().to_vec();
        let addresses = entries.iter().map(|e| address(&e.name, &mut held)).collect();
        // SAFETY: `held` lives until the receive is over, and nobody else uses it.
        let destination = unsafe { Destination::given(addresses) };
        let arrived = if resume { remote.resume(destination) } else { remote.fetch(destination) }.unwrap();
        for (bytes, (_, expected)) in held.iter().zip(&state.0) {
            assert!(bytes == expected, "{resume}");
        }
        let fetched = arrived.report().bytes;
        // The first block comes along with the header; the missing bytes lie in two blocks or one.
        assert!(if resume { (2..=5).contains(&(fetched >> 20)) } else { fetched > 21 << 20 }, "{fetched}");
    }
}
