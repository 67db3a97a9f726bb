//! `hearth.toml(5)`: the keys of a machine's file, from the table behind `docs/config.md`.

use clap_mangen::roff::{Roff, bold, roman};

use super::{entry, inlines, literal};
use crate::config::{EXAMPLE, Field, OPENING, Section};

const FILES: [(&str, &str); 4] = [
    ("/etc/hearth/NAME.toml", "The machine that `hearth start NAME` and the unit `hearth@NAME` run."),
    ("~/.config/hearth/NAME.toml", "The same for other users than root, in `$XDG_CONFIG_HOME` if that is set."),
    ("FOLDER/machine.toml", "What `hearth restore` and `hearth import` write. Any path works: `hearth run FILE`."),
    ("/usr/share/doc/hearth/docs", "The pages that are named here, such as `crash-recovery.md`."),
];

/// Ends with a newline.
pub fn page() -> String {
    let mut page = Roff::new();
    let version = format!("hearth {}", env!("CARGO_PKG_VERSION"));
    page.control("TH", ["hearth.toml", "5", "", &version, "Hearth"]);
    page.control("SH", ["NAME"]).text([roman("hearth.toml - configuration of a machine of Hearth")]);
    page.control("SH", ["DESCRIPTION"]);
    for paragraph in OPENING {
        page.control("PP", []).text(inlines(paragraph));
    }
    page.control("SH", ["EXAMPLE"]);
    literal(&mut page, EXAMPLE);
    page.control("SH", ["KEYS"]);
    for section in Section::ALL {
        let heading = if section == Section::Machine { "The machine" } else { section.heading() };
        page.control("SS", [heading]).text(inlines(section.meaning()));
        Field::of_section(section).for_each(|field| describe(&mut page, field));
    }
    page.control("SH", ["FILES"]);
    FILES.iter().for_each(|(path, meaning)| entry(&mut page, path, meaning));
    page.control("SH", ["SEE ALSO"]).text([bold("hearth"), roman("(1), "), bold("hearth-check"), roman("(1)")]);
    page.render()
}

fn describe(page: &mut Roff, field: &Field) {
    let takes = inlines(&format!("`{}` ({})", field.key, field.takes()));
    let default =
        if field.default.is_empty() { "Required.".to_owned() } else { format!("Default: {}.", field.default) };
    page.control("TP", []).text(takes).text(inlines(field.meaning)).control("br", []);
    let (example, effect) = (field.example, field.effect.words());
    page.text(inlines(&format!("{default} Example: `{} = {example}`. Takes effect: {effect}.", field.key)));
}
