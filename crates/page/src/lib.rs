//! Parts of an HTML report: the page, tables, and plots as SVG. `hearth report`, the demo and the benches are made of them.
//!
//! A page is one file without a script and without references to other files; its policy (CSP) forbids both. It can be read at a
//! phone's width, in print, in light and dark. Text from the caller is escaped here; only the body of a section is HTML.
//!
//! A colour has one meaning on all pages, see [`Run`]: the dead guest and the disk have the colour of a cold reboot, the living
//! guest and memory that of a warm one.

mod frame;
pub mod memory_plot;
mod scale;
pub mod timeline;

pub use frame::{Frame, MARGIN_BOTTOM, MARGIN_TOP};
pub use scale::tick_text;

const STYLE: &str = include_str!("page.css");
/// Hash of `STYLE` between its tags, for the policy. When the style changes, the test `policy_knows_the_style` shows the new one.
const STYLE_HASH: &str = "sha256-6DM/QUk90DgYaTzeldKC5zEd6SRYaejg35Ao/WYKBaY=";
/// Marks a file as a report, in its head.
pub const GENERATOR: &str = "<meta name=\"generator\" content=\"Hearth report\">";

/// A way to reboot, with its name and colour on the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Warm, and the guest brings its file cache back.
    Refill,
    /// From memory.
    Warm,
    /// From the disk.
    Cold,
}

impl Run {
    pub const ALL: [Run; 3] = [Run::Refill, Run::Warm, Run::Cold];

    pub fn word(self) -> &'static str {
        match self {
            Run::Refill => "refill",
            Run::Warm => "warm",
            Run::Cold => "cold",
        }
    }
}

/// A page that is built section by section.
pub struct Page {
    title: String,
    lead: String,
    quick: bool,
    parts: String,
}

impl Page {
    pub fn new(title: &str, lead: &str) -> Self {
        Self { title: title.to_owned(), lead: lead.to_owned(), quick: false, parts: String::new() }
    }

    /// Says at the top that the figures come from a quick run.
    pub fn quick(&mut self, quick: bool) {
        self.quick = quick;
    }

    /// HTML before the first section.
    pub fn head(&mut self, html: &str) {
        self.parts += html;
    }

    /// A section; none if its body is empty. `explanation` is text: what the body shows, and what would be better.
    pub fn section(&mut self, title: &str, explanation: &str, body: &str) {
        if body.is_empty() {
            return;
        }
        let explanation = match explanation {
            "" => String::new(),
            text => format!("<p class=\"hint\">{}</p>", escape(text)),
        };
        self.parts += &format!("<section><h2>{}</h2>{explanation}{body}</section>\n", escape(title));
    }

    /// The whole page. `footer`: what made it, and when.
    pub fn html(&self, footer: &str) -> String {
        let quick = if self.quick { "<p class=\"quick\">A quick run: a look, not a result.</p>" } else { "" };
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n{GENERATOR}\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src '{STYLE_HASH}'; \
             base-uri 'none'; form-action 'none'\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n\
             <body>\n<main>\n<header><h1>{title}</h1>{quick}<p class=\"lead\">{lead}</p></header>\n{parts}\
             <footer>{footer}</footer>\n</main>\n</body>\n</html>\n",
            title = escape(&self.title),
            lead = escape(&self.lead),
            parts = self.parts,
            footer = escape(footer),
        )
    }
}

/// A figure inside a section; empty if its body is. `explanation` is text: what it shows, and what would be better.
pub fn figure(title: &str, explanation: &str, body: &str) -> String {
    if body.is_empty() {
        return String::new();
    }
    format!("<h3>{}</h3><p class=\"hint\">{}</p>{body}", escape(title), escape(explanation))
}

/// Paragraphs of text; empty ones are left out.
pub fn paragraphs<'a>(texts: impl IntoIterator<Item = &'a String>) -> String {
    texts.into_iter().filter(|text| !text.is_empty()).map(|text| format!("<p>{}</p>", escape(text))).collect()
}

/// Text of many lines as it stands, in a box of its own. Empty if there is none.
pub fn preformatted(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("<pre class=\"scroll\">{}</pre>", escape(text)) }
}

/// A table of texts in a box that scrolls where it is wider than the page. Empty if it has no rows.
pub fn table<S: AsRef<str>>(head: &[S], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let heads: String = head.iter().map(|cell| format!("<th>{}</th>", escape(cell.as_ref()))).collect();
    let row = |cells: &Vec<String>| {
        format!("<tr>{}</tr>", cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect::<String>())
    };
    let rows: String = rows.iter().map(row).collect();
    format!("<div class=\"scroll\"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>")
}

/// Escapes text for HTML and its attributes. Control characters, which a guest may print, become visible.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            '\n' | '\t' => escaped.push(letter),
            // Marks that change the direction of the text around them can make it read as something else.
            control if control.is_control() || matches!(control, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') => {
                escaped.push('\u{fffd}');
            }
            letter => escaped.push(letter),
        }
    }
    escaped
}

/// `7.6 ms`, `90 ms`, `7.60 s`, `73.4 s`, `2 min 5 s`, `3 h 20 min`, `2 d 4 h`.
pub fn milliseconds(duration_ms: f64) -> String {
    let seconds = (duration_ms / 1e3) as u64;
    match duration_ms {
        days if days >= 86_400e3 => format!("{} d {} h", seconds / 86_400, seconds / 3600 % 24),
        hours if hours >= 3600e3 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        minutes if minutes >= 120e3 => format!("{} min {} s", seconds / 60, seconds % 60),
        long if long >= 10_000.0 => format!("{:.1} s", long / 1e3),
        long if long >= 1000.0 => format!("{:.2} s", long / 1e3),
        medium if medium >= 10.0 => format!("{medium:.0} ms"),
        short => format!("{short:.1} ms"),
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn policy_knows_the_style() {
        let hash = Sha256::digest(format!("\n{STYLE}"));
        assert_eq!(STYLE_HASH, format!("sha256-{}", STANDARD.encode(hash)));
    }

    #[test]
    fn page_is_complete_and_self_contained() {
        let mut page = Page::new("A <machine> & its cache", "lead");
        page.section("Nothing", "not shown", "");
        page.section("Words", "what <b>it</b> shows", &preformatted("</pre><script>alert(1)</script>"));
        let html = page.html("Hearth <1>");
        assert!(html.starts_with("<!doctype html>") && html.trim_end().ends_with("</html>"));
        for outside in ["http://", "https://", "src=", "<link", "@import", "url(", "<script", "style=", "unsafe"] {
            assert!(!html.contains(outside), "{outside}");
        }
        for part in ["A &lt;machine&gt; &amp; its cache", "&lt;/pre&gt;", "&lt;b&gt;", "Hearth &lt;1&gt;", GENERATOR] {
            assert!(html.contains(part), "{part}");
        }
        assert!(!html.contains("Nothing") && !html.contains("quick run"));
    }

    #[test]
    fn quick_run_is_said_before_the_first_figure() {
        let mut page = Page::new("title", "lead");
        page.quick(true);
        page.section("Figures", "", "<p>1</p>");
        let html = page.html("");
        assert!(html.find("A quick run").unwrap() < html.find("Figures").unwrap());
    }

    #[test]
    fn hostile_text_is_escaped() {
        for (text, expect) in [
            ("<img src=x onerror='alert(1)'>", "&lt;img src=x onerror=&#39;alert(1)&#39;&gt;"),
            ("a\u{1b}[2Jb\u{0}", "a\u{fffd}[2Jb\u{fffd}"),
            ("exe\u{202e}gpj", "exe\u{fffd}gpj"),
            ("two\nlines\t\"&\"", "two\nlines\t&quot;&amp;&quot;"),
        ] {
            assert_eq!(escape(text), expect);
        }
    }

    #[test]
    fn table_scrolls_in_its_box_and_escapes() {
        let html = table(&["a<b"], &[vec!["1 & 2".to_owned()]]);
        assert!(html.starts_with("<div class=\"scroll\"><table>"), "{html}");
        assert!(html.contains("<th>a&lt;b</th>") && html.contains("<td>1 &amp; 2</td>"), "{html}");
        assert_eq!(table(&["a"], &[]), "");
    }

    #[test]
    fn longer_times_have_fewer_decimals() {
        for (ms, text) in [
            (7.61, "7.6 ms"),
            (90.4, "90 ms"),
            (7604.0, "7.60 s"),
            (73_440.0, "73.4 s"),
            (125e3, "2 min 5 s"),
            (12_000e3, "3 h 20 min"),
            (259_201e3, "3 d 0 h"),
        ] {
            assert_eq!(milliseconds(ms), text);
        }
    }
}
