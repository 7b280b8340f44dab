//! Bodies in other formats than the container: rendered when they are first requested, and kept with the
//! publication.
//!
//! The engine knows neither the formats nor their names. A [`crate::Frontend`] says which names there are; the
//! [`Alternate`] given to a publication renders them.

use std::any::Any;
use std::sync::{Arc, PoisonError};

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

/// A rendered body, and the owners of its memory.
pub(super) type RenderedBody = (Arc<Segments>, Box<dyn Any + Send + Sync>);

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
        // The lock is held while rendering: two peers that ask for the same body wait for one rendering.
        let mut rendered = self.rendered.lock().unwrap_or_else(PoisonError::into_inner);
        if rendered.contains_key(name) {
            return Ok(Some(Found::Here));
        }
        let (parts, owner) = match alternate.render(name)? {
            Some(Rendered::Body { parts, owner }) => (parts, owner),
            Some(Rendered::Elsewhere(url)) => return Ok(Some(Found::Elsewhere(url))),
            None => return Ok(None),
        };
        let segments = Arc::new(Segments::new(parts));
        rendered.insert(name.to_owned(), (segments, owner));
        Ok(Some(Found::Here))
    }
}
