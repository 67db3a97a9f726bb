//! Addresses of object stores in what people read: errors and events have them anywhere in their text.

const HIDDEN: &str = "[address]";
/// What ends an address in a text. A space alone may be a part of it.
const ENDS: [&str; 6] = [": ", "; ", ", ", " (", "\"", "\n"];

/// The text without addresses. Rather hides too much than a part of an address too little.
pub fn hidden(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(separator) = rest.find("://") {
        let is_of_scheme = |c: &char| c.is_ascii_alphanumeric() || "+-.".contains(*c);
        let scheme_bytes = rest[..separator].chars().rev().take_while(is_of_scheme).count();
        shown.push_str(&rest[..separator - scheme_bytes]);
        shown.push_str(HIDDEN);
        let address = &rest[separator..];
        let end = ENDS.iter().filter_map(|end| address.find(end)).min().unwrap_or(address.len());
        rest = &address[end..];
    }
    shown + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_hidden_wherever_they_are() {
        let check = |text: &str, expect: &str| assert_eq!(hidden(text), expect);
        check("s3://bucket/web 1/memory", "[address]");
        check("saved; the guest paused for 3 ms; s3://bucket/web", "saved; the guest paused for 3 ms; [address]");
        check("restoring from s3://bucket/web (lazy)", "restoring from [address] (lazy)");
        check("http://user:x@h:9/a b: refused; https://h/é: é", "[address]: refused; [address]: é");
        check("copied to /srv/web: 3 GiB", "copied to /srv/web: 3 GiB");
        check("é://", "é[address]");
    }
}
