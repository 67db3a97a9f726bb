//! The frame of the page and its texts.

use super::{Line, Report, Run, Tile, bars, paragraphs, throughput, timeline};
use crate::table::escape;

const STYLE: &str = include_str!("page.css");

pub fn render(report: &Report) -> String {
    let parts = [
        tiles(&report.tiles),
        section("Web requests over time", &legend(), &figure_of(&throughput::draw(&report.series))),
        section("File reads, MiB/s", "", &figure_of(&bars::draw(&report.bars))),
        section("Before and after", "", &table(&report.lines)),
        section("Hearth's part of the outage", "", &timeline::draw(&report.timelines)),
        section("How it was measured", "", &paragraphs(&report.notes)),
    ];
    frame(&report.title, &report.lead, &parts.join("\n"), &report.footer)
}

/// A page that is built section by section.
pub struct Page {
    title: String,
    lead: String,
    parts: String,
}

impl Page {
    pub fn new(title: &str, lead: &str) -> Self {
        Self { title: title.to_owned(), lead: lead.to_owned(), parts: String::new() }
    }

    pub fn section(&mut self, title: &str, body: &str) {
        self.parts += &section(&escape(title), "", body);
    }

    pub fn html(&self, footer: &str) -> String {
        frame(&self.title, &self.lead, &self.parts, footer)
    }
}

fn frame(title: &str, lead: &str, parts: &str, footer: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n<main>\n<header><h1>{title}</h1><p class=\"lead\">{lead}</p></header>\n{parts}\n\
         <footer>{}</footer>\n</main>\n</body>\n</html>\n",
        escape(footer),
        title = escape(title),
        lead = escape(lead),
    )
}

/// A section; empty if it has no data.
fn section(title: &str, before: &str, body: &str) -> String {
    if body.is_empty() { String::new() } else { format!("<section><h2>{title}</h2>{before}{body}</section>") }
}

fn figure_of(drawing: &str) -> String {
    if drawing.is_empty() { String::new() } else { format!("<figure>{drawing}</figure>") }
}

fn legend() -> String {
    let item = |run: Run, text: &str| format!("<span class=\"key {}\">{text}</span>", run.word());
    format!(
        "<p class=\"legend\">{}{}<span class=\"hint\">shaded: no service</span></p>",
        item(Run::Warm, "warm reboot"),
        item(Run::Cold, "cold reboot")
    )
}

fn tiles(tiles: &[Tile]) -> String {
    let tile = |tile: &Tile| {
        format!(
            "<div class=\"tile\"><div class=\"tile-label\">{}</div><div class=\"tile-figures\">\
             <span class=\"warm-text\">{}<small>warm</small></span><span class=\"cold-text\">{}<small>cold</small></span>\
             </div><div class=\"tile-note\">{}</div></div>",
            escape(&tile.label),
            escape(&tile.warm),
            escape(&tile.cold),
            escape(&tile.note)
        )
    };
    if tiles.is_empty() {
        return String::new();
    }
    format!("<div class=\"tiles\">{}</div>", tiles.iter().map(tile).collect::<String>())
}

fn table(lines: &[Line]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let row = |line: &Line| {
        format!(
            "<tr><th>{}</th><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&line.measure),
            escape(&line.before),
            escape(&line.warm),
            escape(&line.cold)
        )
    };
    format!(
        "<div class=\"scroll\"><table><thead><tr><th></th><th>before</th><th class=\"warm-text\">after warm</th>\
         <th class=\"cold-text\">after cold</th></tr></thead><tbody>{}</tbody></table></div>",
        lines.iter().map(row).collect::<String>()
    )
}
