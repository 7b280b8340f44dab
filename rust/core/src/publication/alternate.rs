//! Bodies in other formats than the container: rendered when they are first requested, and kept with the
//! publication.
//!
//! The engine knows neither the formats nor their names. A [`crate::Frontend`] says which names there are; the
//! [`Alternate`] given to a publication renders them.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::Publication;
use crate::memory::Memory;
use crate::payload::Segments;
use crate::sync::Locked;

/// Bodies in another format than the container, laid over the same memory, each built only when it is requested.
///
/// Which names a server passes on is up to its [`crate::Frontend`].
///
/// ```
/// use bytes::Bytes;
/// use tensorferry_core::{Alternate, Rendered};
///
/// struct Greeting;
///
/// impl Alternate for Greeting {
///     fn render(&self, name: &str) -> Result<Option<Rendered>, String> {
///         let body = || Rendered { parts: vec![Bytes::from_static(b"hello").into()], owner: Box::new(()) };
///         Ok((name == "greeting").then(body))
///     }
/// }
/// # assert!(matches!(Greeting.render("greeting"), Ok(Some(_))));
/// ```
pub trait Alternate: Send + Sync {
    /// Builds the body called `name`, or returns `None` when this publication has none of that name. Called on a
    /// blocking thread, one call at a time, and for a name again only when it has brought no body. The request that
    /// asks for it holds no lease meanwhile, so a withdrawal does not wait for it; other requests may be answered.
    ///
    /// # Errors
    /// A message, with which the request is answered (500).
    fn render(&self, name: &str) -> Result<Option<Rendered>, String>;
}

/// A body in another format.
pub struct Rendered {
    /// The memory that it consists of, in order.
    pub parts: Vec<Memory>,
    /// Keeps that memory alive; dropped with the publication.
    pub owner: Box<dyn Any + Send + Sync>,
}

/// The bodies of a publication that were rendered.
#[derive(Default)]
pub(super) struct RenderedBodies {
    /// Never locked while a body is built: threads of the runtime look here.
    bodies: Mutex<Bodies>,
    /// Told when a turn is over.
    over: Notify,
}

#[derive(Default)]
struct Bodies {
    /// By name: a rendered body, and the owners of its memory.
    built: HashMap<String, (Arc<Segments>, Box<dyn Any + Send + Sync>)>,
    is_building: bool,
}

/// The right to build a body of a publication, which one caller has at a time.
pub(crate) struct Turn(Arc<Publication>);

impl RenderedBodies {
    /// The body called `name`, if it was rendered; one that is being built is not waited for.
    pub(super) fn get(&self, name: &str) -> Option<Arc<Segments>> {
        self.bodies.locked().built.get(name).map(|(segments, _)| Arc::clone(segments))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.rendered.bodies.locked().is_building = false;
        self.0.rendered.over.notify_waiters();
    }
}

impl Publication {
    /// Adds bodies in another format, built when they are asked for.
    #[must_use]
    pub fn with_alternate(mut self, alternate: Box<dyn Alternate>) -> Self {
        self.alternate = Some(alternate);
        self
    }

    /// Waits until the alternate body called `name` may be built; `None` once another has built it.
    pub(crate) async fn turn(self: &Arc<Self>, name: &str) -> Option<Turn> {
        loop {
            let over = self.rendered.over.notified();
            tokio::pin!(over);
            over.as_mut().enable();
            {
                let mut bodies = self.rendered.bodies.locked();
                if bodies.built.contains_key(name) {
                    return None;
                }
                if !std::mem::replace(&mut bodies.is_building, true) {
                    return Some(Turn(Arc::clone(self)));
                }
            }
            over.await;
        }
    }
}

impl Turn {
    /// Builds the alternate body called `name`, which may take long; [`super::Lease::rendered`] has it then. Returns
    /// false if there is none of that name.
    pub(crate) fn render(self, name: &str) -> Result<bool, String> {
        let Some(alternate) = &self.0.alternate else { return Ok(false) };
        let Some(Rendered { parts, owner }) = alternate.render(name)? else { return Ok(false) };
        let segments = Arc::new(Segments::new(parts));
        self.0.rendered.bodies.locked().built.insert(name.to_owned(), (segments, owner));
        Ok(true)
    }
}
