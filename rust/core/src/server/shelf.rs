//! Shelves: further stores of a server, each below a path of its own, so that one port serves many checkpoints at the
//! same time.
//!
//! A shelf is found by the first segment of a path, by default 128 random bits: whoever knows the path of one shelf
//! learns nothing about the others. Looking one up compares hashes keyed at random, so that no path can be guessed byte
//! by byte.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tensorferry_wire::rails;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::Shared;
use crate::error::{Error, ErrorKind};
use crate::publication::Store;
use crate::sync::Locked;
use crate::trust::{random, secret};

/// The longest name a shelf can be given.
const MAX_NAME: usize = 64;

/// The shelves of a server, by name.
#[derive(Debug, Default)]
pub(super) struct Shelves(Mutex<HashMap<String, Arc<Store>>>);

/// A further store of a [`crate::Server`], with a URL of its own. Dropping it ends its transfers; the server's other
/// checkpoints are not touched.
///
/// ```
/// use tensorferry_core::{Publication, Server, ServerConfig, Stability};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = tokio::runtime::Runtime::new()?;
/// let server = Server::bind(&ServerConfig::default(), runtime.handle())?;
/// let (monday, tuesday) = (server.shelf(None)?, server.shelf(None)?);
/// assert_ne!(monday.url("node1"), tuesday.url("node1"));
/// for (step, shelf) in [(1, &monday), (2, &tuesday)] {
///     shelf.store().publish(step, Publication::new(Vec::new(), Vec::new(), Stability::Private, Box::new(()))?);
/// }
/// assert_eq!((monday.store().step(), tuesday.store().step()), (Some(1), Some(2)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Shelf {
    name: String,
    store: Arc<Store>,
    shared: Arc<Shared>,
    /// Ends the sweeping of the store when it is dropped.
    _over: watch::Sender<()>,
}

impl Shelves {
    /// The store below `path`, and the name of its shelf as it stands in the path.
    pub(super) fn find<'p>(&self, path: &'p str) -> Option<(&'p str, Arc<Store>)> {
        let path = path.strip_prefix('/')?;
        let name = rails::without_cards(path.split_once('/')?.0);
        let shelves = self.0.locked();
        shelves.get(name).map(|store| (name, Arc::clone(store)))
    }

    /// The stores of all shelves.
    pub(super) fn stores(&self) -> Vec<Arc<Store>> {
        self.0.locked().values().cloned().collect()
    }
}

impl Shelf {
    /// Adds a shelf to a server: below `name`, or below random bits. Fails if `name` is taken or cannot be one.
    pub(super) fn put_up(shared: &Arc<Shared>, name: Option<&str>, handle: &Handle) -> Result<Self, Error> {
        let name = match name {
            Some(name) if is_valid_name(name) => name.to_owned(),
            Some(_) => {
                let message = format!("the name of a shelf is 1 to {MAX_NAME} letters and digits, and no resource's");
                return Err(Error::new(ErrorKind::Invalid, message));
            }
            None => random::token()?,
        };
        let algorithm = secret::algorithm(shared.auth.as_ref().map(super::auth::RequestAuth::secret));
        let store = Arc::new(Store::new(algorithm)?);
        let mut shelves = shared.shelves.0.locked();
        if name == shared.token || shelves.contains_key(&name) {
            return Err(Error::new(ErrorKind::Invalid, format!("there is a shelf {name} already")));
        }
        shelves.insert(name.clone(), Arc::clone(&store));
        drop(shelves);
        let (over, mut is_over) = watch::channel(());
        let sweeping = Arc::clone(&store);
        handle.spawn(async move {
            tokio::select! {
                () = sweeping.sweep() => {}
                _ = is_over.changed() => {}
            }
        });
        Ok(Self { name, store, shared: Arc::clone(shared), _over: over })
    }

    /// The store of this shelf.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The segment of paths by which it is found.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The URL prefix to which `{step}.safetensors` and its like are appended, as seen by peers that reach `host`.
    #[must_use]
    pub fn url(&self, host: &str) -> String {
        self.shared.url(host, &self.name)
    }
}

impl Drop for Shelf {
    fn drop(&mut self) {
        self.shared.shelves.0.locked().remove(&self.name);
        self.store.close();
    }
}

/// Whether a shelf may be called that: letters and digits, and no path of the server itself.
fn is_valid_name(name: &str) -> bool {
    let regular = name.bytes().all(|b| b.is_ascii_alphanumeric());
    // A server without a random part has these at the top of its paths.
    regular && (1..=MAX_NAME).contains(&name.len()) && !matches!(name, "healthz" | "metrics" | "checkpoint")
}
