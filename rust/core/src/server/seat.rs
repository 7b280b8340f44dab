//! How the servers of one host share its network cards out, without a word between them.
//!
//! A server that prefers a card holds a seat there: the name of a socket in the abstract namespace, which the kernel gives
//! to one process only, and takes back when that ends, however it ends. Seats have numbers, so the lowest number that is
//! free says how much a card is used. The names belong to a network namespace, as the cards do: containers that share
//! their host's cards share its names.

use std::io;
use std::sync::Arc;

use socket2::{Domain, SockAddr, Socket, Type};

use crate::fork::CloseOnFork;

/// The seats at one card.
const SEATS: usize = 256;

/// A seat at a network card, held until the last clone is dropped. A forked child does not hold it.
#[derive(Clone, Debug)]
pub struct Seat {
    _socket: Arc<CloseOnFork<Socket>>,
}

impl Seat {
    /// Takes a seat at the least used of `cards`, the first of these if several are used as little; returns the index of the
    /// card. `None` if the system gives no socket, or no seat is free.
    ///
    /// ```
    /// let cards = ["example-a", "example-b"];
    /// let (first, _held) = tensorferry_core::Seat::take(&cards).unwrap();
    /// let (second, _held_too) = tensorferry_core::Seat::take(&cards).unwrap();
    /// assert_eq!((first, second), (0, 1));
    /// ```
    #[must_use]
    pub fn take(cards: &[impl AsRef<str>]) -> Option<(usize, Self)> {
        let socket = CloseOnFork::make(|| Socket::new(Domain::UNIX, Type::STREAM, None)).ok()?;
        for seat in 0..SEATS {
            for (index, card) in cards.iter().enumerate() {
                // A leading NUL is the abstract namespace.
                let name = SockAddr::unix(format!("\0tensorferry-card/{}/{seat}", card.as_ref())).ok()?;
                match socket.bind(&name) {
                    Ok(()) => return Some((index, Self { _socket: Arc::new(socket) })),
                    Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
                    Err(_) => return None,
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_are_shared_out_evenly_and_come_back() {
        let cards: Vec<_> = (0..4).map(|card| format!("of-{}-{card}", std::process::id())).collect();
        let mut held: Vec<_> = (0..8).map(|_| Seat::take(&cards).unwrap()).collect();
        assert_eq!(held.iter().map(|(card, _)| *card).collect::<Vec<_>>(), [0, 1, 2, 3, 0, 1, 2, 3]);
        drop(held.remove(6));
        held.push(Seat::take(&cards).unwrap());
        assert_eq!(held.last().unwrap().0, 2);
        let near = [&cards[3], &cards[2]];
        assert_eq!(
            (0..3)
                .map(|_| {
                    held.push(Seat::take(&near).unwrap());
                    held.last().unwrap().0
                })
                .collect::<Vec<_>>(),
            [0, 1, 0]
        );
        let long = "x".repeat(200);
        assert!(Seat::take(&[long]).is_none());
        assert!(Seat::take(&[""; 0]).is_none());
    }
}
