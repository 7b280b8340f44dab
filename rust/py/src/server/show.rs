//! What a program in Python says of itself, as the engine takes it.

use tensorferry_core::{ProgramFigures, ProgramTable, Series};

/// Heading, heads of columns, and the cells of each row.
pub(super) type GivenTable = (String, Vec<String>, Vec<Vec<String>>);
/// Name, whether it is a counter, what it means, and the labels and the value of each row.
pub(super) type GivenSeries = (String, bool, String, Vec<(Vec<(String, String)>, f64)>);

/// The figures that consist of these.
pub(super) fn given(
    title: String,
    lines: Vec<String>,
    tables: Vec<GivenTable>,
    series: Vec<GivenSeries>,
) -> ProgramFigures {
    let tables = tables.into_iter().map(|(heading, heads, rows)| ProgramTable { heading, heads, rows });
    let series = series.into_iter().map(|(name, counts, help, rows)| Series { name, counts, help, rows });
    ProgramFigures { title, lines, tables: tables.collect(), series: series.collect() }
}
