//! Readable numbers, aligned columns, and lines that are fit for a terminal.

use plain_text::printable_letter;

/// Lines for a terminal, which parts of them must not control: they may come from guests, QEMUs, or a keeper of another version.
pub fn shown(text: &str) -> String {
    text.chars().map(|letter| if matches!(letter, '\n' | '\t') { letter } else { printable_letter(letter) }).collect()
}

pub use hearth_page::milliseconds;

/// `300.0 MiB`; below a MiB in KiB. GiB have two digits, because a budget of 1.03 GiB is not 1 GiB.
pub fn bytes(bytes: u64) -> String {
    const KIB: f64 = 1024.0;
    let value = bytes as f64;
    match bytes {
        0 => "0".to_owned(),
        1..1_048_576 => format!("{:.0} KiB", (value / KIB).ceil()),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", value / KIB / KIB),
        1_073_741_824..1_099_511_627_776 => format!("{:.2} GiB", value / KIB / KIB / KIB),
        _ => format!("{:.2} TiB", value / KIB / KIB / KIB / KIB),
    }
}

/// `7.6 %`; nothing of nothing is 0.
pub fn percent(part: u64, whole: u64) -> String {
    let percent = if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 };
    format!("{percent:.1} %")
}

/// `12 s`, `1 min 15 s`, `3 h 20 min`, `2 d 4 h`.
pub fn uptime(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// Alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Left,
    Right,
}

/// Rows as lines with aligned columns, two spaces apart, without trailing spaces.
pub fn table(sides: &[Side], rows: &[Vec<String>]) -> Vec<String> {
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..sides.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(sides).zip(&widths).map(|((cell, side), &width)| match side {
            Side::Left => format!("{cell:<width$}"),
            Side::Right => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (value, expect) in [
            (0, "0"),
            (1, "1 KiB"),
            (4096, "4 KiB"),
            (300 << 20, "300.0 MiB"),
            (3 << 29, "1.50 GiB"),
            (2 << 40, "2.00 TiB"),
        ] {
            assert_eq!(bytes(value), expect);
        }
    }

    #[test]
    fn times() {
        assert_eq!([0.4, 75.0, 12_000.0, 200_000.0].map(uptime), ["0 s", "1 min 15 s", "3 h 20 min", "2 d 7 h"]);
    }

    #[test]
    fn shares() {
        assert_eq!(percent(1, 3), "33.3 %");
        assert_eq!(percent(0, 0), "0.0 %");
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["web".into(), "12".into(), "a".into()], vec!["é".into(), "3".into(), String::new()]];
        assert_eq!(table(&[Side::Left, Side::Right, Side::Left], &rows), ["web  12  a", "é     3"]);
    }
}
