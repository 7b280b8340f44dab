//! The grammar of the tree.

use std::collections::HashSet;
use std::fmt::Write as _;

use super::ManifestError;
use super::validator::Validator;
use crate::distinct::Distinct;

impl Validator<'_> {
    /// Reads a node in which arrays and objects are nested at most `depth` deep; `depth` bounds the recursion.
    pub(super) fn node(&mut self, depth: usize) -> Result<(), ManifestError> {
        match self.cursor.peek() {
            Some(b'{') => self.dict(depth),
            Some(b'[') => self.tagged(depth),
            _ => self.leaf(),
        }
    }

    /// Reads a leaf: `n` is the plain leaf `n`, and `-n - 1` the object `n`.
    fn leaf(&mut self) -> Result<(), ManifestError> {
        if self.cursor.eat(b'-') {
            let negative = self.cursor.adjacent_unsigned()?;
            let Some(object) = negative.checked_sub(1) else {
                return Ok(self.cursor.fail("a node (there is no -0)")?);
            };
            self.saw_object(object);
        } else {
            self.max_leaf = self.max_leaf.max(Some(self.cursor.unsigned()?));
        }
        Ok(())
    }

    /// Reads the number of an object that is no leaf: a class, or attributes.
    fn object(&mut self) -> Result<(), ManifestError> {
        let object = self.cursor.unsigned()?;
        self.saw_object(object);
        Ok(())
    }

    fn saw_object(&mut self, object: u64) {
        self.max_object = self.max_object.max(Some(object));
    }

    /// The depth that is left inside an array or object that opens here.
    fn deeper(&mut self, depth: usize) -> Result<usize, ManifestError> {
        depth.checked_sub(1).ok_or(ManifestError::TooDeep { at: self.cursor.at() })
    }

    /// Reads a JSON object of nodes, whose keys must differ.
    fn dict(&mut self, depth: usize) -> Result<(), ManifestError> {
        let depth = self.deeper(depth)?;
        self.cursor.expect(b'{', "an object")?;
        let (mut first, mut keys) = (true, Distinct::default());
        while self.cursor.more(&mut first, b'}')? {
            self.cursor.peek();
            let at = self.cursor.at();
            keys.add(&self.cursor.member()?, at);
            self.node(depth)?;
        }
        // A key that was read once without error can be read again.
        match keys.repeated(|at| self.cursor.back_at(at).string().unwrap_or_default()) {
            Some(at) => Err(ManifestError::DuplicateKey { at }),
            None => Ok(()),
        }
    }

    /// Reads an array whose first element is a letter that says what the node is.
    fn tagged(&mut self, depth: usize) -> Result<(), ManifestError> {
        let depth = self.deeper(depth)?;
        self.cursor.expect(b'[', "an array")?;
        let at = self.cursor.at();
        match &*self.cursor.string()? {
            "l" | "t" => {}
            "n" => {
                self.cursor.expect(b',', "an object's number")?;
                self.object()?;
            }
            "q" => {
                self.cursor.expect(b',', "a deque's length")?;
                if !self.cursor.eat_word("null") {
                    self.cursor.unsigned()?;
                }
            }
            "a" | "f" => {
                self.cursor.expect(b',', "an object's number")?;
                self.object()?;
                self.cursor.expect(b',', "the node that has the attributes")?;
                self.node(depth)?;
                return Ok(self.cursor.expect(b']', "the end of a node with attributes")?);
            }
            "o" => {
                self.cursor.expect(b',', "an OrderedDict's items")?;
                self.dict(depth)?;
                return Ok(self.cursor.expect(b']', "the end of an OrderedDict")?);
            }
            "d" => {
                self.cursor.expect(b',', "a dict's kind")?;
                if !matches!(&*self.cursor.string()?, "d" | "o") {
                    return Err(ManifestError::UnknownNode { at });
                }
                self.cursor.expect(b',', "a dict's items")?;
                self.pairs(depth)?;
                return Ok(self.cursor.expect(b']', "the end of a dict")?);
            }
            _ => return Err(ManifestError::UnknownNode { at }),
        }
        while self.cursor.more(&mut false, b']')? {
            self.node(depth)?;
        }
        Ok(())
    }

    /// Reads an array of pairs of a key and a node; the keys must differ, also as Python compares them.
    fn pairs(&mut self, depth: usize) -> Result<(), ManifestError> {
        let depth = self.deeper(depth)?;
        self.cursor.expect(b'[', "an array of pairs")?;
        let (mut first, mut seen) = (true, HashSet::new());
        while self.cursor.more(&mut first, b']')? {
            let depth = self.deeper(depth)?;
            self.cursor.expect(b'[', "a pair")?;
            let mut key = String::new();
            self.key(&mut key, depth)?;
            if !seen.insert(key) {
                return Err(ManifestError::DuplicateKey { at: self.cursor.at() });
            }
            self.cursor.expect(b',', "a node")?;
            self.node(depth)?;
            self.cursor.expect(b']', "the end of a pair")?;
        }
        Ok(())
    }

    /// Reads a key and writes it to `out` in a normal form: the forms of two keys are equal if the keys are equal in
    /// Python. Objects count as equal here only if they have the same number.
    fn key(&mut self, out: &mut String, depth: usize) -> Result<(), ManifestError> {
        match self.cursor.peek() {
            Some(b'"') => {
                let text = self.cursor.string()?;
                // The length separates neighbouring strings in a tuple: ("ab", "c") is not ("a", "bc").
                let _ = write!(out, "s{}:{text}", text.len());
            }
            Some(b'[') => {
                let depth = self.deeper(depth)?;
                self.cursor.expect(b'[', "an array")?;
                let at = self.cursor.at();
                match &*self.cursor.string()? {
                    "r" => {
                        self.cursor.expect(b',', "an object's number")?;
                        let object = self.cursor.unsigned()?;
                        self.saw_object(object);
                        let _ = write!(out, "r{object};");
                        self.cursor.expect(b']', "the end of a key")?;
                    }
                    "t" => {
                        out.push('(');
                        while self.cursor.more(&mut false, b']')? {
                            self.key(out, depth)?;
                        }
                        out.push(')');
                    }
                    _ => return Err(ManifestError::UnknownNode { at }),
                }
            }
            Some(b't') if self.cursor.eat_word("true") => out.push_str("i1;"),
            Some(b'f') if self.cursor.eat_word("false") => out.push_str("i0;"),
            Some(b'n') if self.cursor.eat_word("null") => out.push('z'),
            _ => {
                let written = self.cursor.number()?;
                let Some(()) = write_number(out, written) else {
                    return Ok(self.cursor.fail("a number that is finite")?);
                };
            }
        }
        Ok(())
    }
}

/// Writes a number so that equal numbers have equal texts: the digits of an integral value, or the shortest digits
/// that identify another one. Returns `None` if the value is beyond what a float can hold.
fn write_number(out: &mut String, written: &str) -> Option<()> {
    let is_integer = written.bytes().all(|b| b == b'-' || b.is_ascii_digit());
    if is_integer {
        let digits = if written == "-0" { "0" } else { written };
        let _ = write!(out, "i{digits};");
        return Some(());
    }
    let value: f64 = written.parse().ok()?;
    if !value.is_finite() {
        return None;
    }
    // All digits are written, since Python compares int and float exactly. Adding zero turns -0 into 0.
    let _ = if value.fract() == 0.0 { write!(out, "i{:.0};", value + 0.0) } else { write!(out, "f{value:?};") };
    Some(())
}
