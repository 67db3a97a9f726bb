//! The page `docs/config.md`, made from the table of fields.

use super::fields::{Field, Section};

const HEAD: &str = "# Configuration

*Generated from the table of fields in `crates/keeper/src/config/fields.rs`. Do not edit: `UPDATE=1 cargo test -p hearth
generated` rewrites it.*

One machine is one TOML file; `hearth check FILE` says everything that is wrong with it, `hearth config FILE` shows what
it means with all defaults filled in, in the keeper's own form (sizes in bytes, paths absolute), which is no machine.toml. Unknown keys are refused. Relative paths start in the folder of the file. Sizes are
written with units of 1024: `512MiB`, `2GiB`.

The keeper reads the file when it starts. If it takes over a guest that lives, the last column of the tables says when a
changed key counts: *next keeper* (at once, for this guest too), *next guest* (from its next reboot or crash on) or *next start*
(when the machine has stopped and is started again). Until then the guest is saved, dumped and parked as what it was started
with, and `hearth status` shows the key as pending.

```toml
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
```
";

/// Markdown. Ends with a newline.
pub fn page() -> String {
    let mut page = HEAD.to_owned();
    for section in Section::ALL {
        let heading = match section {
            Section::Machine => "The machine".to_owned(),
            other => format!("`{}`", other.heading()),
        };
        page.push_str(&format!("\n## {heading}\n\n{}\n\n", section.meaning()));
        page.push_str(
            "| Key | Takes | Default | Meaning | Example | Change counts from |\n|---|---|---|---|---|---|\n",
        );
        for field in Field::of_section(section) {
            page.push_str(&row(field));
        }
    }
    page
}

fn row(field: &Field) -> String {
    let default = if field.default.is_empty() { "**must be given**" } else { field.default };
    let (key, takes, meaning, example) = (field.key, field.takes(), field.meaning, field.example);
    let from = field.effect.words();
    format!("| `{key}` | {takes} | {default} | {meaning} | `{example}` | {from} |\n")
}
