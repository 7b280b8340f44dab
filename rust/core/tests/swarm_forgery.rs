//! A member of a swarm that makes up blocks on purpose: their CRC is right.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tensorferry_core::Stability;
use tensorferry_wire::digest::checksum;

use crate::common::raw::get;
use crate::common::{BLOCK, Rig, State};
use crate::swarm::{join, length_of, member, offering, port_of, relay_of_bytes};

const BLOCKS: usize = 32;
/// The polynomial of CRC-64/NVME, lowest bit first: whatever it is added to keeps its checksum.
const NEUTRAL: u128 = (0x9A6C_9329_AC4B_C9B5 << 1) | 1;

/// Changes a block, and keeps its CRC.
pub(crate) fn forge(block: &mut [u8]) {
    let before = checksum(block);
    block[100..].iter_mut().zip(NEUTRAL.to_le_bytes()).for_each(|(byte, neutral)| *byte ^= neutral);
    assert_eq!(checksum(block), before);
}

#[test]
fn a_block_that_is_made_up_to_have_the_right_crc_is_refused() {
    let (state, rig) = (State::of(&[BLOCKS * BLOCK], 1), Rig::new());
    for stability in [Stability::Private, Stability::Borrowed] {
        let source = offering(&state, Some(16 * BLOCK as u64));
        source.server.store().publish(7, state.publication(stability));
        let start = length_of(&source) - BLOCKS * BLOCK;
        let head = get(&source, &source.path("7/header"), &[]).body;
        assert_eq!(head.len(), start);
        let mut container = [&head[..], state.bytes("w0")].concat();
        container[start..].chunks_mut(BLOCK).for_each(forge);
        let asked = Arc::<AtomicUsize>::default();
        let total = container.len();
        let forger = relay_of_bytes(BLOCKS, total, &asked, move |start, end| container[start..end].to_vec());
        let _joined = join(&source, port_of(&forger.url()));
        // Every byte is compared there.
        let arrived = state.fetch(&[&source.url()], member(&rig)).unwrap();
        assert!(asked.load(Ordering::SeqCst) > 0 && arrived.report().refused > 0, "{:?}", arrived.report());
        let authority = forger.url().split('/').nth(2).unwrap().to_owned();
        assert!(arrived.report().troubles.contains_key(&authority), "{:?}", arrived.report().troubles);
    }
}
