//! Sizes, percentages, times, forwards and hardware addresses as text.

use std::net::{IpAddr, Ipv4Addr};

use super::{DailyWindow, Forward, Protocol};

const SIZE_HINT: &str = "write a number with a unit of 1024: \"512MiB\", \"2GiB\"";

/// Bytes of "512MiB"; K, M, G, T mean the same as the forms with "iB".
pub fn size_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim() {
        "KiB" | "K" => 10,
        "MiB" | "M" => 20,
        "GiB" | "G" => 30,
        "TiB" | "T" => 40,
        "kB" | "KB" | "MB" | "GB" | "TB" => {
            return Err(format!("units of 1000 are not used for memory; {SIZE_HINT}"));
        }
        _ => return Err(SIZE_HINT.to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| SIZE_HINT.to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("too large; {SIZE_HINT}"))
}

/// Bytes of "3%" of the RAM, or of a size.
pub fn slack_bytes(text: &str, ram_bytes: u64) -> Result<u64, String> {
    let Some(percent) = text.trim().strip_suffix('%') else {
        return size_bytes(text).map_err(|hint| format!("{hint}, or percent of the RAM: \"3%\""));
    };
    match percent.trim().parse::<f64>() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok((ram_bytes as f64 * percent / 100.0) as u64),
        _ => Err("write a percentage from \"0%\" to \"100%\"".to_owned()),
    }
}

/// A century, so that a deadline always fits into the clock.
pub const SECONDS_MAX: u64 = 36_525 * 86_400;

/// Seconds of "90s", "15m", "12h", "30d".
pub fn seconds(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|letter: char| !letter.is_ascii_digit())?;
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim() {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor).filter(|seconds| *seconds <= SECONDS_MAX)
}

/// Parses "02:00-05:00". Start and end must differ; for the whole day, omit the key.
pub fn daily_window(text: &str) -> Option<DailyWindow> {
    let (from, to) = text.split_once('-')?;
    let (from_minute, to_minute) = (minute_of_day(from)?, minute_of_day(to)?);
    (from_minute != to_minute).then_some(DailyWindow { from_minute, to_minute })
}

fn minute_of_day(text: &str) -> Option<u32> {
    let (hours, minutes) = text.trim().split_once(':')?;
    let number = |digits: &str| {
        let plain = digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| digits.parse::<u32>().ok())?
    };
    let (hours, minutes) = (number(hours)?, number(minutes)?);
    (hours < 24 && minutes < 60).then_some(hours * 60 + minutes)
}

/// `HOSTIP:PORT:GUESTPORT`, `PORT:GUESTPORT` (then on 127.0.0.1), each with `/udp` or `/tcp`.
pub fn forward(text: &str) -> Option<Forward> {
    let (address, protocol) = match text.rsplit_once('/') {
        Some((address, "udp")) => (address, Protocol::Udp),
        Some((address, "tcp")) => (address, Protocol::Tcp),
        Some(_) => return None,
        None => (text, Protocol::Tcp),
    };
    let (rest, guest_port) = address.rsplit_once(':')?;
    let (host, host_port) = match rest.rsplit_once(':') {
        Some((host, port)) => (host_address(host)?, port),
        None => (IpAddr::V4(Ipv4Addr::LOCALHOST), rest),
    };
    Some(Forward { protocol, host, host_port: port(host_port)?, guest_port: port(guest_port)? })
}

fn host_address(text: &str) -> Option<IpAddr> {
    match text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        Some(v6) => v6.parse().ok().map(IpAddr::V6),
        None => text.parse().ok().map(IpAddr::V4),
    }
}

fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| *port != 0)
}

impl std::fmt::Display for Forward {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let host = std::net::SocketAddr::new(self.host, self.host_port);
        write!(formatter, "{host}:{}", self.guest_port)?;
        if self.protocol == Protocol::Udp { formatter.write_str("/udp") } else { Ok(()) }
    }
}

/// Six pairs of hexadecimal digits, not a group address; in lower case.
pub fn mac(text: &str) -> Option<String> {
    let bytes: Vec<u8> = text.split(':').map(mac_byte).collect::<Option<_>>()?;
    let [first, ..] = bytes[..] else { return None };
    (bytes.len() == 6 && first & 1 == 0).then(|| text.to_ascii_lowercase())
}

fn mac_byte(pair: &str) -> Option<u8> {
    // `from_str_radix` alone would take "+1".
    let digits = pair.len() == 2 && pair.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.then(|| u8::from_str_radix(pair, 16).ok())?
}

/// The same address for the same machine and place in every life: a guest that names its interfaces by address must
/// find them again. FNV-1a, because its values are fixed for good; 52:54:00 is QEMU's own range.
pub fn derived_mac(machine: &str, index: usize) -> String {
    let hash = format!("{machine}/{index}")
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    format!("52:54:00:{:02x}:{:02x}:{:02x}", hash >> 40 & 0xff, hash >> 24 & 0xff, hash & 0xff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, expect) in [("512MiB", 512 << 20), ("2G", 2 << 30), (" 1 TiB ", 1 << 40), ("64K", 64 << 10)] {
            assert_eq!(size_bytes(text), Ok(expect), "{text}");
        }
        for text in ["", "512", "MiB", "-1GiB", "1.5GiB", "2GiBi", "99999999999TiB", "99999999999999999999GiB"] {
            assert!(size_bytes(text).is_err(), "{text}");
        }
        assert_eq!(
            size_bytes("2GB").unwrap_err(),
            "units of 1000 are not used for memory; write a number with a unit of 1024: \"512MiB\", \"2GiB\""
        );
    }

    #[test]
    fn times() {
        for (text, expect) in [("90s", 90), ("15m", 900), (" 12 h ", 43_200), ("30d", 2_592_000)] {
            assert_eq!(seconds(text), Some(expect), "{text}");
        }
        for text in ["", "30", "d", "-1d", "1.5h", "1w", "36526d", "99999999999999999999d", "999999999999999999d"] {
            assert_eq!(seconds(text), None, "{text}");
        }
    }

    #[test]
    fn parts_of_a_day() {
        let window = |from_minute, to_minute| Some(DailyWindow { from_minute, to_minute });
        assert_eq!(daily_window("02:00-05:30"), window(120, 330));
        assert_eq!(daily_window("23:00 - 01:00"), window(1380, 60));
        for text in ["", "02:00", "2:00-5:00", "02:00-24:00", "02:60-03:00", "02:00-02:00", "+2:00-05:00"] {
            assert_eq!(daily_window(text), None, "{text}");
        }
    }

    #[test]
    fn slack_is_a_size_or_percentage() {
        assert_eq!(slack_bytes("3%", 1000), Ok(30));
        assert_eq!(slack_bytes("0.5%", 1000), Ok(5));
        assert_eq!(slack_bytes("16MiB", 1000), Ok(16 << 20));
        for text in ["101%", "-1%", "NaN%", "%", "3"] {
            assert!(slack_bytes(text, 1000).is_err(), "{text}");
        }
    }

    #[test]
    fn forwards_read_back_as_written() {
        for text in ["127.0.0.1:8080:80", "0.0.0.0:53:5353/udp", "[::1]:8080:80"] {
            assert_eq!(forward(text).unwrap().to_string(), text);
        }
        assert_eq!(forward("8080:80/tcp").unwrap().to_string(), "127.0.0.1:8080:80");
        for text in ["", "80", "localhost:8080:80", "::1:8080:80", "127.0.0.1:0:80", "127.0.0.1:80:80/sctp", "1:65536"]
        {
            assert_eq!(forward(text), None, "{text}");
        }
    }

    #[test]
    fn hardware_addresses() {
        assert_eq!(mac("52:54:00:AB:cd:01").as_deref(), Some("52:54:00:ab:cd:01"));
        for text in
            ["", "52:54:00:ab:cd", "53:54:00:ab:cd:01", "52:54:00:ab:cd:1", "52:54:00:ab:cd:0g", "52:54:00:ab:cd:+1"]
        {
            assert_eq!(mac(text), None, "{text}");
        }
        assert_eq!(derived_mac("web", 0), derived_mac("web", 0));
        assert_ne!(derived_mac("web", 0), derived_mac("web", 1));
        assert_ne!(derived_mac("web", 0), derived_mac("wec", 0));
        assert_eq!(mac(&derived_mac("web", 0)), Some(derived_mac("web", 0)));
    }
}
