//! Settings: endpoint and credentials, under the names that the providers' tools use.

use std::fmt;
use std::io::Read;
use std::path::Path;

use crate::StoreError;

/// Maximum size of a settings file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Prefixes of the providers' keys.
const HOUSES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

/// Settings such as `AWS_ENDPOINT_URL`, `AZURE_STORAGE_ACCOUNT_NAME` or `GOOGLE_APPLICATION_CREDENTIALS`. `Debug` shows
/// the keys only, because values may be secret.
#[derive(Clone, Default)]
pub struct Settings(pub(crate) Vec<(String, String)>);

impl Settings {
    /// Settings from the environment of this process.
    pub fn from_environment() -> Self {
        let named = |(key, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((key.into_string().ok()?, value.into_string().ok()?)).filter(|(key, _)| is_one(key))
        };
        Self(std::env::vars_os().filter_map(named).collect())
    }

    /// Reads a file with lines of `AWS_KEY=value`, or of another provider. Comments, `export` before a key and quotes
    /// around a value are allowed. An invalid line is reported by its number, without its text.
    pub fn from_file(path: &Path) -> Result<Self, StoreError> {
        let refused = |what: String| StoreError::Settings { path: path.to_owned(), what };
        let mut text = String::new();
        let read = std::fs::File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text));
        read.map_err(|error| refused(format!("cannot be read: {error}")))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(refused("is too long for a file of credentials".to_owned()));
        }
        let mut settings = Vec::new();
        for (number, line) in (1..).zip(text.lines().map(str::trim)) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let line = line.strip_prefix("export ").unwrap_or(line);
            let pair = line.split_once('=').filter(|(key, _)| is_one(key.trim()));
            let (key, value) = pair.ok_or_else(|| {
                refused(format!("line {number} is none of AWS_KEY=value, AZURE_KEY=value, GOOGLE_KEY=value"))
            })?;
            let value = value.trim().trim_matches(['"', '\'']);
            settings.push((key.trim().to_owned(), value.to_owned()));
        }
        Ok(Self(settings))
    }
}

/// Whether a key belongs to a provider.
fn is_one(key: &str) -> bool {
    HOUSES.iter().any(|house| key.starts_with(house))
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(key, _)| key)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_file_is_read_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s3.env");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Settings::from_file(&path)
        };
        let text = "# mine\nexport AWS_ACCESS_KEY_ID=me\n\nAZURE_STORAGE_ACCOUNT_KEY = \"hush=\"\nGOOGLE_BASE_URL=u\n";
        let settings = read(text).unwrap();
        let pairs: Vec<_> = settings.0.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let expect = [("AWS_ACCESS_KEY_ID", "me"), ("AZURE_STORAGE_ACCOUNT_KEY", "hush="), ("GOOGLE_BASE_URL", "u")];
        assert_eq!(pairs, expect);
        assert!(!format!("{settings:?}").contains("hush"));
        let said = read("AWS_REGION=x\nhush").unwrap_err().to_string();
        assert!(said.contains("line 2 is none of AWS_KEY=value") && !said.contains("hush"), "{said}");
        assert!(read(&"#\n".repeat(40_000)).unwrap_err().to_string().contains("too long"));
        let missing = Settings::from_file(&folder.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("none: cannot be read"), "{missing}");
    }
}
