//! Bodies in another format than the container: built only when somebody asks for them, and kept.

use std::any::Any;
use std::sync::{Arc, PoisonError};

use super::Publication;
use crate::memory::Memory;
use crate::payload::Segments;

/// A body in another format than the container, laid over the same memory: built only when somebody asks for it.
pub trait Alternate: Send + Sync {
    /// Builds the body called `name`, or `None` when there is none of that name.
    ///
    /// # Errors
    /// A message for the one who asked.
    fn render(&self, name: &str) -> Result<Option<Rendered>, String>;
}

/// What [`Alternate::render`] found.
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

/// A rendered body, and what keeps its memory alive.
pub(super) type RenderedBody = (Arc<Segments>, Box<dyn Any + Send + Sync>);

/// Where an alternate body is.
pub(crate) enum Found {
    Here(Arc<Segments>),
    Elsewhere(String),
}

impl Publication {
    /// Adds bodies in another format, built when they are asked for.
    #[must_use]
    pub fn with_alternate(mut self, alternate: Box<dyn Alternate>) -> Self {
        self.alternate = Some(alternate);
        self
    }

    /// The alternate body called `name`; built on the first call, so this may take long.
    pub(crate) fn render(&self, name: &str) -> Result<Option<Found>, String> {
        let Some(alternate) = &self.alternate else { return Ok(None) };
        // The lock is held while rendering: two peers that ask for the same body wait for one rendering.
        let mut rendered = self.rendered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((segments, _)) = rendered.get(name) {
            return Ok(Some(Found::Here(Arc::clone(segments))));
        }
        let (parts, owner) = match alternate.render(name)? {
            Some(Rendered::Body { parts, owner }) => (parts, owner),
            Some(Rendered::Elsewhere(url)) => return Ok(Some(Found::Elsewhere(url))),
            None => return Ok(None),
        };
        let segments = Arc::new(Segments::new(parts));
        rendered.insert(name.to_owned(), (Arc::clone(&segments), owner));
        Ok(Some(Found::Here(segments)))
    }
}
