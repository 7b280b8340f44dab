//! A state out of its tree: the JSON text becomes containers and leaves in one pass, with nothing in between.
//!
//! The text was checked by `tensorferry_wire::manifest` before; what remains is checked here, because it depends on
//! Python objects: that a namedtuple's class is one, that a dict's attributes hide nothing, that keys can be hashed.
//! Whatever a source chose that cannot be made raises `ProtocolError`.

use std::borrow::Cow;
use std::collections::HashMap;

use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyList, PyString, PyTuple, PyType};
use tensorferry_wire::JsonError;
use tensorferry_wire::json::Cursor;
use tensorferry_wire::manifest::MAX_DEPTH;

use crate::errors;
use crate::memory::YIELD_INTERVAL;

/// Keys that stand in a tree again and again, as an optimizer's do, are short and few: those are made once.
const SHARED_KEY: usize = 16;
const SHARED_KEYS: usize = 256;
/// Integer keys lie below this, as the sender writes larger ones as objects. Without a bound a source could choose a
/// hundred thousand with one hash.
const KEYS_BELOW: u64 = 1 << 53;

/// The state whose tree is the JSON text `tree`, which `tensorferry_wire::manifest` has checked, or this process has
/// made. The caller has compared the lengths of `leaves` and `objects` with what the manifest says.
///
/// A leaf `n >= 0` stands for `leaves[n]`, a negative one for `objects[-n - 1]`. `defaultdict` is called with an object
/// that is to be the factory of a `defaultdict`, and returns an empty one or raises.
///
/// # Errors
/// `ProtocolError` for a tree that is malformed or has something that cannot be made; `IndexError` for a leaf or an
/// object that the lists do not have.
#[pyfunction]
#[pyo3(name = "_unflatten", signature = (tree, leaves, objects, defaultdict = None))]
pub(crate) fn unflatten<'py>(
    py: Python<'py>,
    tree: &str,
    leaves: &Bound<'py, PyList>,
    objects: &Bound<'py, PyList>,
    defaultdict: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let collections = py.import("collections")?;
    let keys = HashMap::with_capacity(SHARED_KEYS);
    let mut reader = Reader { py, cursor: Cursor::new(tree), leaves, objects, defaultdict, collections, keys, read: 0 };
    let state = reader.node(MAX_DEPTH).and_then(|state| match reader.cursor.peek() {
        None => Ok(state),
        Some(_) => Ok(reader.cursor.fail("the end of the tree")?),
    });
    state.map_err(|broken| match broken {
        Broken::Json(e) => errors::protocol(py, format!("the source's tree is malformed {e}")),
        Broken::Python(e) => e,
    })
}

/// Why a tree cannot become a state: the text, or what Python said of an object.
enum Broken {
    Json(JsonError),
    Python(PyErr),
}

impl From<JsonError> for Broken {
    fn from(error: JsonError) -> Self {
        Self::Json(error)
    }
}

impl From<PyErr> for Broken {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

type Result<T> = std::result::Result<T, Broken>;

/// Reads a tree from its first character to its last.
struct Reader<'a, 'py> {
    py: Python<'py>,
    cursor: Cursor<'a>,
    leaves: &'a Bound<'py, PyList>,
    objects: &'a Bound<'py, PyList>,
    defaultdict: Option<&'a Bound<'py, PyAny>>,
    collections: Bound<'py, PyModule>,
    keys: HashMap<String, Bound<'py, PyString>>,
    /// Leaves since the last turn of other threads.
    read: usize,
}

impl<'py> Reader<'_, 'py> {
    /// One node of at most `depth` nested arrays and objects, of whatever kind. The recursion ends with `depth`, so
    /// that a source cannot choose how much of the stack it takes.
    fn node(&mut self, depth: usize) -> Result<Bound<'py, PyAny>> {
        let deeper = depth.checked_sub(1);
        match (self.cursor.peek(), deeper) {
            (Some(b'{'), Some(depth)) => self.members(PyDict::new(self.py).into_any(), depth),
            (Some(b'['), Some(depth)) => self.tagged(depth),
            (Some(b'{' | b'['), None) => Ok(self.cursor.fail("a node that is not nested as deeply")?),
            _ => self.leaf(),
        }
    }

    /// A leaf: a number of the list of leaves, or, negative, one of the list of objects.
    fn leaf(&mut self) -> Result<Bound<'py, PyAny>> {
        let value = if self.cursor.eat(b'-') {
            let number = self.cursor.adjacent_unsigned()?;
            let Some(object) = number.checked_sub(1) else { return Ok(self.cursor.fail("a node (there is no -0)")?) };
            self.objects.get_item(place(object))?
        } else {
            self.leaves.get_item(place(self.cursor.unsigned()?))?
        };
        self.read += 1;
        if self.read.is_multiple_of(YIELD_INTERVAL) {
            self.py.detach(std::thread::yield_now);
        }
        Ok(value)
    }

    /// Fills `dict` with the members of an object, and returns it.
    fn members(&mut self, dict: Bound<'py, PyAny>, depth: usize) -> Result<Bound<'py, PyAny>> {
        self.cursor.expect(b'{', "an object")?;
        let mut first = true;
        while self.cursor.more(&mut first, b'}')? {
            let key = self.cursor.member()?;
            let key = self.text(key);
            dict.set_item(key, self.node(depth)?)?;
        }
        Ok(dict)
    }

    /// A key as a Python string, of which short ones are made once.
    fn text(&mut self, key: Cow<'_, str>) -> Bound<'py, PyString> {
        if key.len() > SHARED_KEY {
            return PyString::new(self.py, &key);
        }
        if let Some(made) = self.keys.get(&*key) {
            return made.clone();
        }
        let made = PyString::new(self.py, &key);
        if self.keys.len() < SHARED_KEYS {
            self.keys.insert(key.into_owned(), made.clone());
        }
        made
    }

    /// A container that JSON has no notation for: an array whose first item names its kind.
    fn tagged(&mut self, depth: usize) -> Result<Bound<'py, PyAny>> {
        let py = self.py;
        self.cursor.expect(b'[', "an array")?;
        let kind = self.cursor.string()?;
        match &*kind {
            "l" => Ok(PyList::new(py, self.elements(depth)?)?.into_any()),
            "t" => Ok(PyTuple::new(py, self.elements(depth)?)?.into_any()),
            "o" => {
                self.comma()?;
                let ordered = self.collections.getattr(intern!(py, "OrderedDict"))?.call0()?;
                let dict = self.members(ordered, depth)?;
                self.end(dict)
            }
            "d" => {
                self.comma()?;
                let ordered = self.cursor.string()? == "o";
                let dict = if ordered {
                    self.collections.getattr(intern!(py, "OrderedDict"))?.call0()?
                } else {
                    PyDict::new(py).into_any()
                };
                self.comma()?;
                self.pairs(&dict, depth)?;
                self.end(dict)
            }
            "n" => {
                let class = self.object()?;
                let fields = PyList::new(py, self.elements(depth)?)?;
                let tuple =
                    class.cast::<PyType>().is_ok_and(|class| class.is_subclass_of::<PyTuple>().unwrap_or(false));
                if !tuple {
                    return Err(self.refused("namedtuple of a class that is none"));
                }
                self.made("namedtuple", class.call_method1(intern!(py, "_make"), (fields,)))
            }
            "q" => {
                self.comma()?;
                let longest = if self.cursor.eat_word("null") { None } else { Some(self.cursor.unsigned()?) };
                let values = PyList::new(py, self.elements(depth)?)?;
                let class = self.collections.getattr(intern!(py, "deque"))?;
                self.made("deque", class.call1((values, longest)))
            }
            "f" => {
                let factory = self.object()?;
                self.comma()?;
                let filled = self.node(depth)?;
                // Items out of anything else could be a tensor's, one by one.
                let Ok(items) = filled.cast_exact::<PyDict>() else {
                    return Err(self.refused("defaultdict whose items are no dict"));
                };
                let made = match self.defaultdict {
                    Some(make) => make.call1((factory,)),
                    None => self.collections.getattr(intern!(py, "defaultdict"))?.call1((factory,)),
                };
                let dict = self.made("defaultdict", made)?;
                self.made("defaultdict", dict.call_method1(intern!(py, "update"), (items,)))?;
                self.end(dict)
            }
            "a" => {
                let attributes = self.object()?;
                self.comma()?;
                let value = self.node(depth)?;
                self.set_attributes(&value, &attributes)?;
                self.end(value)
            }
            _ => Ok(self.cursor.fail("a kind of node")?),
        }
    }

    /// Gives an `OrderedDict`, which is all that has some in a tree, attributes that hide none of its own. An object
    /// that the pickle made may be a class or a function, whose attributes are everybody's.
    fn set_attributes(&self, value: &Bound<'py, PyAny>, attributes: &Bound<'py, PyAny>) -> Result<()> {
        let class = self.collections.getattr(intern!(self.py, "OrderedDict"))?;
        let Ok(attributes) = attributes.cast_exact::<PyDict>() else {
            return Err(self.refused("dict whose attributes are no dict"));
        };
        if !value.get_type().is(&class) {
            return Err(self.refused("value with attributes that is no OrderedDict"));
        }
        for (name, attribute) in attributes {
            let Ok(name) = name.cast_exact::<PyString>() else {
                return Err(self.refused("dict with an attribute that has no name"));
            };
            if name.to_cow()?.starts_with("__") || class.hasattr(name)? {
                return Err(self.refused("dict with an attribute that Python gives a meaning"));
            }
            value.setattr(name, attribute)?;
        }
        Ok(())
    }

    /// The error for a tree that has something which no honest source writes.
    fn refused(&self, what: &str) -> Broken {
        Broken::Python(errors::protocol(self.py, format!("the source's tree has a {what}")))
    }

    /// The nodes up to the end of an array, each behind a comma. The end is read as well.
    fn elements(&mut self, depth: usize) -> Result<Vec<Bound<'py, PyAny>>> {
        let mut nodes = Vec::new();
        while self.cursor.more(&mut false, b']')? {
            nodes.push(self.node(depth)?);
        }
        Ok(nodes)
    }

    /// Fills a dict with pairs of keys and nodes.
    fn pairs(&mut self, dict: &Bound<'py, PyAny>, depth: usize) -> Result<()> {
        let depth = depth.saturating_sub(1);
        self.cursor.expect(b'[', "an array of pairs")?;
        let mut first = true;
        while self.cursor.more(&mut first, b']')? {
            self.cursor.expect(b'[', "a pair")?;
            let key = self.key()?;
            self.comma()?;
            let node = self.node(depth)?;
            self.cursor.expect(b']', "the end of a pair")?;
            self.made("dict", dict.set_item(key, node))?;
        }
        Ok(())
    }

    /// The key of a dict: text, a truth value, `None`, an integer, or a reference to an object.
    fn key(&mut self) -> Result<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match self.cursor.peek() {
            Some(b'"') => {
                let text = self.cursor.string()?;
                self.text(text).into_any()
            }
            Some(b'[') => {
                self.cursor.expect(b'[', "an array")?;
                if self.cursor.string()? != "r" {
                    return Ok(self.cursor.fail("a key of a kind that this version makes")?);
                }
                let object = self.object()?;
                return self.end(object);
            }
            Some(b't') if self.cursor.eat_word("true") => PyBool::new(py, true).to_owned().into_any(),
            Some(b'f') if self.cursor.eat_word("false") => PyBool::new(py, false).to_owned().into_any(),
            Some(b'n') if self.cursor.eat_word("null") => py.None().into_bound(py),
            _ => {
                let negative = self.cursor.eat(b'-');
                let number = if negative { self.cursor.adjacent_unsigned()? } else { self.cursor.unsigned()? };
                match i64::try_from(number) {
                    Ok(whole) if number < KEYS_BELOW => {
                        py.get_type::<PyInt>().call1((if negative { -whole } else { whole },))?
                    }
                    _ => return Ok(self.cursor.fail("a key that is an integer of less than 2^53")?),
                }
            }
        })
    }

    /// An object of the pickle, by its number.
    fn object(&mut self) -> Result<Bound<'py, PyAny>> {
        self.comma()?;
        Ok(self.objects.get_item(place(self.cursor.unsigned()?))?)
    }

    /// The comma before the next item of an array.
    fn comma(&mut self) -> Result<()> {
        Ok(self.cursor.expect(b',', "a comma")?)
    }

    /// `value`, which stands in an array that ends here.
    fn end(&mut self, value: Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        self.cursor.expect(b']', "the end of an array")?;
        Ok(value)
    }

    /// The result of making `what` from objects that the source chose. An exception, whatever its class, becomes a
    /// `ProtocolError` with the original as its cause; exits and interrupts are passed on.
    fn made<T>(&self, what: &str, made: PyResult<T>) -> Result<T> {
        made.map_err(|e| {
            if !e.is_instance_of::<PyException>(self.py) {
                return Broken::Python(e);
            }
            let kind = e.get_type(self.py).name().map_or_else(|_| "Exception".to_owned(), |name| name.to_string());
            let message = format!("the source's tree has a {what} that cannot be made ({kind}: {})", e.value(self.py));
            let error = errors::protocol(self.py, message);
            error.set_cause(self.py, Some(e));
            Broken::Python(error)
        })
    }
}

/// A number as a place in a list, which has no place as far out as one that does not fit.
fn place(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
