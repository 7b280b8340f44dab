//! The decisions that a server leaves to the program it serves for: which other formats exist, and the texts of
//! refusals.

use std::fmt::Debug;

/// The part of a program that a server works for. It names the formats besides the container in which a checkpoint may
/// be asked for (see [`crate::Alternate`], which builds them), and words the refusals that its users read.
///
/// The methods run on the server's threads and must not block.
///
/// ```
/// use std::sync::Arc;
/// use tensorferry_core::{Frontend, ServerConfig};
///
/// #[derive(Debug)]
/// struct Greetings;
///
/// impl Frontend for Greetings {
///     fn alternate(&self, path: &str) -> Option<String> {
///         (path == "greeting").then(|| path.to_owned())
///     }
/// }
///
/// let config = ServerConfig { frontend: Arc::new(Greetings), ..ServerConfig::default() };
/// assert_eq!(config.frontend.alternate("greeting").as_deref(), Some("greeting"));
/// assert_eq!(config.frontend.alternate("farewell"), None);
/// ```
pub trait Frontend: Debug + Send + Sync {
    /// The name under which [`crate::Alternate::render`] is asked for `path`, which is what stands behind
    /// `/checkpoint/{step}/`: one or several segments, none of them empty, perhaps with a slash at the end. `None` where
    /// there is no such path: the request is answered with 400 without a look at what is served.
    fn alternate(&self, path: &str) -> Option<String> {
        let _ = path;
        None
    }

    /// The media type of the body called `name`.
    fn media_type(&self, name: &str) -> &'static str {
        let _ = name;
        "application/octet-stream"
    }

    /// The refusal (404) of a body that the publication cannot be rendered as, though [`Frontend::alternate`] knows its
    /// `name`.
    fn missing(&self, name: &str) -> String {
        format!("there is no {name} here")
    }

    /// The refusal (404) of `step` while the gate is open for it and nothing has been published.
    fn unpublished(&self, step: i64) -> String {
        format!("step {step} is allowed but nothing has been published")
    }
}

/// The frontend of a server that serves containers and nothing else.
#[derive(Debug)]
pub(super) struct ContainersOnly;

impl Frontend for ContainersOnly {}
