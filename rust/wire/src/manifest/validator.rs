//! The check of a manifest's fields, one after the other.

use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::Range;

use super::{MAX_DEPTH, Manifest, ManifestError, Storage, VERSION};
use crate::container::{Header, MANIFEST_ENTRY, PICKLE_ENTRY};
use crate::json::Cursor;

/// The top-level fields read so far.
#[derive(Default)]
pub(super) struct Fields<'a> {
    version: Option<u32>,
    tree: Option<Range<usize>>,
    flags: Option<Cow<'a, str>>,
    objects: Option<u64>,
    storages: Option<Vec<Storage>>,
}

/// The pass over the text. It remembers the highest leaf and object referred to, which are checked at the end, since
/// the fields may come in any order.
pub(super) struct Validator<'a> {
    pub(super) cursor: Cursor<'a>,
    pub(super) header: &'a Header,
    pub(super) max_leaf: Option<u64>,
    pub(super) max_object: Option<u64>,
}

impl<'a> Validator<'a> {
    /// Reads the manifest's own object to the end of the text.
    pub(super) fn document(&mut self) -> Result<Fields<'a>, ManifestError> {
        let mut fields = Fields::default();
        let mut seen = HashSet::new();
        self.cursor.expect(b'{', "an object")?;
        let mut first = true;
        while self.cursor.more(&mut first, b'}')? {
            let field = self.cursor.member()?;
            match &*field {
                "version" => fields.version = Some(self.version()?),
                "tree" => {
                    self.cursor.peek();
                    let start = self.cursor.at();
                    self.node(MAX_DEPTH - 1)?;
                    fields.tree = Some(start..self.cursor.at());
                }
                "flags" => fields.flags = Some(self.cursor.string()?),
                "objects" => fields.objects = Some(self.cursor.unsigned()?),
                "storages" => fields.storages = Some(self.storages()?),
                _ => self.cursor.skip(MAX_DEPTH - 1)?,
            }
            if let Some(field) = seen.replace(field) {
                return Err(ManifestError::DuplicateField { field: field.chars().take(100).collect() });
            }
        }
        if self.cursor.peek().is_some() {
            return Err(ManifestError::AfterJson { at: self.cursor.at() });
        }
        Ok(fields)
    }

    /// Reads the version. Another one is refused at once, because the fields behind it may have another grammar.
    fn version(&mut self) -> Result<u32, ManifestError> {
        match self.cursor.unsigned()? {
            1 => Ok(VERSION),
            found => Err(ManifestError::Version { found }),
        }
    }

    /// Reads the storages: the size of each, and the entries that hold its pieces.
    fn storages(&mut self) -> Result<Vec<Storage>, ManifestError> {
        let mut storages = Vec::new();
        let mut first = true;
        self.cursor.expect(b'[', "an array of storages")?;
        while self.cursor.more(&mut first, b']')? {
            self.cursor.expect(b'[', "a storage")?;
            let nbytes = self.cursor.unsigned()?;
            self.cursor.expect(b',', "a storage's pieces")?;
            self.cursor.expect(b'[', "a storage's pieces")?;
            let mut pieces = Vec::new();
            let mut first = true;
            while self.cursor.more(&mut first, b']')? {
                self.cursor.expect(b'[', "a piece")?;
                let entry = self.cursor.unsigned()?;
                self.cursor.expect(b',', "a piece's place")?;
                let lo = self.cursor.unsigned()?;
                self.cursor.expect(b']', "the end of a piece")?;
                let known = usize::try_from(entry).ok().filter(|&i| self.is_tensor(i));
                let storage = storages.len();
                pieces.push((known.ok_or(ManifestError::PieceEntry { storage, entry })?, lo));
            }
            self.cursor.expect(b']', "the end of a storage")?;
            storages.push(Storage { nbytes, pieces });
        }
        Ok(storages)
    }

    fn is_tensor(&self, entry: usize) -> bool {
        self.header.entries().get(entry).is_some_and(|e| e.name != MANIFEST_ENTRY && e.name != PICKLE_ENTRY)
    }

    /// Checks the fields against one another and against the header; returns the manifest.
    pub(super) fn check(&self, fields: Fields<'_>) -> Result<Manifest, ManifestError> {
        let missing = |field| ManifestError::MissingField { field };
        let version = fields.version.ok_or_else(|| missing("version"))?;
        let tree = fields.tree.ok_or_else(|| missing("tree"))?;
        let flags = fields.flags.ok_or_else(|| missing("flags"))?;
        let objects = fields.objects.ok_or_else(|| missing("objects"))?;
        let storages = fields.storages.ok_or_else(|| missing("storages"))?;

        let leaves = self.header.entries().iter().filter(|entry| entry.is_plain()).count() as u64;
        if let Some(leaf) = self.max_leaf.filter(|&leaf| leaf >= leaves) {
            return Err(ManifestError::Leaf { leaf, leaves });
        }
        if let Some(object) = self.max_object.filter(|&object| object >= objects) {
            return Err(ManifestError::Object { object, objects });
        }
        if !flags.is_empty() && flags.len() as u64 != leaves {
            return Err(ManifestError::FlagCount { flags: flags.len() as u64, leaves });
        }
        if let Some(leaf) = flags.bytes().position(|flag| !(b'0'..=b'3').contains(&flag)) {
            return Err(ManifestError::Flag { leaf });
        }
        self.check_leaves(flags.as_bytes())?;
        self.check_storages(&storages)?;
        Ok(Manifest { version, objects, storages, leaves, tree })
    }

    /// Checks that a tensor can be made of each plain leaf, with its flags.
    fn check_leaves(&self, flags: &[u8]) -> Result<(), ManifestError> {
        for (leaf, entry) in self.header.entries().iter().filter(|entry| entry.is_plain()).enumerate() {
            // torch computes strides as if a dimension without elements had one.
            let most = entry.shape.iter().try_fold(entry.dtype.bits(), |n, &dim| n.checked_mul(dim.max(1)));
            if most.is_none_or(|bits| i64::try_from(bits).is_err()) {
                return Err(ManifestError::Shape { leaf });
            }
            if flags.get(leaf).is_some_and(|flag| (flag - b'0') & 2 != 0) && !entry.dtype.has_gradient() {
                return Err(ManifestError::Gradient { leaf, dtype: entry.dtype.name() });
            }
        }
        Ok(())
    }

    fn check_storages(&self, storages: &[Storage]) -> Result<(), ManifestError> {
        let entries = self.header.entries();
        let mut taken = HashSet::new();
        let mut total = 0u64;
        for (storage, Storage { nbytes, pieces }) in storages.iter().enumerate() {
            let nbytes = *nbytes;
            total = total
                .checked_add(nbytes)
                .filter(|&total| i64::try_from(total).is_ok())
                .ok_or(ManifestError::StorageOverflow { storage })?;
            let mut spans = Vec::with_capacity(pieces.len());
            for &(entry, lo) in pieces {
                if !taken.insert(entry) {
                    return Err(ManifestError::PieceTaken { storage, entry: entry as u64 });
                }
                let len = entries[entry].nbytes();
                let end = lo.checked_add(len).filter(|&end| end <= nbytes);
                spans.push((lo, end.ok_or(ManifestError::PieceBounds { storage, nbytes, lo, len })?));
            }
            spans.sort_unstable();
            if let Some(two) = spans.windows(2).find(|two| two[1].0 < two[0].1) {
                return Err(ManifestError::PieceOverlap { storage, lo: two[1].0 });
            }
        }
        Ok(())
    }
}
