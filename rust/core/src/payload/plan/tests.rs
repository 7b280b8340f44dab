use super::*;

#[test]
fn bytes_go_to_the_pieces_they_belong_to_and_nowhere_else() {
    let mut memory = [0_u8; 12];
    let address = memory.as_mut_ptr() as usize;
    // SAFETY: the memory is this test's, and the plan is the only one to write to it.
    let extent = |start, len, at| unsafe { Extent::new(start, len, address + at) };
    let plan = Plan::new(vec![extent(10, 4, 8), extent(20, 3, 0), extent(30, 2, 4)], 100).unwrap();
    let bytes: Vec<u8> = (12..21).collect();
    let mut parts = Vec::new();
    plan.scatter(12, &bytes, |from, to| {
        parts.push(from.to_vec());
        to.copy_from_slice(from);
    });
    assert_eq!(parts, [vec![12, 13], vec![20]]);
    assert_eq!(memory, [20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 13]);
}

#[test]
fn a_payload_is_readable_where_it_is_received_or_came_before() {
    let mut memory = [1_u8, 2, 3, 4];
    let address = memory.as_mut_ptr() as usize;
    // SAFETY: the memory is this test's, and nobody writes to it.
    let extent = |start, len, at| unsafe { Extent::new(start, len, address + at) };
    let plan = |len| Plan::new(vec![extent(3, 2, 2), extent(7, 2, 0)], len).unwrap();
    let (prefix, short) = (Bytes::from_static(b"abcdefg"), Bytes::from_static(b"abcdef"));
    // SAFETY: only lengths are looked at.
    let parts = |plan: &Plan, prefix: &Bytes| unsafe { plan.readable(prefix) };
    let lengths: Vec<_> = parts(&plan(9), &prefix).unwrap().iter().map(Memory::len).collect();
    assert_eq!(lengths.iter().filter(|&&len| len > 0).copied().collect::<Vec<_>>(), [3, 2, 2, 2]);
    // What does not come is zeros, so that all else is in its place.
    for (len, prefix) in [(9, &short), (10, &prefix), (1 << 28, &Bytes::new())] {
        let parts = parts(&plan(len), prefix).unwrap();
        assert_eq!(parts.iter().map(Memory::len).sum::<usize>() as u64, len);
    }
}

#[test]
fn what_nobody_wants_of_wanted_blocks_has_a_place_of_its_own() {
    let mut memory = vec![1_u8; 3 << 20];
    let address = memory.as_mut_ptr() as usize;
    // SAFETY: the memory is this test's, and the plan is the only one to write to it.
    let extent = |start, len, at| unsafe { Extent::new(start, len, address + at) };
    let wanted = vec![extent(10, 20, 0), extent(BLOCK_SIZE - 5, 7, 100), extent(5 * BLOCK_SIZE, 3, 200)];
    let mut plan = Plan::new(wanted, 5 * BLOCK_SIZE + 4).unwrap();
    let gaps: Vec<_> = plan.gaps().collect();
    let (second, last) = (BLOCK_SIZE + 2, 5 * BLOCK_SIZE + 3);
    assert_eq!(gaps, [(0, 10), (30, BLOCK_SIZE - 5), (second, 2 * BLOCK_SIZE), (last, last + 1)]);
    let (blocks, len) = (plan.wanted_blocks(0), plan.spare_len());
    let mut spare = vec![0_u8; usize::try_from(len).unwrap()];
    // SAFETY: as above.
    unsafe { plan.fill_gaps(&mut spare) }.unwrap();
    assert_eq!((plan.spare_len(), plan.wanted_blocks(0)), (0, blocks));
    assert_eq!(plan.wanted(), 2 * BLOCK_SIZE + 4);
    let mut sink = [0_u8; 0];
    plan.with_slices(BLOCK_SIZE - 6, second + 1, &mut sink, |slices| {
        assert_eq!(slices.iter().map(|slice| slice.len()).collect::<Vec<_>>(), [1, 7, 1]);
        for slice in slices.iter_mut() {
            slice.fill(9);
        }
    });
    assert_eq!((memory[99], &memory[100..107], memory[107]), (1, &[9; 7][..], 1));
    assert_eq!(spare.iter().map(|&byte| u32::from(byte)).sum::<u32>(), 18);
}

#[test]
fn neighbours_in_payload_and_memory_are_one_piece_and_no_others_are() {
    // SAFETY: nobody writes to these addresses.
    let extent = |start, len, address| unsafe { Extent::new(start, len, address) };
    for (next, joined) in [
        (extent(164, 8, 1064), true),
        (extent(164, 0, 1064), true),
        (extent(165, 8, 1064), false),
        (extent(164, 8, 1065), false),
        (extent(163, 8, 1063), false),
        (extent(165, 8, 1065), false),
    ] {
        let mut first = extent(100, 64, 1000);
        assert_eq!(first.join(&next), joined, "{next:?}");
        assert_eq!(first.len, if joined { 64 + next.len } else { 64 }, "{next:?}");
    }
}
