//! Bodies in other formats than the container: rendered when they are first requested, and kept with the
//! publication.
//!
//! The engine knows neither the formats nor their names. A [`crate::Frontend`] says which names there are; the
//! [`Alternate`] given to a publication renders them.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::Publication;
use crate::memory::Memory;
use crate::payload::Segments;

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
///         let body = || Rendered::Body { parts: vec![Bytes::from_static(b"hello").into()], owner: Box::new(()) };
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

/// The result of [`Alternate::render`].
pub enum Rendered {
    /// A body.
    Body {
        /// Its parts, in order.
        parts: Vec<Memory>,
        /// Keeps their memory alive; dropped with the publication.
        owner: Box<dyn Any + Send + Sync>,
    },
    /// Another server has it, at this URL.
    Elsewhere(String),
}

/// The bodies of a publication that were rendered.
#[derive(Default)]
pub(super) struct RenderedBodies {
    /// Never locked while a body is built: threads of the runtime look here.
    bodies: Mutex<Bodies>,
    /// Told when a turn is over.
    over: Condvar,
}

#[derive(Default)]
struct Bodies {
    /// By name: a rendered body, and the owners of its memory.
    built: HashMap<String, (Arc<Segments>, Box<dyn Any + Send + Sync>)>,
    is_building: bool,
}

/// The right to build a body, which one caller has at a time.
struct Turn<'a>(&'a RenderedBodies);

impl RenderedBodies {
    fn bodies(&self) -> MutexGuard<'_, Bodies> {
        self.bodies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The body called `name`, if it was rendered; one that is being built is not waited for.
    pub(super) fn get(&self, name: &str) -> Option<Arc<Segments>> {
        self.bodies().built.get(name).map(|(segments, _)| Arc::clone(segments))
    }

    /// Waits until the body called `name` may be built; `None` once another has built it.
    fn turn(&self, name: &str) -> Option<Turn<'_>> {
        let waits = |bodies: &mut Bodies| bodies.is_building && !bodies.built.contains_key(name);
        let mut bodies = self.over.wait_while(self.bodies(), waits).unwrap_or_else(PoisonError::into_inner);
        if bodies.built.contains_key(name) {
            return None;
        }
        bodies.is_building = true;
        Some(Turn(self))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.bodies().is_building = false;
        self.0.over.notify_all();
    }
}

/// Where an alternate body is.
pub(crate) enum Found {
    /// Here: [`super::Lease::rendered`] has it.
    Here,
    Elsewhere(String),
}

impl Publication {
    /// Adds bodies in another format, built when they are asked for.
    #[must_use]
    pub fn with_alternate(mut self, alternate: Box<dyn Alternate>) -> Self {
        self.alternate = Some(alternate);
        self
    }

    /// Where the alternate body called `name` is; built on the first call, so this may take long.
    pub(crate) fn render(&self, name: &str) -> Result<Option<Found>, String> {
        let Some(alternate) = &self.alternate else { return Ok(None) };
        let Some(_turn) = self.rendered.turn(name) else { return Ok(Some(Found::Here)) };
        let (parts, owner) = match alternate.render(name)? {
            Some(Rendered::Body { parts, owner }) => (parts, owner),
            Some(Rendered::Elsewhere(url)) => return Ok(Some(Found::Elsewhere(url))),
            None => return Ok(None),
        };
        let segments = Arc::new(Segments::new(parts));
        self.rendered.bodies().built.insert(name.to_owned(), (segments, owner));
        Ok(Some(Found::Here))
    }
}
