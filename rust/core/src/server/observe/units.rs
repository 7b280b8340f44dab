//! Sizes, rates and times as people read them.

use std::fmt::{self, Display};
use std::time::Duration;

/// A number of bytes in decimal units, as interfaces are rated.
pub(super) struct Size(pub(super) f64);

impl Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0;
        for unit in ["B", "kB", "MB", "GB", "TB"] {
            if value < 1000.0 || unit == "TB" {
                let digits = usize::from(unit != "B" && value < 100.0);
                return write!(f, "{value:.digits$} {unit}");
            }
            value /= 1000.0;
        }
        Ok(())
    }
}

pub(super) struct Rate(pub(super) f64);

impl Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", Size(self.0))
    }
}

/// A length of time with as many digits as matter.
pub(super) struct Time(pub(super) Duration);

impl Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        match seconds {
            0..10 => write!(f, "{:.3} s", self.0.as_secs_f64()),
            10..120 => write!(f, "{seconds} s"),
            120..7200 => write!(f, "{} min", seconds / 60),
            _ => write!(f, "{} h", seconds / 3600),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_have_the_digits_that_matter() {
        let bytes = [0.0, 999.0, 1500.0, 123_456_789.0, 7.5e12].map(|bytes| Size(bytes).to_string());
        assert_eq!(bytes, ["0 B", "999 B", "1.5 kB", "123 MB", "7.5 TB"]);
        let times = [1, 59_000, 600_000, 7_200_000].map(|ms| Time(Duration::from_millis(ms)).to_string());
        assert_eq!(times, ["0.001 s", "59 s", "10 min", "2 h"]);
    }
}
