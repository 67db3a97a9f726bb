//! Settings: which endpoint, with which credentials, as the tools of AWS name them.

use std::fmt;
use std::io::Read;
use std::path::Path;

use crate::StoreError;

const FILE_BYTES_MAX: u64 = 64 << 10;

/// `AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID` and so on. Never shown: there are secrets among them.
#[derive(Clone, Default)]
pub struct Settings(pub(crate) Vec<(String, String)>);

impl Settings {
    /// Of this process.
    pub fn from_environment() -> Self {
        let named = |(key, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((key.into_string().ok()?, value.into_string().ok()?)).filter(|(key, _)| key.starts_with("AWS_"))
        };
        Self(std::env::vars_os().filter_map(named).collect())
    }

    /// Lines of `AWS_KEY=value`; `export` before one, quotes around the value, and comments may be there. A key that is not for
    /// this is refused by name, and no value is ever told.
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
            let pair = line.split_once('=').filter(|(key, _)| key.trim().starts_with("AWS_"));
            let (key, value) = pair.ok_or_else(|| refused(format!("line {number} is not AWS_KEY=value")))?;
            let value = value.trim().trim_matches(['"', '\'']);
            settings.push((key.trim().to_owned(), value.to_owned()));
        }
        Ok(Self(settings))
    }
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
    fn a_file_of_settings_is_read_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s3.env");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Settings::from_file(&path)
        };
        let settings = read("# mine\nexport AWS_ACCESS_KEY_ID=me\n\nAWS_SECRET_ACCESS_KEY = \"hush=\"\n").unwrap();
        let pairs: Vec<_> = settings.0.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(pairs, [("AWS_ACCESS_KEY_ID", "me"), ("AWS_SECRET_ACCESS_KEY", "hush=")]);
        assert!(!format!("{settings:?}").contains("hush"));
        let said = read("AWS_REGION=x\nhush").unwrap_err().to_string();
        assert!(said.contains("line 2 is not AWS_KEY=value") && !said.contains("hush"), "{said}");
        assert!(read(&"#\n".repeat(40_000)).unwrap_err().to_string().contains("too long"));
        let missing = Settings::from_file(&folder.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("none: cannot be read"), "{missing}");
    }
}
