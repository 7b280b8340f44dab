//! What the program around the engine adds to counters and status page: a process that serves many shelves, or none,
//! describes itself.
//!
//! It hands over series and tables as data, so that names, labels and cells are checked, escaped and bounded here, as
//! everything else that is shown.

use crate::sync::Locked;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The most series, rows and cells of one, tables, and lines; further ones are not shown.
const MOST: usize = 64;
/// The most characters of a label, and of a text.
const LONGEST_LABEL: usize = 128;
const LONGEST: usize = 240;

/// Figures of the program around a [`crate::Server`], which [`crate::Server::show`] puts onto its pages.
///
/// ```
/// use tensorferry_core::{ProgramFigures, Series, Server, ServerConfig};
///
/// # fn main() -> Result<(), tensorferry_core::Error> {
/// # let runtime = tokio::runtime::Runtime::new().unwrap();
/// let server = Server::bind(&ServerConfig::default(), runtime.handle())?;
/// let held = Series {
///     name: "keeper_snapshots".to_owned(),
///     counts: false,
///     help: "Snapshots that are held.".to_owned(),
///     rows: vec![(vec![("origin".to_owned(), "own".to_owned())], 4.0)],
/// };
/// server.show(ProgramFigures { title: "keeper".to_owned(), series: vec![held], ..ProgramFigures::default() });
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct ProgramFigures {
    /// What the process is: the heading of the status page.
    pub title: String,
    /// Sentences below it, in place of that about the gate.
    pub lines: Vec<String>,
    /// Tables, in place of those about receives.
    pub tables: Vec<ProgramTable>,
    /// Series for scrapers.
    pub series: Vec<Series>,
}

/// A table of the status page.
#[derive(Clone, Debug, Default)]
pub struct ProgramTable {
    /// What stands above it.
    pub heading: String,
    /// The heads of its columns; one that begins with `#` stands above numbers.
    pub heads: Vec<String>,
    /// The cells of each row.
    pub rows: Vec<Vec<String>>,
}

/// A series, `tensorferry_` before its name.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// Its name: small letters and underscores; a series with another name is not shown.
    pub name: String,
    /// Whether it is a counter, whose name ends with `_total`, rather than a gauge, whose name does not. A series with
    /// the other ending is not shown.
    pub counts: bool,
    /// What it means.
    pub help: String,
    /// Labels and value of each row. One with a label whose name is not of small letters and underscores is not shown.
    pub rows: Vec<(Vec<(String, String)>, f64)>,
}

/// The latest figures, and when they were handed over.
#[derive(Debug, Default)]
pub(in crate::server) struct Shown(Mutex<Option<(Instant, Arc<ProgramFigures>)>>);

impl Shown {
    pub(in crate::server) fn show(&self, figures: ProgramFigures) {
        let latest = Some((Instant::now(), Arc::new(figures.bounded())));
        *self.0.locked() = latest;
    }

    /// The latest figures, and their age.
    pub(in crate::server) fn latest(&self) -> Option<(Duration, Arc<ProgramFigures>)> {
        let shown = self.0.locked();
        shown.as_ref().map(|(at, figures)| (at.elapsed(), Arc::clone(figures)))
    }
}

impl ProgramFigures {
    /// The same, with what can be shown and no more.
    fn bounded(mut self) -> Self {
        self.series.retain(|series| is_name(&series.name) && series.counts == series.name.ends_with("_total"));
        self.series.truncate(MOST);
        for series in &mut self.series {
            series.help = printable(&series.help);
            series.rows.retain(|(labels, _)| labels.iter().all(|(name, _)| is_name(name)));
            series.rows.truncate(MOST);
        }
        self.title = printable(&self.title);
        self.lines.truncate(MOST);
        self.tables.truncate(MOST);
        for text in &mut self.lines {
            *text = printable(text);
        }
        for table in &mut self.tables {
            table.heading = printable(&table.heading);
            table.heads.truncate(MOST);
            table.rows.truncate(MOST);
            for row in table.rows.iter_mut().chain([&mut table.heads]) {
                row.truncate(MOST);
                for cell in row {
                    *cell = printable(cell);
                }
            }
        }
        self
    }
}

/// `labels` as a row of a series has them. Of a value, what names, paths and addresses consist of is shown.
pub(in crate::server) fn labels(labels: &[(String, String)]) -> String {
    let mut text = String::new();
    for (name, value) in labels {
        let comma = if text.is_empty() { "" } else { "," };
        let _ = write!(text, "{comma}{name}=\"{}\"", plain(value, LONGEST_LABEL));
    }
    text
}

/// The first characters of `text`, in which everything but names, paths and addresses is a question mark.
pub(in crate::server) fn plain(text: &str, longest: usize) -> String {
    let shown = |c: char| if c.is_ascii_alphanumeric() || ".:-_[]%/".contains(c) { c } else { '?' };
    text.chars().take(longest).map(shown).collect()
}

/// The beginning of `text` in printable ASCII: signs of other scripts can change the order in which a line is shown.
pub(super) fn printable(text: &str) -> String {
    text.chars().take(LONGEST).map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).collect()
}

fn is_name(name: &str) -> bool {
    (1..=LONGEST_LABEL).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_handed_over_can_neither_forge_lines_nor_grow_without_end() {
        let series = |name: &str, counts| Series {
            name: name.to_owned(),
            counts,
            help: "one\nline".to_owned(),
            rows: vec![(vec![("job".to_owned(), "a\"} 7\nb\\".repeat(99))], 1.0); 1000],
        };
        let wide = ProgramTable { rows: vec![vec!["x".repeat(999); 99]; 99], ..ProgramTable::default() };
        let figures = ProgramFigures {
            title: "t\n\u{202e}".repeat(999),
            lines: vec!["<b>".to_owned(); 999],
            tables: [wide].into_iter().chain(std::iter::repeat_n(ProgramTable::default(), 99)).collect(),
            series: [
                series("good", false),
                series("good_total", true),
                series("bad_total", false),
                series("b d", true),
            ]
            .into(),
        };
        let figures = figures.bounded();
        assert_eq!(figures.series.iter().map(|s| &s.name[..]).collect::<Vec<_>>(), ["good", "good_total"]);
        assert_eq!((figures.series[0].rows.len(), &figures.series[0].help[..]), (MOST, "one?line"));
        let shown = labels(&figures.series[0].rows[0].0);
        assert_eq!(&shown[..12], "job=\"a???7?b");
        assert_eq!(shown.len(), "job=\"\"".len() + LONGEST_LABEL);
        assert!(figures.title.len() == LONGEST && figures.title.is_ascii() && !figures.title.contains('\n'));
        let table = &figures.tables[0];
        assert_eq!((figures.tables.len(), table.rows.len(), table.rows[0].len()), (MOST, MOST, MOST));
        assert_eq!(table.rows[0][0].len(), LONGEST);
    }
}
