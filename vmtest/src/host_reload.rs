//! The result of a host reload for each machine: printed on a console by the test that saw it, and kept in a file for a bench.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Result, at};

/// First words of a line with figures.
const MARK: &str = "host-reload-figures ";
/// Environment variable with the path of the file in which the test keeps its figures.
pub const KEEP_IN: &str = "HEARTH_HOST_RELOAD_FIGURES";

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Figures {
    pub machines: Vec<Reloaded>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    pub name: String,
    /// The same guest continued.
    pub resumed: bool,
    /// Its memory did not change: neither what was compared from outside, nor what the guest itself checked.
    pub ram_same: bool,
    pub stood_ms: Option<u64>,
}

impl Figures {
    pub fn all_well(&self) -> bool {
        self.machines.iter().all(|machine| machine.resumed && machine.ram_same)
    }

    /// The figures as one line, to be found among the other lines of a console.
    pub fn line(&self) -> String {
        format!("{MARK}{}", serde_json::to_string(self).expect("figures are plain data"))
    }

    /// Finds the line in a console's text.
    pub fn find(said: &str) -> Option<Self> {
        said.lines().find_map(|line| serde_json::from_str(line.split_once(MARK)?.1.trim()).ok())
    }

    pub fn save(&self, path: &Path) -> Result<()> {
        at("write", path, std::fs::write(path, serde_json::to_vec(self).expect("figures are plain data")))
    }

    /// Reads the file. `None` if it is missing or invalid.
    pub fn load(path: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_in_console_text_and_saved() {
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
