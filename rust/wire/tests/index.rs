//! The index of a checkpoint: what is written is read, what is damaged is refused, and parts make up wholes or do not.

use proptest::prelude::*;
use tensorferry_wire::index::{
    BoxRef, Chunk, Index, IndexError, Item, Kind, MergeError, OverlapError, Replicas, Strides, merge, plan, written,
};

fn tensor<'a>(key: &'a str, shape: &'a [u64]) -> Item<'a> {
    Item {
        key,
        path: "",
        dtype: Some("float32"),
        shape,
        requires_grad: false,
        strides: Strides::Contiguous,
        is_spread: true,
    }
}

fn chunk<'a>(offsets: &'a [u64], sizes: &'a [u64], file: u32, entry: u32) -> Chunk<'a> {
    let part = BoxRef { offsets, sizes };
    Chunk { part, file, entry, bytes: 4 * part.numel(), kind: Kind::Elements, layout: None, owner: None }
}

/// An index of one tensor `w` with these chunks: offsets, sizes, and who has it.
fn index(shape: &[u64], chunks: &[(&[u64], &[u64], u32)]) -> Index {
    let mut index = Index::default();
    index.add(&tensor("w", shape)).unwrap();
    for (n, (offsets, sizes, file)) in chunks.iter().enumerate() {
        index.add_chunk(&Chunk { owner: Some(*file), ..chunk(offsets, sizes, 0, u32::try_from(n).unwrap()) }).unwrap();
    }
    index
}

/// How a dimension is cut: the lengths of its pieces.
fn cuts() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0..5_u64, 1..4)
}

/// The boxes of a grid.
fn grid(cuts: &[Vec<u64>]) -> Vec<(Vec<u64>, Vec<u64>)> {
    let mut boxes = vec![(vec![], vec![])];
    for pieces in cuts {
        let mut wider = Vec::new();
        for (offsets, sizes) in &boxes {
            let mut start = 0;
            for &length in pieces {
                wider.push(([&offsets[..], &[start]].concat(), [&sizes[..], &[length]].concat()));
                start += length;
            }
        }
        boxes = wider;
    }
    boxes
}

fn shape_of(cuts: &[Vec<u64>]) -> Vec<u64> {
    cuts.iter().map(|pieces| pieces.iter().sum()).collect()
}

#[test]
fn what_is_written_is_read() {
    let mut index = Index::default();
    let about =
        Item { path: "[\"a\",0]", requires_grad: true, strides: Strides::Given(&[1, 300]), ..tensor("a.0", &[300, 2]) };
    index.add(&about).unwrap();
    index.add_chunk(&Chunk { layout: Some((64, &[1, 70_000])), ..chunk(&[0, 0], &[150, 2], 0, 7) }).unwrap();
    index.add_chunk(&Chunk { kind: Kind::PickledTensor, ..chunk(&[150, 0], &[150, 2], 1, 1 << 20) }).unwrap();
    index.add(&Item { dtype: None, shape: &[], is_spread: false, ..tensor("ö", &[]) }).unwrap();
    index.add_chunk(&Chunk { kind: Kind::Object, ..chunk(&[], &[], 1, 0) }).unwrap();
    index.add(&Item { strides: Strides::Unknown, ..tensor("", &[]) }).unwrap();
    index.planner = vec![128, 0, 255];
    let read = Index::decode(&index.encode(), 2).unwrap();
    assert_eq!(read, index);
    assert_eq!(read.chunk_at(0, &[150, 0]).map(|chunk| chunk.entry), Some(1 << 20));
    assert_eq!((read.chunk_at(0, &[]), read.chunk_at(1, &[]).map(|chunk| chunk.file)), (None, Some(1)));
    assert_eq!((read.len(), read.chunk_count(), read.find("ö"), read.find("x")), (3, 3, Some(1), None));
    assert_eq!(read.item(0), about);
    assert_eq!(read.chunks(0).next().unwrap().layout, Some((64, &[1, 70_000][..])));
    assert!(matches!(Index::decode(&index.encode(), 1), Err(IndexError::Value { what: "file", value: 1, .. })));
}

#[test]
fn what_cannot_be_is_refused() {
    let mut index = index(&[4], &[(&[0], &[4], 0)]);
    assert!(matches!(index.add(&tensor("w", &[4])), Err(IndexError::RepeatedKey { .. })));
    assert!(matches!(index.add(&tensor("x", &[1 << 40, 1 << 40, 0])), Err(IndexError::Shape { .. })));
    assert!(matches!(index.add(&tensor("y", &[1; 65])), Err(IndexError::Shape { .. })));
    assert!(matches!(index.add(&Item { dtype: None, ..tensor("z", &[1]) }), Err(IndexError::Shape { .. })));
    let steep = Item { strides: Strides::Given(&[1 << 62]), ..tensor("s", &[1]) };
    assert!(matches!(index.add(&steep), Err(IndexError::Value { what: "stride", .. })));
    for (offsets, sizes) in [(&[1_u64][..], &[4_u64][..]), (&[u64::MAX], &[2]), (&[], &[]), (&[0, 0], &[1, 1])] {
        assert!(matches!(index.add_chunk(&chunk(offsets, sizes, 0, 0)), Err(IndexError::Outside { .. })));
    }
    let bytes = index.encode();
    assert!(matches!(Index::decode(&bytes[1..], 1), Err(IndexError::Magic)));
    let mut later = bytes.clone();
    later[8] = 2;
    assert!(matches!(Index::decode(&later, 1), Err(IndexError::Version { found: 2 })));
    // A later version's columns are not looked at.
    assert_eq!(Index::decode(&[&bytes[..], &[9; 5]].concat(), 1).unwrap(), index);
    let mut many = Index::default();
    let refused =
        (0..256).find(|n| many.add(&Item { dtype: Some(&n.to_string()), ..tensor(&n.to_string(), &[]) }).is_err());
    assert_eq!(refused, Some(255));
}

#[test]
fn what_was_written_is_compared_with_what_was_planned() {
    let object = || Item { dtype: None, shape: &[], is_spread: false, ..tensor("o", &[]) };
    let plan = |boxes: &[(&[u64], &[u64], u32)], objects: &[Item<'_>]| {
        let mut plan = index(&[4], boxes);
        for item in objects {
            plan.add(item).unwrap();
            plan.add_chunk(&Chunk { kind: Kind::Object, ..chunk(&[], &[], 0, 0) }).unwrap();
        }
        plan
    };
    let halves: [(&[u64], &[u64], u32); 2] = [(&[0], &[2], 0), (&[2], &[2], 0)];
    let ranks = [plan(&halves[1..], &[]), Index::default(), plan(&halves[..1], &[object()])];
    let mut planned = Index::default();
    planned.add(&Item { path: "[\"o\"]", ..object() }).unwrap();
    planned.add_chunk(&chunk(&[], &[], 0, 0)).unwrap();
    planned.add(&Item { dtype: Some("int8"), requires_grad: true, ..tensor("w", &[4]) }).unwrap();
    for (offsets, sizes, _) in halves {
        planned.add_chunk(&chunk(offsets, sizes, 0, 0)).unwrap();
    }
    let index = written(&planned, &ranks, &[5, 0, 3], true).unwrap();
    // The order and what is said of keys are the planner's, dtypes and entries those that were written.
    assert_eq!(index.item(0), Item { path: "[\"o\"]", ..object() });
    assert_eq!(index.item(1), Item { requires_grad: true, ..tensor("w", &[4]) });
    let found: Vec<_> = index.chunks(1).map(|chunk| (chunk.part.offsets[0], chunk.file)).collect();
    assert_eq!(found, [(0, 3), (2, 5)]);
    assert_eq!(index.chunks(0).next().map(|chunk| (chunk.kind, chunk.file)), Some((Kind::Object, 3)));

    let refused = |planned: &Index| written(planned, &ranks, &[0, 1, 2], true).unwrap_err();
    let same = Item { key: "o", ..tensor("o", &[]) };
    assert!(matches!(refused(&plan(&halves, &[same])), MergeError::Contradicts { .. }));
    let more = Item { key: "p", ..object() };
    assert!(matches!(refused(&plan(&halves, &[object(), more])), MergeError::NotWritten { part } if part == "p"));
    assert!(matches!(refused(&plan(&halves, &[])), MergeError::NotPlanned { part } if part == "o"));
    assert!(matches!(refused(&plan(&halves[..1], &[object()])), MergeError::NotPlanned { part } if part == "w[2:4]"));
    let whole = plan(&[(&[0], &[4], 0)], &[object()]);
    assert!(matches!(refused(&whole), MergeError::NotWritten { part } if part == "w[0:4]"));
    assert!(matches!(written(&planned, &ranks[1..], &[0, 1], true), Err(MergeError::Missing { .. })));
    assert!(matches!(written(&planned, &ranks[1..], &[0, 1], false), Err(MergeError::NotWritten { .. })));
}

proptest! {
    #[test]
    fn damage_is_refused_or_harmless(at in 0..400_usize, with: u8, cut in 0..400_usize) {
        let index = index(&[4, 6], &[(&[0, 0], &[2, 6], 0), (&[2, 0], &[2, 6], 1)]);
        let mut bytes = index.encode();
        let length = bytes.len();
        prop_assert!(Index::decode(&bytes[..cut % length], 2).is_err());
        bytes[at % length] = with;
        if let Ok(read) = Index::decode(&bytes, 2) {
            // What was read can be asked, and is what it says.
            for number in 0..read.len() {
                let shape = read.item(number).shape.to_vec();
                let _ = read.overlaps(number, BoxRef { offsets: &vec![0; shape.len()], sizes: &shape }, 0);
            }
            prop_assert_eq!(Index::decode(&read.encode(), 2).unwrap(), read);
        }
    }

    #[test]
    fn a_box_is_read_from_the_chunks_that_have_it(
        cuts in prop::collection::vec(cuts(), 0..4), ends in prop::collection::vec((0..12_u64, 0..12_u64), 4), own in 0..3_u32,
    ) {
        let (shape, boxes) = (shape_of(&cuts), grid(&cuts));
        let mut index = Index::default();
        index.add(&tensor("w", &shape)).unwrap();
        for file in 0..3 {
            for (entry, (offsets, sizes)) in boxes.iter().enumerate() {
                index.add_chunk(&chunk(offsets, sizes, file, u32::try_from(entry).unwrap())).unwrap();
            }
        }
        let (offsets, sizes): (Vec<_>, Vec<_>) = shape.iter().zip(&ends).map(|(&dim, &(a, b))| {
            let (a, b) = (a.min(dim), b.min(dim));
            (a.min(b), a.max(b) - a.min(b))
        }).unzip();
        let wanted = BoxRef { offsets: &offsets, sizes: &sizes };
        let found = index.overlaps(0, wanted, own).unwrap();
        prop_assert!(found.iter().all(|chunk| chunk.file == own && chunk.part.common(&wanted) > 0));
        prop_assert_eq!(found.iter().map(|chunk| chunk.part.common(&wanted)).sum::<u64>(), wanted.numel());
        let outside: Vec<_> = offsets.iter().zip(&shape).map(|(a, dim)| a + dim).collect();
        let far = BoxRef { offsets: &outside, sizes: &shape };
        if !shape.is_empty() && far.offsets.iter().any(|&a| a > 0) {
            let refused = matches!(index.overlaps(0, far, 0), Err(OverlapError::Outside { .. }));
            prop_assert!(refused);
        }
    }

    #[test]
    fn parts_of_ranks_make_up_a_whole_or_are_refused(
        cuts in prop::collection::vec(cuts(), 1..4), world in 1..4_usize, seed: u64, lose: bool, twice: bool,
    ) {
        let (shape, boxes) = (shape_of(&cuts), grid(&cuts));
        let mut ranks: Vec<Index> = (0..world).map(|_| index(&shape, &[])).collect();
        let mut random = seed;
        let full: Vec<_> = boxes.iter().filter(|(_, sizes)| sizes.iter().product::<u64>() > 0).collect();
        for (n, (offsets, sizes)) in full.iter().enumerate() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let first = usize::try_from(random >> 33).unwrap() % world;
            if lose && n == 0 {
                continue;
            }
            for rank in [first, (first + usize::try_from(random >> 62).unwrap()) % world] {
                let owned = Chunk { owner: Some(0), ..chunk(offsets, sizes, 0, 0) };
                ranks[rank].add_chunk(&owned).unwrap();
            }
        }
        if let (true, Some((offsets, sizes))) = (twice, full.iter().find(|(_, sizes)| sizes[0] > 1)) {
            let mut less = sizes.clone();
            less[0] -= 1;
            ranks[world - 1].add_chunk(&Chunk { owner: Some(0), ..chunk(offsets, &less, 0, 0) }).unwrap();
        }
        for replicas in [Replicas::All, Replicas::First] {
            let result = merge(&ranks, replicas, true, |_, _| true);
            let misses = lose && !full.is_empty();
            let overlaps = twice && full.iter().any(|(_, sizes)| sizes[0] > 1);
            match result {
                Err(MergeError::Missing { .. }) => prop_assert!(misses),
                Err(MergeError::Overlap { .. }) => prop_assert!(overlaps),
                Err(other) => prop_assert!(false, "{}", other),
                Ok(merged) => {
                    prop_assert!(!misses || overlaps);
                    let whole = BoxRef { offsets: &vec![0; shape.len()], sizes: &shape };
                    let chunks = merged.index.overlaps(0, whole, 0).unwrap();
                    if replicas != Replicas::All {
                        prop_assert_eq!(chunks.len(), merged.index.chunk_count());
                    }
                    let kept: usize = merged.kept.iter().flatten().filter(|kept| **kept).count();
                    prop_assert_eq!(kept, merged.index.chunk_count());
                }
            }
        }
    }
}

#[test]
fn ranks_that_contradict_each_other_are_named() {
    let whole = |owner: u32, shape: &[u64]| index(shape, &[(&[0], shape, owner)]);
    let two = [whole(0, &[4]), whole(1, &[4])];
    assert!(merge(&two, Replicas::First, true, |_, _| true).is_ok());
    let error = merge(&two, Replicas::First, true, |_, _| false).unwrap_err();
    assert!(matches!(error, MergeError::Values { first_rank: 0, rank: 1, .. }), "{error}");
    let error = merge(&[whole(0, &[4]), whole(0, &[5])], Replicas::First, true, |_, _| true).unwrap_err();
    assert!(matches!(error, MergeError::Differs { first_rank: 0, rank: 1, .. }), "{error}");
    // Where each rank writes a value of its own, values that are not spread may have any shape; the first rank's counts.
    let own = |shape: &[u64]| {
        let mut index = Index::default();
        index.add(&Item { is_spread: false, ..tensor("w", shape) }).unwrap();
        index.add_chunk(&chunk(&[0], shape, 0, 0)).unwrap();
        index
    };
    let merged = merge(&[own(&[4]), own(&[5])], Replicas::All, true, |_, _| true).unwrap();
    assert_eq!((merged.index.item(0).shape, merged.index.chunk_count()), (&[4][..], 1));
    assert!(merge(&[own(&[4]), whole(0, &[4])], Replicas::All, true, |_, _| true).is_err());
}

#[test]
fn the_rank_with_least_to_write_writes_a_replica() {
    let rank = |keys: &[(&str, u64)]| {
        let mut index = Index::default();
        for (key, length) in keys {
            index.add(&Item { is_spread: false, ..tensor(key, &[*length]) }).unwrap();
            index.add_chunk(&Chunk { bytes: *length, ..chunk(&[0], &[*length], 0, 0) }).unwrap();
        }
        index
    };
    let ranks = [rank(&[("a", 9), ("b", 5), ("c", 5)]), rank(&[("a", 9), ("b", 5), ("c", 5)])];
    assert_eq!(plan(&ranks, false).unwrap().kept, [[true, false, false], [false, true, true]]);
    assert_eq!(plan(&ranks, true).unwrap().kept[1], [false; 3]);
    // Keys stand in the order of the ranks that write them, as a later rank's shape does if that rank writes it.
    let planned = plan(&[rank(&[("a", 9), ("b", 5)]), rank(&[("b", 6)])], false).unwrap();
    assert_eq!((planned.index.item(1).key, planned.index.item(1).shape), ("b", &[6][..]));
    // An object and a tensor are never one part, and the parts of a tensor make it up.
    let mut object = Index::default();
    object.add(&Item { key: "a", dtype: None, shape: &[], is_spread: false, ..tensor("a", &[]) }).unwrap();
    object.add_chunk(&chunk(&[], &[], 0, 0)).unwrap();
    let error = plan(&[rank(&[("a", 9)]), object], false).unwrap_err();
    assert!(matches!(error, MergeError::Differs { first_rank: 0, rank: 1, .. }), "{error}");
    let part = |at: u64| index(&[4], &[(&[at], &[2], 0)]);
    assert!(plan(&[part(0), part(2)], false).is_ok());
    assert!(plan(&[part(0)], false).is_ok());
    assert!(matches!(plan(&[part(0), part(0)], false), Err(MergeError::Missing { .. })));
    assert!(matches!(plan(&[part(0), part(1)], false), Err(MergeError::Overlap { .. })));
}
