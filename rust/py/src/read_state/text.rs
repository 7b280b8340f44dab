//! Numbers and text as JSON, faster than formatting writes them.

use std::fmt::Write as _;

/// `value` in decimal digits: `write!` takes several times as long.
pub(super) fn write_number(text: &mut String, value: u64) {
    let (mut digits, mut at, mut rest) = ([b'0'; 20], 20, value);
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    text.push_str(std::str::from_utf8(&digits[at..]).unwrap_or_default());
}

/// `text` as a JSON string in ASCII, as Python's `json` writes it.
pub(super) fn quote(out: &mut String, text: &str) {
    out.push('"');
    if text.bytes().all(|b| matches!(b, b' '..=b'~') && b != b'"' && b != b'\\') {
        out.push_str(text);
    } else {
        for c in text.chars() {
            match c {
                '"' | '\\' => out.extend(['\\', c]),
                ' '..='~' => out.push(c),
                _ => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a string cannot fail.
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
            }
        }
    }
    out.push('"');
}
