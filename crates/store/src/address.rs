//! Address: `s3://BUCKET/PREFIX`.

use std::fmt;

use crate::StoreError;

const BUCKET_BYTES_MAX: usize = 63;
/// An object's name may have 1024 bytes, and something follows the prefix.
const PREFIX_BYTES_MAX: usize = 768;

/// A folder of an object store, so to speak: what its objects' names begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub(crate) bucket: String,
    pub(crate) prefix: String,
}

impl Address {
    /// It is meant as one; whether it is right `parse` says. A path of this host has no such mark.
    pub fn is_meant(text: &str) -> bool {
        text.contains("://")
    }

    pub fn parse(text: &str) -> Result<Self, StoreError> {
        let refused = |what| StoreError::Address { text: text.to_owned(), what };
        let rest = text.strip_prefix("s3://").ok_or_else(|| refused("it must begin with s3://"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        let in_bucket = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        if bucket.is_empty() || bucket.len() > BUCKET_BYTES_MAX || !bucket.bytes().all(in_bucket) {
            return Err(refused("after s3:// comes the name of a bucket"));
        }
        if prefix.is_empty() {
            return Err(refused("name a place in the bucket, as s3://BUCKET/snapshots/web"));
        }
        let is_part = |part: &str| !matches!(part, "" | "." | "..");
        if prefix.len() > PREFIX_BYTES_MAX
            || !prefix.split('/').all(is_part)
            || !prefix.bytes().all(|byte| in_bucket(byte) || matches!(byte, b'/' | b'=' | b'+' | b'@'))
        {
            return Err(refused(
                "the place in the bucket is made of letters, digits and . - _ = + @ between single slashes",
            ));
        }
        Ok(Self { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s3://{}/{}", self.bucket, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_bucket_and_a_place_in_it() {
        let check = |text: &str, expect: Option<&str>| {
            let parsed = Address::parse(text).ok().map(|address| address.to_string());
            assert_eq!(parsed.as_deref(), expect, "{text}");
        };
        check("s3://b/p", Some("s3://b/p"));
        check("s3://my.bucket-1/snapshots/web_1/", Some("s3://my.bucket-1/snapshots/web_1"));
        for text in [
            "",
            "s3://",
            "s3://b",
            "s3://b/",
            "s3:///p",
            "gs://b/p",
            "s3://b//p",
            "s3://b/../p",
            "s3://b/a b",
            "s3://b/ä",
        ] {
            check(text, None);
        }
        check(&format!("s3://b/{}", "x".repeat(PREFIX_BYTES_MAX + 1)), None);
        assert!(
            Address::is_meant("gs://b/p") && !Address::is_meant("/srv/snapshots/web") && !Address::is_meant("web:1")
        );
    }
}
