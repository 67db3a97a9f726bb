//! Seed: the small disk from which cloud-init takes a new guest's name and login (NoCloud: a FAT file system labelled `cidata`).
//!
//! ```text
//! meta-data   instance-id, local-hostname
//! user-data   the user hearth, with these keys and no password
//! ```
//! cloud-init reads it at each boot, and acts on it once: on an instance-id that it does not know yet.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions};
use hearth_recovery::random;

/// Name of the user that can log in.
pub const USER: &str = "hearth";
/// More than enough for two small files.
const BYTES: u64 = 1 << 20;
const LABEL: [u8; 11] = *b"cidata     ";
/// How a public key begins.
const KINDS: [&str; 3] = ["ssh-", "ecdsa-", "sk-"];

/// The public keys in a file of OpenSSH. The error says what else the file is.
pub fn read_keys(path: &Path) -> io::Result<Result<Vec<String>, &'static str>> {
    Ok(keys(&fs::read_to_string(path)?))
}

fn keys(text: &str) -> Result<Vec<String>, &'static str> {
    if text.contains("PRIVATE KEY") {
        return Err("is a private key; give the public one, whose name ends in .pub");
    }
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<_> = lines.map(str::to_owned).collect();
    let is_key = |key: &String| KINDS.iter().any(|kind| key.starts_with(kind)) && key.split_whitespace().count() > 1;
    match !keys.is_empty() && keys.iter().all(is_key) {
        true => Ok(keys),
        false => Err("is not a public key of OpenSSH; `ssh-keygen` makes one, and its public part ends in .pub"),
    }
}

/// Makes an empty file the disk of the machine `name`.
pub fn write(mut file: File, name: &str, keys: &[String]) -> io::Result<()> {
    file.set_len(BYTES)?;
    fatfs::format_volume(&mut file, FormatVolumeOptions::new().volume_label(LABEL))?;
    let volume = FileSystem::new(&mut file, FsOptions::new())?;
    for (file, text) in [("meta-data", meta_data(name)), ("user-data", user_data(keys))] {
        volume.root_dir().create_file(file)?.write_all(text.as_bytes())?;
    }
    volume.unmount()?;
    file.sync_all()
}

/// JSON's strings are YAML's, too. Without quotes YAML reads the name `no` as false, and `123` as a number.
fn meta_data(name: &str) -> String {
    let number = u64::from_le_bytes(random::bytes());
    let [id, name] = [format!("{name}-{number:016x}"), name.to_owned()].map(serde_json::Value::from);
    format!("instance-id: {id}\nlocal-hostname: {name}\n")
}

fn user_data(keys: &[String]) -> String {
    let mut text = format!("#cloud-config\nuser:\n  name: {USER}\nssh_authorized_keys:\n");
    for key in keys {
        let _ = writeln!(text, "  - {}", serde_json::Value::from(key.as_str()));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn seed_holds_name_and_key_under_cloud_inits_label() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("seed.img");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        write(file, "no", &["ssh-ed25519 AAAA \"me\"".to_owned()]).unwrap();
        let mut file = File::options().read(true).write(true).open(&path).unwrap();
        let volume = FileSystem::new(&mut file, FsOptions::new()).unwrap();
        assert_eq!(volume.volume_label_as_bytes(), b"cidata");
        let read = |name: &str| {
            let mut text = String::new();
            volume.root_dir().open_file(name).unwrap().read_to_string(&mut text).unwrap();
            text
        };
        let user = "#cloud-config\nuser:\n  name: hearth\nssh_authorized_keys:\n  - \"ssh-ed25519 AAAA \\\"me\\\"\"\n";
        assert_eq!(read("user-data"), user);
        let meta = read("meta-data");
        assert!(meta.starts_with("instance-id: \"no-") && meta.ends_with("\"\nlocal-hostname: \"no\"\n"), "{meta}");
    }

    #[test]
    fn only_public_keys_are_taken() {
        let check = |text: &str, expect: Result<usize, &str>| {
            let found = keys(text);
            let matches = match (&found, expect) {
                (Ok(keys), Ok(count)) => keys.len() == count,
                (Err(why), Err(expect)) => why.contains(expect),
                _ => false,
            };
            assert!(matches, "{text:?}: {found:?}");
        };
        check("ssh-ed25519 AAAA me@host\n", Ok(1));
        check("# two\nssh-rsa AAAA\n\nsk-ssh-ed25519@openssh.com AAAA me\n", Ok(2));
        check("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n", Err("is a private key"));
        check("", Err("is not a public key"));
        check("ssh-ed25519", Err("is not a public key"));
        check("name = \"web\"\n", Err("is not a public key"));
    }
}
