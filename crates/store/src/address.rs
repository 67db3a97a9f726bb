//! Address: `s3://BUCKET/PREFIX`, and the equivalents of the other providers.

use std::fmt;

use crate::StoreError;

/// Maximum length of a host name. Buckets and containers have 63 bytes at most; their store checks that.
const BUCKET_BYTES_MAX: usize = 253;
/// An object's name may have 1024 bytes; the rest is for what follows the prefix.
const PREFIX_BYTES_MAX: usize = 768;

/// Provider of a store, which decides the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Provider {
    Amazon,
    Google,
    Azure,
    /// Any web server that supports ranges; read-only.
    Web,
}

const SCHEMES: [(&str, Provider); 7] = [
    ("s3", Provider::Amazon),
    ("gs", Provider::Google),
    ("az", Provider::Azure),
    ("abfs", Provider::Azure),
    ("abfss", Provider::Azure),
    ("https", Provider::Web),
    ("http", Provider::Web),
];
const KNOWN: &str = "it must begin with s3://, gs://, az://, abfs://, abfss://, https:// or http://";

/// Hides user and password in a URL, so that it can be shown.
pub fn shown(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let host_ends = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    match rest[..host_ends].rfind('@') {
        Some(at) if scheme.starts_with("http") || rest[..at].contains(':') => format!("{scheme}://***{}", &rest[at..]),
        _ => url.to_owned(),
    }
}

/// A prefix in an object store: the common beginning of its objects' names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub(crate) house: Provider,
    scheme: &'static str,
    /// Azure: container, for `abfs` with `@ACCOUNT.dfs.core.windows.net`. Web server: host and port.
    pub(crate) bucket: String,
    pub(crate) prefix: String,
}

impl Address {
    /// Whether a text is meant as an address and not as a path of this host. `parse` tells whether it is valid.
    pub fn is_meant(text: &str) -> bool {
        text.contains("://")
    }

    /// Parses an address. An error shows neither user nor password.
    pub fn parse(text: &str) -> Result<Self, StoreError> {
        let refused = |what| StoreError::Address { text: shown(text), what };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| refused(KNOWN))?;
        let known = SCHEMES.into_iter().find(|(name, _)| *name == scheme);
        let (scheme, house) = known.ok_or_else(|| refused(KNOWN))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        let in_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        let in_bucket = |byte: u8| match byte {
            b'@' => house == Provider::Azure,
            b':' | b'[' | b']' => house == Provider::Web,
            _ => in_name(byte),
        };
        if bucket.is_empty() || bucket.len() > BUCKET_BYTES_MAX || !bucket.bytes().all(in_bucket) {
            return Err(refused("after :// comes the name of a bucket or container, or of a web server"));
        }
        if prefix.is_empty() {
            return Err(refused("name a place in the bucket, as s3://BUCKET/snapshots/web"));
        }
        let is_part = |part: &str| !matches!(part, "" | "." | "..");
        if prefix.len() > PREFIX_BYTES_MAX
            || !prefix.split('/').all(is_part)
            || !prefix.bytes().all(|byte| in_name(byte) || matches!(byte, b'/' | b'=' | b'+' | b'@'))
        {
            return Err(refused(
                "the place in the bucket is made of letters, digits and . - _ = + @ between single slashes",
            ));
        }
        Ok(Self { house, scheme, bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }

    /// The address without its prefix.
    pub(crate) fn root(&self) -> String {
        format!("{}://{}", self.scheme, self.bucket)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.root(), self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_not_shown() {
        for (url, expect) in [
            ("https://host/base", "https://host/base"),
            ("https://me:hush@host:8443/base", "https://***@host:8443/base"),
            ("http://token@host", "http://***@host"),
            ("https://me:hu@sh@host/a@b", "https://***@host/a@b"),
            ("s3://me:hush@bucket/p", "s3://***@bucket/p"),
            ("abfss://container@account.dfs.core.windows.net/p", "abfss://container@account.dfs.core.windows.net/p"),
            ("nothing", "nothing"),
        ] {
            assert_eq!(shown(url), expect);
        }
        let refused = Address::parse("https://me:hush@host/p").expect_err("it has a user").to_string();
        assert!(refused.contains("https://***@host/p") && !refused.contains("hush"), "{refused}");
    }

    #[test]
    fn address_is_a_bucket_and_a_prefix() {
        let check = |text: &str, expect: Option<&str>| {
            let parsed = Address::parse(text).ok().map(|address| address.to_string());
            assert_eq!(parsed.as_deref(), expect, "{text}");
        };
        check("s3://b/p", Some("s3://b/p"));
        check("s3://my.bucket-1/snapshots/web_1/", Some("s3://my.bucket-1/snapshots/web_1"));
        check("https://[::1]:8443/p", Some("https://[::1]:8443/p"));
        for text in [
            "",
            "s3://",
            "s3://b",
            "s3://b/",
            "s3:///p",
            "S3://b/p",
            "ftp://b/p",
            "s3://b//p",
            "s3://b/../p",
            "s3://b/a b",
            "s3://b/ä",
            "s3://b:1/p",
            "gs://user@b/p",
            "https://user@host/p",
        ] {
            check(text, None);
        }
        check(&format!("s3://b/{}", "x".repeat(PREFIX_BYTES_MAX + 1)), None);
        assert!(
            Address::is_meant("gs://b/p") && !Address::is_meant("/srv/snapshots/web") && !Address::is_meant("web:1")
        );
    }

    #[test]
    fn schemes_select_providers_and_errors_list_them() {
        let check = |text: &str, house| assert_eq!(Address::parse(text).expect(text).house, house, "{text}");
        check("s3://b/p", Provider::Amazon);
        check("gs://b/p", Provider::Google);
        check("az://container/p", Provider::Azure);
        check("abfs://container/p", Provider::Azure);
        check("abfss://container@account.dfs.core.windows.net/p", Provider::Azure);
        check("https://host/p", Provider::Web);
        check("http://127.0.0.1:8080/p", Provider::Web);
        let refused = Address::parse("ftp://b/p").expect_err("nobody knows it").to_string();
        for (scheme, _) in SCHEMES {
            assert!(refused.contains(&format!(" {scheme}://")), "{scheme} in {refused}");
        }
    }
}
