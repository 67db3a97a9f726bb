//! Times as text: RFC 3339, UTC, milliseconds; and back. Forty lines instead of a calendar library.

use std::time::{SystemTime, UNIX_EPOCH};

/// `2026-03-01T12:00:00.123Z`. Times before 1970 (a host without a clock) become 1970.
pub fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs();
    let (year, month, day) = civil_date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", since.subsec_millis())
}

/// Gregorian date of a day counted from 1970-01-01. Years are counted from March, so that the leap day comes last.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

/// Milliseconds since 1970 of a time that `rfc3339` wrote.
pub fn milliseconds_of(text: &str) -> Option<u64> {
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<u64>().ok();
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second, millis) = (number(11, 13)?, number(14, 16)?, number(17, 19)?, number(20, 23)?);
    let whole = text.len() == 24 && text.ends_with('Z') && year >= 1970 && (1..=12).contains(&month) && day >= 1;
    whole.then(|| (((day_of(year, month, day) * 24 + hour) * 60 + minute) * 60 + second) * 1000 + millis)
}

/// The day of a Gregorian date, counted from 1970-01-01.
fn day_of(year: u64, month: u64, day: u64) -> u64 {
    let (year, month_from_march) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, year_of_era) = (year / 400, year % 400);
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn check(millis: u64, expect: &str) {
        assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_millis(millis)), expect);
        assert_eq!(milliseconds_of(expect), Some(millis));
    }

    #[test]
    fn dates_around_leap_days_and_years() {
        check(0, "1970-01-01T00:00:00.000Z");
        check(951_782_399_999, "2000-02-28T23:59:59.999Z");
        check(951_782_400_000, "2000-02-29T00:00:00.000Z");
        check(1_709_251_199_001, "2024-02-29T23:59:59.001Z");
        check(1_735_689_599_000, "2024-12-31T23:59:59.000Z");
        check(4_107_542_400_000, "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn invalid_time_gives_none() {
        for text in
            ["", "2024-02-29", "2024-02-29T23:59:59.001+01:00", "2024-00-29T23:59:59.001Z", "1969-12-31T23:59:59.999Z"]
        {
            assert_eq!(milliseconds_of(text), None, "{text}");
        }
    }

    #[test]
    fn times_before_1970_are_written() {
        assert_eq!(rfc3339(UNIX_EPOCH - Duration::from_secs(5)), "1970-01-01T00:00:00.000Z");
    }
}
