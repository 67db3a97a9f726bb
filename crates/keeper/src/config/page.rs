//! The page `docs/config.md`, made from the table of fields.

use super::fields::{Field, Section};

const HEAD: &str = "# Configuration

*Generated from the table of fields in `crates/keeper/src/config/file.rs`. Do not edit: `UPDATE=1 cargo test -p hearth
generated` rewrites it. The same as a manual page: `man 5 hearth.toml`.*
";

/// The paragraphs with which this page and hearth.toml(5) begin, in Markdown.
pub const OPENING: [&str; 2] = [
    "A machine is one TOML file. `hearth check FILE` reports everything that is wrong with it. `hearth config FILE` shows it with
all defaults filled in, sizes in bytes and absolute paths; that output is not a machine.toml. Unknown keys are refused.
Relative paths start in the file's folder. Sizes have units of 1024: `512MiB`, `2GiB`.",
    "The keeper reads the file when it starts. If it takes over a running guest, each key says when a change of it takes
effect: *next keeper* (at once, also for this guest), *next guest* (from its next reboot or crash) or *next start* (after
stopping and starting the machine). Until then Hearth saves, dumps and parks the guest with the configuration that it
started with, and `hearth status` shows the key as pending.",
];

/// A small file, complete.
pub const EXAMPLE: &str = "\
name = \"web\"
memory = \"2GiB\"
cpus = 2

[boot]
kernel = \"vmlinuz\"
initrd = \"initrd.img\"
cmdline = \"root=/dev/vda1 console=ttyS0\"

[[disks]]
name = \"root\"
path = \"web.img\"

[[nets]]
kind = \"user\"
forward = [\"127.0.0.1:8080:80\"]
";

/// Markdown. Ends with a newline.
pub fn page() -> String {
    let mut page = HEAD.to_owned();
    OPENING.iter().for_each(|paragraph| page.push_str(&format!("\n{paragraph}\n")));
    page.push_str(&format!("\n```toml\n{EXAMPLE}```\n"));
    for section in Section::ALL {
        let heading = match section {
            Section::Machine => "The machine".to_owned(),
            other => format!("`{}`", other.heading()),
        };
        page.push_str(&format!("\n## {heading}\n\n{}\n\n", section.meaning()));
        page.push_str("| Key | Takes | Default | Meaning | Example | Takes effect |\n|---|---|---|---|---|---|\n");
        for field in Field::of_section(section) {
            page.push_str(&row(field));
        }
    }
    page
}

fn row(field: &Field) -> String {
    let default = if field.default.is_empty() { "**required**" } else { field.default };
    let (key, takes, meaning, example) = (field.key, field.takes(), field.meaning, field.example);
    let from = field.effect.words();
    format!("| `{key}` | {takes} | {default} | {meaning} | `{example}` | {from} |\n")
}
