//! Backend: the client for the protocol of an address's provider, with its settings.
//!
//! Each client is one of `object_store`, and all send their requests through `http`. Providers differ only here and at
//! the completion of an upload (`parts`).

use std::str::FromStr;
use std::sync::Arc;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::multipart::MultipartStore;
use object_store::{ClientOptions, ObjectStore, Result, RetryConfig};

use crate::address::Provider;
use crate::http::Connector;
use crate::{Address, Settings};

/// A client that reads objects and writes them, whole and in parts.
pub(crate) trait Writer: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Writer for T {}

/// The client of a store.
#[derive(Debug)]
pub(crate) enum Backend {
    Whole(Arc<dyn Writer>),
    /// Read-only.
    Readable(Arc<dyn ObjectStore>),
}

impl Backend {
    /// Builds the client; sends no request. Settings for other providers or tools are ignored.
    pub fn build(address: &Address, settings: &Settings, retry: RetryConfig) -> Result<Self> {
        let Address { house, bucket, .. } = address;
        let writer: Arc<dyn Writer> = match house {
            Provider::Amazon => {
                let builder =
                    known(settings).fold(AmazonS3Builder::new(), |all, (key, value)| all.with_config(key, value));
                Arc::new(builder.with_bucket_name(bucket).with_retry(retry).with_http_connector(Connector).build()?)
            }
            Provider::Google => {
                let builder = GoogleCloudStorageBuilder::new();
                let builder = known(settings).fold(builder, |all, (key, value)| all.with_config(key, value));
                Arc::new(builder.with_bucket_name(bucket).with_retry(retry).with_http_connector(Connector).build()?)
            }
            Provider::Azure => {
                let builder = MicrosoftAzureBuilder::new();
                let builder = known(settings).fold(builder, |all, (key, value)| all.with_config(key, value));
                // An `abfs` address contains the account, too.
                let builder = builder.with_url(address.root());
                Arc::new(builder.with_retry(retry).with_http_connector(Connector).build()?)
            }
            Provider::Web => {
                let root = address.root();
                let options = ClientOptions::new().with_allow_http(root.starts_with("http://"));
                let builder = HttpBuilder::new().with_url(root).with_client_options(options);
                let reader = builder.with_retry(retry).with_http_connector(Connector).build()?;
                return Ok(Self::Readable(Arc::new(reader)));
            }
        };
        Ok(Self::Whole(writer))
    }

    /// The store for reading.
    pub fn reader(&self) -> &dyn ObjectStore {
        match self {
            Self::Whole(writer) => &**writer,
            Self::Readable(reader) => &**reader,
        }
    }

    /// The client for writing. None if the store is read-only.
    pub fn writer(&self) -> Option<&Arc<dyn Writer>> {
        match self {
            Self::Whole(writer) => Some(writer),
            Self::Readable(_) => None,
        }
    }
}

/// The settings that this provider knows.
fn known<K: FromStr>(settings: &Settings) -> impl Iterator<Item = (K, &str)> {
    settings.0.iter().filter_map(|(key, value)| Some((key.to_ascii_lowercase().parse().ok()?, value.as_str())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(address: &str, settings: &[(&str, &str)], expect: std::result::Result<bool, &str>) {
        let settings = settings.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let address = Address::parse(address).expect("it is one");
        let built = Backend::build(&address, &Settings(settings), RetryConfig::default());
        match (built, expect) {
            (Ok(backend), Ok(writes)) => assert_eq!(backend.writer().is_some(), writes, "{address}"),
            (Err(error), Err(why)) => assert!(error.to_string().contains(why), "{address}: {error}"),
            (built, _) => panic!("{address}: {built:?}"),
        }
    }

    #[test]
    fn each_provider_uses_only_its_own_settings() {
        let azure = [("AZURE_STORAGE_ACCOUNT_NAME", "me"), ("AZURE_STORAGE_ACCOUNT_KEY", "aGVhcnRo")];
        let all = [&azure[..], &[("AWS_REGION", "eu-central-1"), ("GOOGLE_SKIP_SIGNATURE", "true")]].concat();
        check("s3://b/p", &all, Ok(true));
        check("gs://b/p", &all, Ok(true));
        check("az://c/p", &all, Ok(true));
        check("az://c/p", &[], Err("Account must be specified"));
        check("abfss://c@me.dfs.core.windows.net/p", &azure[1..], Ok(true));
        check("abfss://c@me.example.org/p", &all, Err("me.example.org"));
        check("https://host/p", &[], Ok(false));
        check("http://127.0.0.1:8080/p", &all, Ok(false));
    }
}
