//! Whether the entity tags of a condition match.

use super::OWS;

/// Whether an `If-Match` (or `If-Range`) field matches `etag`, quotes included, by strong comparison: a weak tag on
/// either side matches nothing. `*` matches every tag.
#[must_use]
pub fn etag_matches_strong(header: &str, etag: &str) -> bool {
    is_any(header) || ETags(header).any(|tag| tag == etag && !tag.starts_with("W/"))
}

/// Whether an `If-None-Match` field matches `etag`, quotes included, by weak comparison, which ignores `W/`. `*`
/// matches every tag.
#[must_use]
pub fn etag_matches_weak(header: &str, etag: &str) -> bool {
    is_any(header) || ETags(header).any(|tag| opaque(tag) == opaque(etag))
}

fn opaque(tag: &str) -> &str {
    tag.strip_prefix("W/").unwrap_or(tag)
}

fn is_any(header: &str) -> bool {
    header.trim_matches(OWS) == "*"
}

/// Yields the entity tags of a list, up to the first item that is not an entity tag.
struct ETags<'a>(&'a str);

impl<'a> Iterator for ETags<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let list = self.0.trim_start_matches([' ', '\t', ',']);
        let after_quote = opaque(list).strip_prefix('"')?;
        let end = list.len() - after_quote.len() + after_quote.find('"')? + 1;
        let (tag, rest) = list.split_at(end);
        self.0 = rest;
        Some(tag)
    }
}
