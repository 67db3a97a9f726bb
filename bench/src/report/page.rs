//! The frame of the page and its texts.

use super::{Line, Report, Run, Series, Tile, paragraphs, throughput, timeline};
use crate::table::escape;

const STYLE: &str = include_str!("page.css");

pub fn render(report: &Report) -> String {
    let parts = [
        tiles(&report.tiles),
        section("Web requests over time", &legend(&report.series), &figure_of(&throughput::draw(&report.series))),
        section("Before and after", "", &table(&report.lines)),
        section("Hearth's part of the outage", "", &timeline::draw(&report.timelines)),
        section("How it was measured", "", &paragraphs(&report.notes)),
    ];
    frame(&report.title, &format!("{} {}", report.lead, report.verdict), &parts.join("\n"), &report.footer)
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

fn legend(series: &[Series]) -> String {
    let item = |series: &Series| {
        let text = match series.run {
            Run::Refill => "warm reboot with refill",
            Run::Warm => "warm reboot",
            Run::Cold => "cold reboot",
        };
        format!("<span class=\"key {}\">{text}</span>", series.run.word())
    };
    format!(
        "<p class=\"legend\">{}<span class=\"hint\">shaded: no service</span></p>",
        series.iter().map(item).collect::<String>()
    )
}

fn tiles(tiles: &[Tile]) -> String {
    let value = |(run, text): &(Run, String)| {
        let word = run.word();
        format!("<span class=\"{word}-text\">{}<small>{word}</small></span>", escape(text))
    };
    let tile = |tile: &Tile| {
        format!(
            "<div class=\"tile\"><div class=\"tile-label\">{}</div><div class=\"tile-figures\">{}</div>\
             <div class=\"tile-note\">{}</div></div>",
            escape(&tile.label),
            tile.values.iter().map(value).collect::<String>(),
            escape(&tile.note)
        )
    };
    if tiles.is_empty() {
        return String::new();
    }
    format!("<div class=\"tiles\">{}</div>", tiles.iter().map(tile).collect::<String>())
}

fn table(lines: &[Line]) -> String {
    let Some(first) = lines.first() else { return String::new() };
    let heading = |(run, _): &(Run, String)| format!("<th class=\"{run}-text\">after {run}</th>", run = run.word());
    let row = |line: &Line| {
        format!(
            "<tr><th>{}</th><td>{}</td>{}</tr>",
            escape(&line.measure),
            escape(&line.before),
            line.values.iter().map(|(_, text)| format!("<td>{}</td>", escape(text))).collect::<String>()
        )
    };
    format!(
        "<div class=\"scroll\"><table><thead><tr><th></th><th>before</th>{}</tr></thead><tbody>{}</tbody></table></div>",
        first.values.iter().map(heading).collect::<String>(),
        lines.iter().map(row).collect::<String>()
    )
}
