//! What a host reload came to, machine by machine: said on a console by whoever saw it, and kept for a bench.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Result, at};

/// What a line with figures begins with.
const MARK: &str = "host-reload-figures ";
/// In the environment of the test that is to keep its figures: the file.
pub const KEEP_IN: &str = "HEARTH_HOST_RELOAD_FIGURES";

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Figures {
    pub machines: Vec<Reloaded>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    pub name: String,
    /// The same guest goes on.
    pub resumed: bool,
    /// All of its memory is as it was, seen from outside; and what it knows of it itself.
    pub ram_same: bool,
    pub stood_ms: Option<u64>,
}

impl Figures {
    pub fn all_well(&self) -> bool {
        self.machines.iter().all(|machine| machine.resumed && machine.ram_same)
    }

    /// For a console on which others speak, too.
    pub fn line(&self) -> String {
        format!("{MARK}{}", serde_json::to_string(self).expect("figures are plain data"))
    }

    /// Out of what was said there.
    pub fn find(said: &str) -> Option<Self> {
        said.lines().find_map(|line| serde_json::from_str(line.split_once(MARK)?.1.trim()).ok())
    }

    pub fn save(&self, path: &Path) -> Result<()> {
        at("write", path, std::fs::write(path, serde_json::to_vec(self).expect("figures are plain data")))
    }

    /// None: there are none, or they are not understood.
    pub fn load(path: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_among_other_words_and_kept() {
        let machine = |name: &str, resumed| Reloaded { name: name.into(), resumed, ram_same: true, stood_ms: None };
        let figures = Figures { machines: vec![machine("a", true), machine("b", true)] };
        let said = format!("running 1 test\r\n[ 3.1] {}\r\ntest ok\r\n", figures.line());
        assert_eq!(Figures::find(&said), Some(figures.clone()));
        assert_eq!(Figures::find("running 1 test"), None);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("figures.json");
        assert_eq!(Figures::load(&path), None);
        figures.save(&path).unwrap();
        assert_eq!(Figures::load(&path), Some(figures.clone()));
        assert!(figures.all_well());
        assert!(!Figures { machines: vec![machine("a", true), machine("b", false)] }.all_well());
    }
}
