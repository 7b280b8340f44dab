//! Headers that a peer should never send are refused. One test per attack.

use tensorferry_wire::container::{Entry, Header, HeaderError, MAX_HEADER_LEN};
use tensorferry_wire::dtype::Dtype;

/// A header with this JSON behind a correct length prefix.
fn framed(json: impl AsRef<[u8]>) -> Vec<u8> {
    let json = json.as_ref();
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json);
    bytes
}

fn refusal(json: impl AsRef<[u8]>) -> HeaderError {
    Header::decode(&framed(json)).unwrap_err()
}

/// The JSON of a header with one entry of bytes.
fn u8s(name: &str, start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#, end.wrapping_sub(start))
}

fn with_entry(entry: &str) -> HeaderError {
    refusal(format!(r#"{{"a":{entry}}}"#))
}

const VALID: &str = r#"{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}   "#;

#[test]
fn lengths_that_no_header_has() {
    for len in [0, 1, MAX_HEADER_LEN + 1, u64::from(u32::MAX), 1 << 63, u64::MAX - 7, u64::MAX] {
        let error = if len < 2 { HeaderError::TooShort(len) } else { HeaderError::TooLong(len) };
        assert_eq!(Header::total_len(len.to_le_bytes()), Err(error.clone()));
        let mut bytes = framed(VALID);
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        assert_eq!(Header::decode(&bytes), Err(error));
    }
    assert_eq!(
        [2, MAX_HEADER_LEN].map(|len: u64| Header::total_len(len.to_le_bytes())),
        [Ok(10), Ok(MAX_HEADER_LEN + 8)]
    );
}

#[test]
fn truncated_at_every_byte() {
    let bytes = framed(VALID);
    for cut in 0..bytes.len() {
        let need = if cut < 8 { 8 } else { bytes.len() as u64 };
        assert_eq!(Header::decode(&bytes[..cut]), Err(HeaderError::Truncated { have: cut as u64, need }));
    }
    let json = VALID.trim_end();
    for cut in 2..json.len() {
        assert!(matches!(refusal(&json[..cut]), HeaderError::Json(_)), "{}", &json[..cut]);
    }
}

#[test]
fn garbage_after_header_or_json() {
    let mut bytes = framed(VALID);
    bytes.extend_from_slice(b"  ");
    assert_eq!(Header::decode(&bytes), Err(HeaderError::Trailing(2)));
    for tail in ["x", "\0", "\n", "\t", "{}", ",", "    }"] {
        assert!(matches!(refusal(format!("{{}}{tail}")), HeaderError::AfterJson { at: 2 }), "{tail:?}");
    }
    assert!(Header::decode(&framed("{}      ")).is_ok());
}

#[test]
fn bad_utf8() {
    for bad in [&b"\xFF"[..], b"\xC3", b"\xED\xA0\x80", b"\xC0\x80", b"\xF4\x90\x80\x80"] {
        let json = [b"{\"", bad, b"\":{}}"].concat();
        assert_eq!(refusal(json), HeaderError::Utf8 { at: 2 });
    }
}

#[test]
fn json_of_another_shape() {
    let no_size = ["-1", "-0", "1.0", "1e0", "01", "\"1\"", "null", "true", "[1]", "18446744073709551616", "NaN", ""];
    let tables: [(&str, &[&str]); 7] = [
        ("?", &["[]", "null", "12", "\"ab\"", "true", " {}", "\n{}", "\u{feff}{}", "  ", "{1:2}", "{'a':{}}", "{,}"]),
        (r#"{"a":?}"#, &["1", "null", "[\"U8\",[1],[0,1]]", "\"U8\""]),
        (r#"{"__metadata__":?}"#, &["1", "[]", "\"x\"", "{\"a\":1}", "{\"a\":null}", "{\"a\":{}}", "true", "nul"]),
        (r#"{"a":{"dtype":?,"shape":[1],"data_offsets":[0,1]}}"#, &["7", "null", "{\"U8\":null}", "[\"U8\"]"]),
        (r#"{"a":{"dtype":"U8","shape":[1,?],"data_offsets":[0,1]}}"#, &no_size),
        (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,?]}}"#, &no_size),
        (
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":?}}"#,
            &["[]", "[0]", "[0,1,2]", "{}", "0", "[0,1", "[0 1]", "[0,1,]", "[-1,1]", "[1.0,1]"],
        ),
    ];
    for (template, values) in tables {
        for value in values {
            let json = template.replace('?', value);
            assert!(matches!(refusal(&json), HeaderError::Json(_)), "{json}: {}", refusal(&json));
        }
    }
    assert_eq!(Header::decode(&framed("{\"__metadata__\":null}")).unwrap().metadata(), []);
}

#[test]
fn deep_nesting() {
    for open in ["[", "{\"a\":", "[{\"a\":"] {
        let deep = open.repeat(1_000_000);
        assert!(matches!(refusal(&deep), HeaderError::Json(_) | HeaderError::UnknownField { .. }));
        assert!(matches!(with_entry(&deep), HeaderError::Json(_) | HeaderError::UnknownField { .. }));
        let in_shape = format!(r#"{{"dtype":"U8","shape":{deep}"#);
        assert!(matches!(with_entry(&in_shape), HeaderError::Json(_)));
        let in_offsets = format!(r#"{{"dtype":"U8","data_offsets":{deep}"#);
        assert!(matches!(with_entry(&in_offsets), HeaderError::Json(_)));
        assert!(matches!(refusal(format!(r#"{{"__metadata__":{deep}"#)), HeaderError::Json(_)));
    }
}

#[test]
fn duplicates() {
    for other in [u8s("a", 4, 8), u8s("\\u0061", 4, 8), u8s("a", 0, 4)] {
        let twice = refusal(format!("{{{},{other}}}", u8s("a", 0, 4)));
        assert_eq!(twice, HeaderError::DuplicateName { name: "a".into() });
    }
    for (json, key) in [
        (r#"{"__metadata__":{"a":"b"},"__metadata__":{}}"#, "__metadata__"),
        (r#"{"__metadata__":null,"__metadata__":null}"#, "__metadata__"),
        (r#"{"__metadata__":{"a":"b","a":"b"}}"#, "a"),
    ] {
        assert_eq!(refusal(json), HeaderError::DuplicateMetadata { key: key.into() });
    }
}

#[test]
fn fields_unknown_missing_or_twice() {
    let unknown = with_entry(r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1],"stride":[1]}"#);
    assert_eq!(unknown, HeaderError::UnknownField { name: "a".into(), field: "stride".into() });
    let missing = |field| HeaderError::MissingField { name: "a".into(), field };
    assert_eq!(with_entry("{}"), missing("dtype"));
    assert_eq!(with_entry(r#"{"dtype":"U8","data_offsets":[0,1]}"#), missing("shape"));
    assert_eq!(with_entry(r#"{"dtype":"U8","shape":[1]}"#), missing("data_offsets"));
    for (field, value) in [("dtype", "\"U8\""), ("shape", "[1]"), ("data_offsets", "[0,1]")] {
        let twice = with_entry(&format!(r#"{{"{field}":{value},"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#));
        assert_eq!(twice, HeaderError::DuplicateField { name: "a".into(), field });
    }
}

#[test]
fn unknown_dtype() {
    for dtype in ["", "u8", "U8 ", "F128", "U8\\u0000", "__metadata__"] {
        let found = with_entry(&format!(r#"{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,1]}}"#));
        assert!(matches!(found, HeaderError::UnknownDtype { .. }), "{dtype}: {found}");
    }
}

#[test]
fn places_and_sizes_that_cannot_be() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#""b":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let a = || u8s("a", 0, 8);
    let name = || "b".to_owned();
    let overlap = |start| HeaderError::Overlap { name: name(), start, previous: 8 };
    let hole = |start, previous| HeaderError::Hole { name: name(), start, previous };
    let size = |expected, actual| HeaderError::Size { name: name(), expected, actual };
    let partial = || HeaderError::PartialByte { name: name() };
    for (entries, error) in [
        (vec![entry("U8", "[1]", "[1,0]")], HeaderError::Reversed { name: name(), start: 1, end: 0 }),
        (vec![u8s("b", 4, 12), a()], overlap(4)),
        (vec![a(), u8s("b", 2, 3)], overlap(2)),
        (vec![a(), u8s("b", 4, 4)], overlap(4)),
        (vec![a(), u8s("b", 9, 12)], hole(9, 8)),
        // An entry far behind the others leaves a hole, even if it is empty.
        (vec![a(), u8s("b", u64::MAX, u64::MAX)], hole(u64::MAX, 8)),
        (vec![entry("F32", "[2]", "[0,7]")], size(8, 7)),
        (vec![entry("U8", "[]", "[0,0]")], size(1, 0)),
        (vec![entry("F4", "[4]", "[0,4]")], size(2, 4)),
        // Packed types that end within a byte.
        (vec![entry("F4", "[3]", "[0,1]")], partial()),
        (vec![entry("F6_E3M2", "[5]", "[0,1]")], partial()),
    ] {
        assert_eq!(refusal(format!("{{{}}}", entries.join(","))), error);
    }
}

#[test]
fn integer_overflow_in_shape() {
    let shapes =
        ["[4294967296,4294967296]", "[18446744073709551615,2]", "[4611686018427387904]", "[4294967296,4294967296,0]"];
    for shape in shapes {
        let found = with_entry(&format!(r#"{{"dtype":"U8","shape":{shape},"data_offsets":[0,0]}}"#));
        assert_eq!(found, HeaderError::ShapeOverflow { name: "a".into() }, "{shape}");
    }
    // A zero in front keeps the product from overflowing, in safetensors as here.
    let json = r#"{"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}"#;
    assert!(Header::decode(&framed(json)).is_ok());
}

#[test]
fn overflow_in_offsets() {
    let found = with_entry(&format!(r#"{{"dtype":"U8","shape":[1],"data_offsets":[0,{}]}}"#, u64::MAX));
    assert_eq!(found, HeaderError::Size { name: "a".into(), expected: 1, actual: u64::MAX });
    let beyond = with_entry(r#"{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]}"#);
    assert!(matches!(beyond, HeaderError::Json(_)));
    // Entries that are in order, but end beyond every possible file.
    let step = u64::MAX / 8;
    let entries: Vec<_> = (0..5).map(|i| u8s(&i.to_string(), i * step, (i + 1) * step)).collect();
    let long = refusal(format!("{{{}}}", entries.join(",")));
    assert_eq!(long, HeaderError::TooLarge { name: "4".into(), end: 5 * step });
    // Two entries whose lengths add up to more than a u64 can count.
    let half = u64::MAX / 8;
    let wrapping = refusal(format!("{{{},{}}}", u8s("a", 0, half), u8s("b", half, 0)));
    assert!(matches!(wrapping, HeaderError::Hole { .. } | HeaderError::Reversed { .. }), "{wrapping}");
}

#[test]
fn long_names_are_clipped_in_messages() {
    let name = "é".repeat(1_000_000);
    let message = refusal(format!("{{{}}}", u8s(&name, 1, 2))).to_string();
    assert!(message.len() < 400, "{} bytes", message.len());
}

#[test]
fn many_unbalanced_quotes_end_quickly() {
    let json = "{".to_owned() + &"\"\\\"".repeat(2_000_000);
    assert!(matches!(refusal(json), HeaderError::Json(_)));
}

#[test]
fn an_entry_named_like_the_metadata_cannot_be_made() {
    let entry =
        Entry { name: "__metadata__".into(), dtype: Dtype::U8, shape: [1].into_iter().collect(), start: 0, end: 1 };
    assert_eq!(Header::new(Vec::new(), vec![entry]), Err(HeaderError::ReservedName));
}
