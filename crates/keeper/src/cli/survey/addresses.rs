//! Addresses of object stores in what people read: errors and events have them anywhere in their text.

const HIDDEN: &str = "[address]";
/// What ends an address in a text. No address that Hearth uses contains one of these; a space alone does not end it, because a
/// refused one may have that.
const ENDS: [&str; 6] = [": ", "; ", ", ", " (", "\"", "\n"];

/// The text without addresses. Where it is unclear whether an address goes on, that part is hidden, too.
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
    use hearth_store::Address;

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

    #[test]
    fn no_usable_address_has_an_end_within() {
        assert!(Address::parse("s3://bucket/a-b").is_ok());
        for end in ENDS {
            assert!(Address::parse(&format!("s3://bucket/a{end}b")).is_err(), "{end:?}");
        }
    }
}
