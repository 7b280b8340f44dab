//! Valid manifests are accepted, and those that a peer should never send are refused. One test per attack.

use proptest::prelude::*;
use tensorferry_wire::container::{Entry, Header, MANIFEST_ENTRY, PICKLE_ENTRY};
use tensorferry_wire::dtype::Dtype;
use tensorferry_wire::manifest::{MAX_DEPTH, Manifest, ManifestError, Storage, validate};

/// Three plain leaves of 8 bytes (entries 0 to 2), manifest and pickle (3, 4), pieces of storages of 8 bytes (5, 6).
fn header() -> Header {
    let names =
        ["a", "b", "c", MANIFEST_ENTRY, PICKLE_ENTRY, "__tensorferry__/storage/0/0", "__tensorferry__/storage/0/1"];
    let entries = names.iter().zip(0..).map(|(name, i)| Entry {
        name: (*name).into(),
        dtype: Dtype::F32,
        shape: [2].into_iter().collect(),
        start: 8 * i,
        end: 8 * i + 8,
    });
    Header::new(vec![], entries.collect()).unwrap()
}

fn read(json: impl AsRef<[u8]>) -> Result<Manifest, ManifestError> {
    validate(json.as_ref(), &header())
}

fn refusal(json: impl AsRef<[u8]>) -> ManifestError {
    read(json).unwrap_err()
}

/// The range of bytes at which `part` lies in a text.
fn place_of(part: &str, text: &str) -> std::ops::Range<usize> {
    let start = text.find(part).unwrap();
    start..start + part.len()
}

/// A manifest with this tree and two objects.
fn tree(tree: &str) -> String {
    format!(r#"{{"version":1,"tree":{tree},"flags":"","objects":2,"storages":[],"shards":{{}}}}"#)
}

fn flags(flags: &str) -> String {
    format!(r#"{{"version":1,"tree":0,"flags":"{flags}","objects":0,"storages":[]}}"#)
}

fn storages(storages: &str) -> String {
    format!(r#"{{"version":1,"tree":0,"flags":"","objects":0,"storages":{storages}}}"#)
}

const VALID: &str = concat!(
    r#"{"version":1,"tree":{"model":["o",{"w":0,"b":1}],"steps":["d","d",[[0,2],["x",-1]]]},"flags":"013","#,
    r#""objects":1,"storages":[[20,[[5,0],[6,12]]],[0,[]]],"shards":{"model.w":{"global":[4,4]}}}"#
);

#[test]
fn the_valid_one_is_read() {
    let storages = vec![Storage { nbytes: 20, pieces: vec![(5, 0), (6, 12)] }, Storage { nbytes: 0, pieces: vec![] }];
    let tree = place_of(r#"{"model":["o",{"w":0,"b":1}],"steps":["d","d",[[0,2],["x",-1]]]}"#, VALID);
    assert_eq!(read(VALID), Ok(Manifest { version: 1, objects: 1, storages, leaves: 3, tree }));
}

#[test]
fn every_kind_of_node_is_read() {
    let nodes = [
        "0",
        "-1",
        "{}",
        r#"{"":0,"o":{"":1}}"#,
        r#"["o",{"k":0}]"#,
        r#"["l",0,["t"]]"#,
        r#"["t",["l"],-1]"#,
        r#"["d","o",[["a",0],[1,1],[0.5,2],[null,-1],[false,{}],[["r",1],0]]]"#,
        r#"["d","d",[[["t",1,["t","a",["r",0]],null],0],[["t"],1]]]"#,
        r#"["n",0,0,{"a":1}]"#,
        r#"["a",1,["l",0,1,2]]"#,
        r#"["f",1,{"a":0,"b":1,"c":2}]"#,
        r#"["q",null,0,1,2]"#,
        r#"{"\u0061":0,"l":1}"#,
        " [ \"l\" , 0 ,\n1 ] ",
    ];
    for node in nodes {
        assert!(read(tree(node)).is_ok(), "{node}: {}", refusal(tree(node)));
    }
}

#[test]
fn padding_is_read_over() {
    for padding in ["", " ", "\0", "   \0\0\0", "\0 \0 "] {
        assert!(read(format!("{VALID}{padding}")).is_ok(), "{padding:?}");
    }
    assert!(read(format!("  \n{VALID}")).is_ok());
}

#[test]
fn fields_may_come_in_any_order_and_be_more() {
    let reversed = r#"{"new":[{"x":null}],"storages":[],"objects":1,"flags":"000","tree":["l",0,-1],"version":1}"#;
    let tree = place_of(r#"["l",0,-1]"#, reversed);
    assert_eq!(read(reversed), Ok(Manifest { version: 1, objects: 1, storages: vec![], leaves: 3, tree }));
    let spaced = r#"{"version":1,"tree" :  2  ,"flags":"","objects":0,"storages":[]}"#;
    assert_eq!(read(spaced).unwrap().tree, place_of("2", spaced));
}

#[test]
fn other_versions() {
    for found in [0, 2, u64::MAX] {
        let error = refusal(format!(r#"{{"version":{found},"tree":["new grammar"}}"#));
        assert_eq!(error, ManifestError::Version { found });
        assert!(error.to_string().contains("upgrade the older side"), "{error}");
    }
    for version in ["1.0", "\"1\"", "-1", "null", "18446744073709551616"] {
        assert!(matches!(refusal(format!(r#"{{"version":{version}}}"#)), ManifestError::Json(_)), "{version}");
    }
}

#[test]
fn truncated_at_every_byte() {
    for cut in 0..VALID.len() {
        assert!(matches!(refusal(&VALID[..cut]), ManifestError::Json(_)), "{}", &VALID[..cut]);
    }
}

#[test]
fn garbage_after_the_json() {
    for tail in ["x", "{}", ",", "\0\0x", "  }"] {
        let error = refusal(format!("{VALID}{tail}"));
        assert!(matches!(error, ManifestError::AfterJson { .. }), "{tail:?}: {error}");
    }
}

#[test]
fn what_is_no_object_or_no_utf_8() {
    assert_eq!(refusal(b"{\"\xFF\":1}"), ManifestError::Utf8 { at: 2 });
    for json in ["", "[]", "null", "1", "\"version\"", "\0", " ", &tree(r#"{"\ud800":0}"#)] {
        assert!(matches!(refusal(json), ManifestError::Json(_)), "{json:?}");
    }
}

#[test]
fn fields_missing_or_twice() {
    for field in ["version", "tree", "flags", "objects", "storages"] {
        let renamed = VALID.replacen(&format!("\"{field}\":"), "\"other\":", 1);
        let error = if field == "tree" { refusal(renamed.replace("[0,2],", "")) } else { refusal(renamed) };
        assert_eq!(error, ManifestError::MissingField { field });
    }
    for field in
        [r#""version":1"#, r#""tree":0"#, r#""flags":"""#, r#""objects":9"#, r#""storages":[]"#, r#""shards":{}"#]
    {
        let error = refusal(VALID.replacen('{', &format!("{{{field},"), 1));
        assert!(matches!(error, ManifestError::DuplicateField { .. }), "{field}: {error}");
    }
    let unknown = refusal(VALID.replacen('{', r#"{"x":1,"x":1,"#, 1));
    assert_eq!(unknown, ManifestError::DuplicateField { field: "x".into() });
}

#[test]
fn deep_nesting() {
    for (open, close) in [("[\"l\",", "]"), ("{\"a\":", "}"), ("[\"a\",0,", "]"), ("[\"o\",{\"a\":", "}]")] {
        let levels = open.matches(['[', '{']).count();
        let nested = |n: usize| tree(&format!("{}0{}", open.repeat(n), close.repeat(n)));
        let fits = (MAX_DEPTH - 1) / levels;
        assert!(read(nested(fits)).is_ok(), "{open} {fits}");
        assert!(matches!(refusal(nested(fits + 1)), ManifestError::TooDeep { .. }), "{open}");
        assert!(matches!(refusal(tree(&open.repeat(2_000_000))), ManifestError::TooDeep { .. }), "{open}");
    }
    let read_over = VALID.replacen('{', &format!("{{\"x\":{}", "[".repeat(2_000_000)), 1);
    assert!(matches!(refusal(read_over), ManifestError::Json(_)));
    let keys = |n: usize| tree(&format!("[\"d\",\"d\",[[{}1{},0]]]", "[\"t\",".repeat(n), "]".repeat(n)));
    assert!(read(keys(MAX_DEPTH - 4)).is_ok());
    for bomb in [keys(MAX_DEPTH - 3), keys(2_000_000), tree(&"[\"d\",\"d\",[[0,".repeat(1_000_000))] {
        assert!(matches!(refusal(bomb), ManifestError::TooDeep { .. }));
    }
}

#[test]
fn duplicate_keys() {
    let dicts =
        [r#"{"a":0,"a":1}"#, r#"{"a":0,"b":1,"\u0061":2}"#, r#"["o",{"a":0,"a":1}]"#, r#"["l",{"x":{"a":0,"a":1}}]"#];
    for dict in dicts {
        assert!(matches!(refusal(tree(dict)), ManifestError::DuplicateKey { .. }), "{dict}");
    }
    assert!(read(tree(r#"{"a":{"a":0},"b":{"a":0}}"#)).is_ok());
}

#[test]
fn duplicate_keys_as_python_compares_them() {
    let pairs = [
        ("1", "1.0"),
        ("1", "true"),
        ("1e2", "100"),
        ("null", "null"),
        ("\"a\"", r#""\u0061""#),
        (r#"["t",1,"a"]"#, r#"["t",1.0,"a"]"#),
        ("1e22", "10000000000000000000000"),
    ];
    for (one, two) in pairs {
        let error = refusal(tree(&format!(r#"["d","d",[[{one},0],[{two},1]]]"#)));
        assert!(matches!(error, ManifestError::DuplicateKey { .. }), "{one} {two}: {error}");
    }
    let different = [
        ("1", "\"1\""),
        ("0.1", "0.10000000000000002"),
        ("true", "\"true\""),
        (r#"["r",1]"#, "1"),
        (r#"["t",["t",1],2]"#, r#"["t",["t",1,2]]"#),
        // Only the lengths distinguish these.
        (r#"["t","a","b"]"#, r#"["t","asb"]"#),
        (r#"["t","a",["t"]]"#, r#"["t","a()"]"#),
        (r#"["t",12]"#, r#"["t",1,2]"#),
        ("9007199254740993", "9007199254740992.0"),
        (r#"["t",1,"2"]"#, r#"["t","1",2]"#),
    ];
    for (one, two) in different {
        let json = tree(&format!(r#"["d","d",[[{one},0],[{two},1]]]"#));
        assert!(read(&json).is_ok(), "{json}: {}", refusal(&json));
    }
}

#[test]
fn unknown_nodes() {
    let nodes = [r#"[""]"#, r#"["x",0]"#, r#"["r",0]"#, r#"["d","x",[]]"#, r#"["d","d",[[["l",1],0]]]"#];
    for node in nodes {
        assert!(matches!(refusal(tree(node)), ManifestError::UnknownNode { .. }), "{node}: {}", refusal(tree(node)));
    }
}

#[test]
fn malformed_nodes() {
    let scalars =
        ["null", "true", "\"a\"", "1.0", "1e0", "-1.0", "-0", "18446744073709551616", "-18446744073709551616"];
    let lists = ["", "0", "null", "[\"l\"]", "\"l\",null"];
    let objects = ["[]", "{},0", "0"];
    let made = ["", ",-1", ",null,0"];
    let queues = ["", ",-1,0", ",\"5\",0"];
    let dicts = ["", ",\"d\"", ",[]", ",\"d\",[[1,0,0]]"];
    let keys = ["{}", "[]", "[\"r\"]", "[\"r\",-1]", "[\"r\",0,0]", "1e999"];
    let tables: [(&str, &[&str]); 8] = [
        ("?", &scalars),
        ("[?]", &lists),
        (r#"["o",?]"#, &objects),
        (r#"["n"?]"#, &made),
        (r#"["q"?]"#, &queues),
        (r#"["d"?]"#, &dicts),
        (r#"["d","d",[[?,0]]]"#, &keys),
        ("[?]", &["\"o\"", "\"a\",1", "\"f\",1", "\"a\",1,0,1"]),
    ];
    for (template, values) in tables {
        for node in values.iter().map(|value| template.replace('?', value)) {
            assert!(matches!(refusal(tree(&node)), ManifestError::Json(_)), "{node}: {}", refusal(tree(&node)));
        }
    }
}

#[test]
fn leaves_out_of_range() {
    for leaf in [3, 7, u64::MAX] {
        let found = refusal(tree(&format!(r#"{{"a":["l",0,{leaf}]}}"#)));
        assert_eq!(found, ManifestError::Leaf { leaf, leaves: 3 });
    }
    let none = Header::new(vec![], vec![]).unwrap();
    assert_eq!(validate(tree("0").as_bytes(), &none), Err(ManifestError::Leaf { leaf: 0, leaves: 0 }));
    assert!(validate(tree(r#"["l"]"#).as_bytes(), &none).is_ok());
}

#[test]
fn objects_out_of_range() {
    let nodes = ["-3", r#"["n",2]"#, r#"["a",2,0]"#, r#"["d","d",[[["t",["r",2]],0]]]"#];
    for node in nodes {
        assert_eq!(refusal(tree(node)), ManifestError::Object { object: 2, objects: 2 }, "{node}");
    }
    let last = u64::MAX;
    assert_eq!(refusal(tree(&format!("-{last}"))), ManifestError::Object { object: last - 1, objects: 2 });
    assert_eq!(refusal(tree(&format!("[\"n\",{last}]"))), ManifestError::Object { object: last, objects: 2 });
}

#[test]
fn flags_of_the_wrong_number_or_kind() {
    for good in ["", "000", "123"] {
        assert!(read(flags(good)).is_ok(), "{good}");
    }
    for (bad, count) in [("0", 1), ("00", 2), ("0000", 4), ("00é", 4)] {
        assert_eq!(refusal(flags(bad)), ManifestError::FlagCount { flags: count, leaves: 3 });
    }
    for bad in ["004", "00/", "00 ", "00a", "0é"] {
        assert!(matches!(refusal(flags(bad)), ManifestError::Flag { .. }), "{bad}");
    }
    assert_eq!(refusal(flags("0x0")), ManifestError::Flag { leaf: 1 });
}

#[test]
fn leaves_that_no_tensor_can_be() {
    let leaf = |dtype, shape: &[u64], flags: &str| {
        let end = if shape.contains(&0) { 0 } else { 8 };
        let entry = Entry { name: "x".into(), dtype, shape: shape.iter().copied().collect(), start: 0, end };
        let header = Header::new(vec![], vec![entry]).unwrap();
        validate(self::flags(flags).as_bytes(), &header).map(drop)
    };
    for flag in ["2", "3"] {
        assert_eq!(leaf(Dtype::F32, &[2], flag), Ok(()));
        assert_eq!(leaf(Dtype::I64, &[1], flag), Err(ManifestError::Gradient { leaf: 0, dtype: "I64" }));
        assert_eq!(leaf(Dtype::Bool, &[8], flag), Err(ManifestError::Gradient { leaf: 0, dtype: "BOOL" }));
    }
    assert_eq!(leaf(Dtype::I64, &[1], "1"), Ok(()));
    for shape in [&[0, 1 << 62][..], &[0, u64::MAX], &[0, 1 << 31, 1 << 31]] {
        assert_eq!(leaf(Dtype::U8, shape, ""), Err(ManifestError::Shape { leaf: 0 }), "{shape:?}");
    }
    assert_eq!(leaf(Dtype::U8, &[0, 1 << 40], ""), Ok(()));
}

#[test]
fn storages_that_hold() {
    let good = [
        "[[0,[]]]",
        "[[8,[[5,0]]]]",
        "[[16,[[5,8],[6,0]]]]",
        "[[8,[[5,0]]],[9,[[6,1]]]]",
        "[[9223372036854775807,[]]]",
    ];
    for json in good {
        assert!(read(storages(json)).is_ok(), "{json}: {}", refusal(storages(json)));
    }
}

#[test]
fn malformed_storages() {
    for json in [
        "{}",
        "[0]",
        "[[8,0]]",
        "[[8,[[5,0,0]]]]",
        "[[8,[],0]]",
        "[[-1,[]]]",
        "[[8,[[5,-1]]]]",
        "[[8.0,[]]]",
        "[[18446744073709551616,[]]]",
    ] {
        assert!(matches!(refusal(storages(json)), ManifestError::Json(_)), "{json}");
    }
}

#[test]
fn pieces_that_cannot_be() {
    let bounds = |nbytes, lo| ManifestError::PieceBounds { storage: 0, nbytes, lo, len: 8 };
    let overlap = |lo| ManifestError::PieceOverlap { storage: 0, lo };
    let mut cases = vec![
        ("[[100,[[5,0],[6,0]]]]".to_owned(), overlap(0)),
        ("[[100,[[5,0],[6,7]]]]".to_owned(), overlap(7)),
        // The middle piece extends into the last one.
        ("[[100,[[5,0],[6,20],[0,13]]]]".to_owned(), overlap(20)),
        ("[[100,[[5,0],[5,50]]]]".to_owned(), ManifestError::PieceTaken { storage: 0, entry: 5 }),
        ("[[8,[[5,0]]],[8,[[5,0]]]]".to_owned(), ManifestError::PieceTaken { storage: 1, entry: 5 }),
    ];
    // An entry that does not exist, the manifest, the pickle.
    for entry in [7, u64::MAX, 3, 4] {
        cases.push((format!("[[0,[]],[100,[[{entry},0]]]]"), ManifestError::PieceEntry { storage: 1, entry }));
    }
    for (nbytes, lo) in [(7, 0), (8, 1), (16, 9), (0, 0), (8, u64::MAX), (8, u64::MAX - 7)] {
        cases.push((format!("[[{nbytes},[[5,{lo}]]]]"), bounds(nbytes, lo)));
    }
    for (json, error) in cases {
        assert_eq!(refusal(storages(&json)), error, "{json}");
    }
}

#[test]
fn storages_that_overflow() {
    let half = u64::MAX / 4 + 1;
    for json in [
        format!("[[0,[]],[{},[]]]", u64::MAX),
        format!("[[{half},[]],[{half},[]]]"),
        format!("[[1,[]],[{},[]]]", i64::MAX),
    ] {
        assert_eq!(refusal(storages(&json)), ManifestError::StorageOverflow { storage: 1 }, "{json}");
    }
}

proptest! {
    #[test]
    fn what_is_read_is_json(tree in r#"[\[\]{}"ltodna:,0-9.-]{0,16}"#, pieces in r"[\[\],0-9]{0,12}") {
        let json = format!(r#"{{"version":1,"tree":{tree},"flags":"","objects":1,"storages":{pieces}}}"#);
        if read(&json).is_ok() {
            prop_assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok());
        }
    }

}
