//! Which specs of `DTensor`s say the same. Most `DTensor`s have a spec of their own, though a state has few that differ.
//!
//! A spec is read into a fingerprint: its numbers, and the addresses of all else that it consists of. Two specs with the
//! same fingerprint say the same, and comparing fingerprints calls nothing of torch's. Only placements are compared by
//! torch, each with those of its class that were met before.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::{Mutex, MutexGuard};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyString, PyTuple, PyType};

use crate::rows::columns::{AddressHasher, ByAddress};
use tensorferry_core::Locked;

/// Names and values of the attributes of a spec.
pub(crate) type Fields<'py> = Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>;

/// What a spec says, as words of memory: equal for specs that say the same.
#[derive(PartialEq, Eq)]
pub(crate) struct SpecFingerprint(Vec<usize>);

impl Hash for SpecFingerprint {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.iter().for_each(|&word| state.write_usize(word));
    }
}

/// The specs of a state that were met so far, numbered from 0 on by what they say.
#[derive(Default)]
pub(crate) struct Specs(Mutex<Met>);

#[derive(Default)]
struct Met {
    /// Address of a spec to its number: many `DTensor`s share the object. `kept` keeps them.
    by_address: ByAddress<usize>,
    kept: Vec<Py<PyAny>>,
    /// With the fields of the first that says it, which keep the objects whose addresses are in the fingerprint.
    by_fingerprint: HashMap<SpecFingerprint, (usize, Kept), BuildHasherDefault<AddressHasher>>,
    /// Those that differ.
    placements: Vec<Py<PyAny>>,
    /// Classes of tuples, and whether they compare as tuples do.
    tuples: Vec<(Py<PyType>, bool)>,
}

type Kept = Vec<(Py<PyAny>, Py<PyAny>)>;

impl Specs {
    fn met(&self) -> MutexGuard<'_, Met> {
        self.0.locked()
    }

    /// The number of `spec`, if this object was met.
    pub(crate) fn number(&self, spec: &Bound<'_, PyAny>) -> Option<usize> {
        self.met().by_address.get(&(spec.as_ptr() as usize)).copied()
    }

    /// The number of the specs with this `fingerprint`.
    pub(crate) fn number_of_fingerprint(&self, fingerprint: &SpecFingerprint) -> Option<usize> {
        self.met().by_fingerprint.get(fingerprint).map(|&(number, _)| number)
    }

    /// Gives specs with this `fingerprint` a number; it was made of `fields`.
    pub(crate) fn add_fingerprint(&self, fingerprint: SpecFingerprint, number: usize, fields: Fields<'_>) {
        let fields = fields.into_iter().map(|(name, value)| (name.unbind(), value.unbind())).collect();
        self.met().by_fingerprint.insert(fingerprint, (number, fields));
    }

    /// Notes the number of an object.
    pub(crate) fn add(&self, spec: Bound<'_, PyAny>, number: usize) {
        let mut met = self.met();
        met.by_address.insert(spec.as_ptr() as usize, number);
        met.kept.push(spec.unbind());
    }

    /// The fingerprint of `spec`, whose attributes are `fields`. `None` if its placements are no tuple, or if the state
    /// has too many that differ.
    ///
    /// # Errors
    /// Whatever comparing placements raises, and `TypeError` for an attribute whose name is no text.
    pub(crate) fn fingerprint(
        &self,
        spec: &Bound<'_, PyAny>,
        fields: &Fields<'_>,
    ) -> PyResult<Option<SpecFingerprint>> {
        let mut words = Vec::with_capacity(WORDS);
        words.push(spec.get_type_ptr() as usize);
        for (name, value) in fields {
            // By its text: what was unpickled may have names that are not interned.
            match name.cast::<PyString>()?.to_str()? {
                // Computed when it is asked for.
                "_hash" => {}
                "placements" => {
                    let Ok(placements) = value.cast_exact::<PyTuple>() else { return Ok(None) };
                    words.extend([name.as_ptr() as usize, placements.len()]);
                    for placement in placements {
                        let Some(number) = self.number_of_placement(&placement)? else { return Ok(None) };
                        words.push(number);
                    }
                }
                _ => {
                    words.push(name.as_ptr() as usize);
                    self.append(&mut words, value, 0)?;
                }
            }
        }
        Ok(Some(SpecFingerprint(words)))
    }

    /// Appends what `value` says: an integer, a tuple, or any other object, which says the same as itself only.
    fn append(&self, words: &mut Vec<usize>, value: &Bound<'_, PyAny>, depth: usize) -> PyResult<()> {
        if value.is_exact_instance_of::<PyInt>()
            && let Ok(integer) = value.extract::<isize>()
        {
            words.extend([INTEGER, integer.cast_unsigned()]);
        } else if let Ok(tuple) = value.cast::<PyTuple>()
            && depth < MAX_DEPTH
            && self.compares_as_tuple(tuple)?
        {
            words.extend([tuple.get_type_ptr() as usize, tuple.len()]);
            for item in tuple {
                self.append(words, &item, depth + 1)?;
            }
        } else {
            words.extend([OBJECT, value.as_ptr() as usize]);
        }
        Ok(())
    }

    /// Whether tuples of the class of `tuple` with the same items are equal: it may have a comparison of its own.
    fn compares_as_tuple(&self, tuple: &Bound<'_, PyTuple>) -> PyResult<bool> {
        let py = tuple.py();
        if tuple.is_exact_instance_of::<PyTuple>() {
            return Ok(true);
        }
        let class = tuple.get_type_ptr();
        let known = self.met().tuples.iter().find(|(known, _)| known.as_ptr() == class.cast()).map(|&(_, does)| does);
        if let Some(does) = known {
            return Ok(does);
        }
        let (class, name) = (tuple.get_type(), intern!(py, "__eq__"));
        let does = class.getattr(name)?.is(&py.get_type::<PyTuple>().getattr(name)?);
        self.met().tuples.push((class.unbind(), does));
        Ok(does)
    }

    /// The number of this placement among those that differ, `None` if there are too many. Placements of two classes
    /// differ, even if they compare as equal.
    fn number_of_placement(&self, placement: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        let py = placement.py();
        for number in 0..=MOST_PLACEMENTS {
            // Comparing may run any code, and so not while this is locked.
            let known = match self.met().placements.get(number) {
                Some(known) if known.is(placement) => return Ok(Some(number)),
                Some(known) if known.bind(py).get_type_ptr() == placement.get_type_ptr() => known.clone_ref(py),
                Some(_) => continue,
                None => break,
            };
            if known.bind(py).eq(placement)? {
                return Ok(Some(number));
            }
        }
        let mut met = self.met();
        let number = met.placements.len();
        if number == MOST_PLACEMENTS {
            return Ok(None);
        }
        met.placements.push(placement.clone().unbind());
        Ok(Some(number))
    }

    /// Forgets all specs and placements.
    pub(crate) fn forget(&self) {
        let met = std::mem::take(&mut *self.met());
        // Releasing objects may run any code.
        drop(met);
    }
}

/// The attributes of `spec`, `None` if it has none that could be compared.
///
/// # Errors
/// Whatever asking for them raises.
pub(crate) fn fields<'py>(spec: &Bound<'py, PyAny>) -> PyResult<Option<Fields<'py>>> {
    let dict = spec.getattr(intern!(spec.py(), "__dict__"))?;
    // All at once: comparing may run any code, also such that changes the dict.
    Ok(dict.cast_into_exact::<PyDict>().ok().map(|dict| dict.iter().collect()))
}

/// A state has a handful of different placements. `DTensor`s of a state with more than this are pickled in Python.
const MOST_PLACEMENTS: usize = 64;
/// Tuples within so many others are told apart by their addresses. A spec has two around the dimensions of a shard.
const MAX_DEPTH: usize = 8;
/// About how many words a spec has.
const WORDS: usize = 64;
/// What comes before an integer and before the address of an object, and is no address of a class of tuples.
const INTEGER: usize = 0;
const OBJECT: usize = 1;
