//! Tables of a page, and text in which nothing is HTML.

use std::fmt::{self, Display, Write as _};

/// Writes a table of `items`, or the sentence `none`. Heads that begin with `#` stand above numbers. `id`, `heads` and
/// `none` are HTML: the caller escapes what is text.
pub(super) fn table<'a, T: 'a>(
    page: &mut String,
    id: &str,
    heads: &[&str],
    none: &str,
    items: impl IntoIterator<Item = &'a T>,
    fill: impl Fn(&mut TableRow<'_>, &'a T),
) {
    let mut items = items.into_iter().peekable();
    if items.peek().is_none() {
        let _ = writeln!(page, "<p>{none}</p>");
        return;
    }
    let _ = write!(page, "<table id=\"{id}\">\n<tr>");
    for head in heads {
        let _ = match head.strip_prefix('#') {
            Some(head) => write!(page, "<th class=\"n\">{head}</th>"),
            None => write!(page, "<th>{head}</th>"),
        };
    }
    page.push_str("</tr>\n");
    for item in items {
        page.push_str("<tr>");
        fill(&mut TableRow(page), item);
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n");
}

/// A row of a table; every cell is escaped.
pub(super) struct TableRow<'a>(&'a mut String);

impl TableRow<'_> {
    pub(super) fn cell(&mut self, value: impl Display) {
        let _ = write!(self.0, "<td>{}</td>", Escaped(value));
    }

    pub(super) fn classed(&mut self, class: &str, value: impl Display) {
        let _ = write!(self.0, "<td class=\"{class}\">{}</td>", Escaped(value));
    }

    pub(super) fn number(&mut self, value: impl Display) {
        self.classed("n", value);
    }

    /// Writes a cell with a bar and the percentage; an empty one if `total` is 0.
    pub(super) fn progress(&mut self, done: u64, total: u64) {
        let _ = match total {
            0 => write!(self.0, "<td></td>"),
            // Several receivers at one address are counted together, and so may take more than all of it.
            total => {
                let percent = 100.0 * done as f64 / total as f64;
                write!(
                    self.0,
                    "<td><progress max=\"{total}\" value=\"{}\"></progress> {percent:.0} %</td>",
                    done.min(total)
                )
            }
        };
    }
}

/// Text in which nothing is HTML.
pub(super) struct Escaped<T>(pub(super) T);

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(f), "{}", self.0)
    }
}

struct Escaping<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl fmt::Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for sign in text.chars() {
            match sign {
                '&' => self.0.write_str("&amp;")?,
                '<' => self.0.write_str("&lt;")?,
                '>' => self.0.write_str("&gt;")?,
                '"' => self.0.write_str("&quot;")?,
                '\'' => self.0.write_str("&#39;")?,
                other => self.0.write_char(other)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_peers_is_escaped() {
        let hostile = "<script>alert('x')</script>&\"";
        assert_eq!(Escaped(hostile).to_string(), "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&quot;");
    }
}
