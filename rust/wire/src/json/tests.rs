use proptest::prelude::*;

use super::*;

/// Reads one whole document without looking at its meaning.
fn accepts(text: &str) -> bool {
    let mut cursor = Cursor::new(text);
    cursor.skip(100).is_ok() && cursor.peek().is_none()
}

#[test]
fn grammar_is_that_of_rfc_8259() {
    let good = [
        "null",
        " [ ] ",
        "{\"a\" : [1,-0,0.5,1e9,-1.25E-3,true,false,null] }",
        r#""\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00""#,
        "\t\n\r{}",
    ];
    for text in good {
        assert!(accepts(text), "{text}");
    }
    let documents = [
        "", " ", "nul", "nulll", "[", "]", "[1,]", "[,1]", "[1 2]", "{", "{,}", "{\"a\"}", "{\"a\":}", "{a:1}",
        "{1:1}", "[] []", "// c\n1", "\u{a0}[]", "\u{b}[]",
    ];
    let numbers = ["01", "-01", "+1", ".5", "5.", "1e", "1e+", "- 1", "--1", "NaN", "Infinity", "0x1"];
    let strings = ["\"", "\"\\x\"", "\"\\ud800\"", "\"\n\"", "\"\u{0}\""];
    for text in [&documents[..], &numbers, &strings, &["\u{feff}[]", "\"\\ud800\\u0041\""]].concat() {
        assert!(!accepts(text), "{text}");
    }
}

#[test]
fn objects_repeat_no_key_however_it_is_written() {
    assert!(accepts(r#"{"a":1,"b":{"a":2}}"#));
    assert!(!accepts(r#"{"a":1,"a":2}"#));
    assert!(!accepts(r#"{"a":1,"\u0061":2}"#));
}

#[test]
fn depth_ends_at_its_limit() {
    let nested = |n: usize| "[".repeat(n) + &"]".repeat(n);
    assert!(Cursor::new(&nested(9)).skip(9).is_ok());
    assert!(Cursor::new(&nested(10)).skip(9).is_err());
    assert!(Cursor::new(&"[{\"a\":".repeat(1_000_000)).skip(200).is_err());
}

#[test]
fn numbers_have_bounds() {
    let unsigned = |text: &str| Cursor::new(text).unsigned();
    assert_eq!(unsigned(" 0"), Ok(0));
    assert_eq!(unsigned("18446744073709551615"), Ok(u64::MAX));
    for text in ["18446744073709551616", "99999999999999999999999", "-1", "-0", "00", "01", "1.0", "1e3", "", "x"] {
        assert!(unsigned(text).is_err(), "{text}");
    }
    // Python reads no longer ones.
    assert!(accepts(&"9".repeat(4300)));
    assert!(!accepts(&"9".repeat(4301)));
}

#[test]
fn strings_are_borrowed_unless_escaped() {
    assert!(matches!(Cursor::new("\"käse\"").string(), Ok(Cow::Borrowed("käse"))));
    assert_eq!(Cursor::new(r#""k\u00e4se\ud83d\ude00""#).string().unwrap(), "käse😀");
}

fn value() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<u64>().prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        any::<String>().prop_map(Into::into),
    ];
    leaf.prop_recursive(5, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
            prop::collection::vec((any::<String>(), inner), 0..6)
                .prop_map(|pairs| serde_json::Value::Object(pairs.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn what_serde_json_writes_is_read(value in value(), pretty: bool) {
        let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) };
        let text = text.unwrap();
        prop_assert!(accepts(&text), "{text}");
    }

    #[test]
    fn strings_are_read_as_serde_json_reads_them(text: String) {
        let written = serde_json::to_string(&text).unwrap();
        prop_assert_eq!(Cursor::new(&written).string().unwrap(), text);
    }

    #[test]
    fn what_is_read_serde_json_reads_too(text in r#"[\[\]{}",:\\ 0-9eE.+\-tfnudx]{0,24}"#) {
        if accepts(&text) {
            prop_assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{text}");
        }
    }
}
