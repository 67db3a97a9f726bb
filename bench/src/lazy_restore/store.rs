//! The sides out of an object store: a real server on loopback, behind a wire of `cloud`'s rate on which each request is under way
//! for some milliseconds.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_vmtest::TestVmBuilder;
use loopback_s3::{BUCKET, S3Server, Wire};

use super::RestoreError;
use crate::host::profile::Profile;

/// The place of these sides, as the others have a profile.
pub const STORE: &str = "store";
/// What a request takes before its answer begins, beside what the server takes: of the order of a store in the same region.
pub const REQUEST: Duration = Duration::from_millis(10);

/// Its objects are in the server's files, which the host may cache: the wire is what is slow.
pub struct Far {
    server: S3Server,
    folder: PathBuf,
}

impl Far {
    /// With what it keeps in a folder of its own in this one.
    pub fn start(parent: &Path) -> Result<Self, RestoreError> {
        let folder = parent.join(STORE);
        let failed = |source| RestoreError::File { path: folder.clone(), source };
        fs::create_dir(&folder).map_err(failed)?;
        let server = S3Server::start_in(&folder);
        let lines = server.environment().into_iter().map(|(key, value)| format!("{key}={value}\n"));
        fs::write(folder.join("s3.env"), lines.collect::<String>()).map_err(failed)?;
        Ok(Self { server, folder })
    }

    /// A machine that can be saved to it.
    pub fn known_to(&self, builder: TestVmBuilder) -> TestVmBuilder {
        let mut section = toml::Table::new();
        section.insert("credentials".to_owned(), self.path("s3.env").into());
        section.insert("folder".to_owned(), self.path("keeper").into());
        builder.setting("object_store", section)
    }

    /// Of the one snapshot there is.
    pub fn address(&self) -> PathBuf {
        format!("s3://{BUCKET}/snapshot").into()
    }

    /// Of `hearth restore` and `hearth working-set`, for somebody who has fetched nothing yet if nobody has used this name.
    pub fn options(&self, cache: &str) -> Vec<String> {
        ["--credentials".to_owned(), self.path("s3.env"), "--cache".to_owned(), self.path(cache)].to_vec()
    }

    /// From now on it is as far away as it is measured at.
    pub fn move_away(&self) {
        if let Some(rate) = Profile::Cloud.rate() {
            self.server.set_wire(Wire::Line { bytes_per_s: rate.bytes_per_second(), request: REQUEST });
        }
    }

    /// Bytes that have come out of it, heads of answers included.
    pub fn answer_bytes(&self) -> u64 {
        self.server.answer_bytes()
    }

    /// What was fetched under this name is not used any more.
    pub fn forget(&self, cache: &str) -> Result<(), RestoreError> {
        let path = self.folder.join(cache);
        fs::remove_dir_all(&path).map_err(|source| RestoreError::File { path, source })
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }
}
