//! A writer of pickles, protocol 4, for what most objects of a state are: numbers, text, tensors that are views, arrays.
//!
//! The interpreter's own pickler calls back for each object, each number in a shape included, which takes many times as
//! long as writing them. What is not known here the interpreter pickles; its opcodes are put between ours
//! ([`Pickle::splice`]).
//!
//! Both number what they memoize from 0 on. A reader counts all of them, so a spliced pickle's references are
//! translated.

const PROTO_4: [u8; 2] = [0x80, 4];
const FRAME: u8 = 0x95;
const MEMOIZE: u8 = 0x94;
const BINGET: u8 = b'h';
const LONG_BINGET: u8 = b'j';
pub(crate) const MARK: u8 = b'(';
pub(crate) const TUPLE: u8 = b't';
pub(crate) const TUPLE2: u8 = 0x86;
pub(crate) const TUPLE3: u8 = 0x87;
pub(crate) const EMPTY_TUPLE: u8 = b')';
pub(crate) const REDUCE: u8 = b'R';
pub(crate) const BUILD: u8 = b'b';
pub(crate) const BINPERSID: u8 = b'Q';
pub(crate) const NONE: u8 = b'N';
const TRUE: u8 = 0x88;
const FALSE: u8 = 0x89;
pub(crate) const EMPTY_LIST: u8 = b']';
pub(crate) const APPENDS: u8 = b'e';
pub(crate) const EMPTY_DICT: u8 = b'}';
pub(crate) const SETITEMS: u8 = b'u';
pub(crate) const STACK_GLOBAL: u8 = 0x93;
const STOP: u8 = b'.';

/// A reader buffers a frame of about so many bytes at once; without frames it would read opcode by opcode.
const FRAME_BYTES: usize = 64 << 10;
/// Readers hold so many elements of a list, or items of a dict, on their stack, at most.
pub(crate) const BATCH: usize = 1000;

/// A pickle of a list that is being written.
pub(crate) struct Pickle {
    bytes: Vec<u8>,
    /// Where the frame begins that is being filled.
    frame: usize,
    /// What a reader has memoized so far.
    memoized: u32,
    /// What the interpreter calls what it memoized, to what a reader does.
    spliced: Vec<u32>,
    /// Texts that occur again and again, of which there are few.
    texts: Vec<(&'static str, u32)>,
    elements: usize,
}

impl Pickle {
    /// The beginning of a list.
    pub(crate) fn new() -> Self {
        let mut pickle = Self {
            bytes: PROTO_4.to_vec(),
            frame: 0,
            memoized: 0,
            spliced: Vec::new(),
            texts: Vec::new(),
            elements: 0,
        };
        pickle.begin_frame();
        pickle.bytes.push(EMPTY_LIST);
        pickle
    }

    /// To be called before each element of the list.
    pub(crate) fn element(&mut self) {
        if self.elements.is_multiple_of(BATCH) {
            if self.elements > 0 {
                self.bytes.push(APPENDS);
            }
            self.bytes.push(MARK);
        }
        self.elements += 1;
        if self.bytes.len() - self.frame >= FRAME_BYTES {
            self.end_frame();
            self.begin_frame();
        }
    }

    /// The whole pickle.
    pub(crate) fn end(mut self) -> Vec<u8> {
        if self.elements > 0 {
            self.bytes.push(APPENDS);
        }
        self.bytes.push(STOP);
        self.end_frame();
        self.bytes
    }

    fn begin_frame(&mut self) {
        self.bytes.push(FRAME);
        self.bytes.extend([0; 8]);
        self.frame = self.bytes.len();
    }

    fn end_frame(&mut self) {
        let length = (self.bytes.len() - self.frame) as u64;
        self.bytes[self.frame - 8..self.frame].copy_from_slice(&length.to_le_bytes());
    }

    pub(crate) fn op(&mut self, opcode: u8) {
        self.bytes.push(opcode);
    }

    /// Lets a reader memoize what it has just made; returns its number.
    pub(crate) fn memoize(&mut self) -> u32 {
        self.bytes.push(MEMOIZE);
        self.memoized += 1;
        self.memoized - 1
    }

    /// Writes a reference to what was memoized with this number.
    pub(crate) fn get(&mut self, number: u32) {
        if let Ok(short) = u8::try_from(number) {
            self.bytes.extend([BINGET, short]);
        } else {
            self.bytes.push(LONG_BINGET);
            self.bytes.extend(number.to_le_bytes());
        }
    }

    pub(crate) fn boolean(&mut self, value: bool) {
        self.bytes.push(if value { TRUE } else { FALSE });
    }

    /// Writes an integer by the shortest opcode that holds it.
    pub(crate) fn integer(&mut self, value: i64) {
        let bytes = value.to_le_bytes();
        if let Ok(short) = u8::try_from(value) {
            self.bytes.extend([b'K', short]);
        } else if let Ok(short) = u16::try_from(value) {
            self.bytes.push(b'M');
            self.bytes.extend(short.to_le_bytes());
        } else if let Ok(short) = i32::try_from(value) {
            self.bytes.push(b'J');
            self.bytes.extend(short.to_le_bytes());
        } else {
            // Two's complement; a reader takes the last byte's upper bit for the sign.
            self.bytes.extend([0x8a, 8]);
            self.bytes.extend(bytes);
        }
    }

    pub(crate) fn float(&mut self, value: f64) {
        self.bytes.push(b'G');
        self.bytes.extend(value.to_be_bytes());
    }

    /// Writes text. A reader makes a new string of it each time.
    pub(crate) fn text(&mut self, value: &str) {
        self.length_prefixed([0x8c, b'X', 0x8d], value.as_bytes());
    }

    /// Writes text that occurs again and again; a reader makes it once.
    pub(crate) fn constant(&mut self, value: &'static str) {
        if let Some(&(_, number)) = self.texts.iter().find(|(known, _)| *known == value) {
            return self.get(number);
        }
        self.text(value);
        let number = self.memoize();
        self.texts.push((value, number));
    }

    pub(crate) fn binary(&mut self, value: &[u8]) {
        self.length_prefixed([b'C', b'B', 0x8e], value);
    }

    /// Writes an opcode, the length of `value`, and `value`. `opcodes` are those for a length of one, four and eight bytes.
    fn length_prefixed(&mut self, opcodes: [u8; 3], value: &[u8]) {
        let length = value.len();
        if let Ok(short) = u8::try_from(length) {
            self.bytes.extend([opcodes[0], short]);
        } else if let Ok(short) = u32::try_from(length) {
            self.bytes.push(opcodes[1]);
            self.bytes.extend(short.to_le_bytes());
        } else {
            self.bytes.push(opcodes[2]);
            self.bytes.extend((length as u64).to_le_bytes());
        }
        self.bytes.extend_from_slice(value);
    }

    /// Writes a tuple of numbers; `None` if one of them is too large.
    pub(crate) fn numbers(&mut self, values: &[u64]) -> Option<()> {
        if values.len() > 3 {
            self.op(MARK);
        }
        for &value in values {
            self.integer(i64::try_from(value).ok()?);
        }
        self.op(tuple_of(values.len()));
        Some(())
    }

    /// Puts in what the interpreter's pickler wrote for one object. It is always the same pickler, which remembers what
    /// it memoized. `None` for an opcode that is not known here: the pickle is then incomplete and must be dropped.
    pub(crate) fn splice(&mut self, pickle: &[u8]) -> Option<()> {
        let mut rest = pickle;
        loop {
            let (&opcode, after) = rest.split_first()?;
            let length = argument_len(opcode, after)?;
            let (arguments, following) = after.split_at_checked(length)?;
            match opcode {
                // Protocol and frames are those of the whole.
                0x80 | FRAME => {}
                STOP => return Some(()),
                BINGET => self.get(*self.spliced.get(usize::from(arguments[0]))?),
                LONG_BINGET => {
                    let number = u32::from_le_bytes(arguments.try_into().ok()?);
                    self.get(*self.spliced.get(usize::try_from(number).ok()?)?);
                }
                MEMOIZE => {
                    let number = self.memoize();
                    self.spliced.push(number);
                }
                _ => self.bytes.extend_from_slice(&rest[..=length]),
            }
            rest = following;
        }
    }

    /// The number under which a reader of this pickle has memoized the object that `pickle` refers to. `None` if `pickle`,
    /// which the interpreter's pickler wrote for an object that it had written before, is more than a reference.
    pub(crate) fn referenced_by(&self, pickle: &[u8]) -> Option<u32> {
        let start = pickle.iter().position(|&byte| byte == BINGET || byte == LONG_BINGET)?;
        let number = match pickle.get(start..)? {
            [BINGET, number, STOP] => usize::from(*number),
            [LONG_BINGET, a, b, c, d, STOP] => usize::try_from(u32::from_le_bytes([*a, *b, *c, *d])).ok()?,
            _ => return None,
        };
        self.spliced.get(number).copied()
    }
}

/// The opcode that makes a tuple of the last `count` elements; more than three stand behind a mark.
pub(crate) fn tuple_of(count: usize) -> u8 {
    match count {
        0 => EMPTY_TUPLE,
        1 => 0x85,
        2 => TUPLE2,
        3 => TUPLE3,
        _ => TUPLE,
    }
}

/// How many bytes the argument of an opcode has; `after` are the bytes behind the opcode.
fn argument_len(opcode: u8, after: &[u8]) -> Option<usize> {
    let length_prefixed = |width: usize| {
        let mut bytes = [0; 8];
        bytes[..width].copy_from_slice(after.get(..width)?);
        usize::try_from(u64::from_le_bytes(bytes)).ok()?.checked_add(width)
    };
    match opcode {
        b'('
        | b'.'
        | b'0'
        | b'1'
        | b'2'
        | b'Q'
        | b'R'
        | b'N'
        | b'b'
        | b'a'
        | b'e'
        | b'd'
        | b'}'
        | b'l'
        | b']'
        | b's'
        | b'u'
        | b't'
        | b')'
        | b'o'
        | 0x81
        | 0x85..=0x89
        | 0x8f..=0x94 => Some(0),
        b'K' | b'h' | 0x80 => Some(1),
        b'M' => Some(2),
        b'J' | b'j' => Some(4),
        b'G' | FRAME => Some(8),
        b'C' | 0x8a | 0x8c => length_prefixed(1),
        b'B' | b'X' | 0x8b => length_prefixed(4),
        0x8d | 0x8e => length_prefixed(8),
        _ => None,
    }
}
