//! The demo's page and its texts.

use hearth_page::{Page, escape, paragraphs, timeline};

use super::{Line, Report, Run, Series, Tile, throughput};

pub fn render(report: &Report) -> String {
    let mut page = Page::new(&report.title, format!("{} {}", report.lead, report.verdict).trim());
    page.head(&tiles(&report.tiles));
    page.section(
        "Web requests over time",
        "Requests a second as the client saw them. Better: back at the height from before the crash sooner.",
        &over_time(&report.series),
    );
    page.section(
        "Before and after",
        "The same load after each way to come back. Better: closer to the column \"before\".",
        &table(&report.lines),
    );
    page.section(
        "Hearth's part of the outage",
        "What the keeper did between the old kernel and the new one; the rest of the outage is the guest's own boot. Better: \
         shorter.",
        &timeline::draw(&report.timelines),
    );
    page.section("How it was measured", "", &paragraphs(&report.notes));
    page.html(&report.footer)
}

fn over_time(series: &[Series]) -> String {
    let drawing = throughput::draw(series);
    if drawing.is_empty() { String::new() } else { format!("{}<figure>{drawing}</figure>", legend(series)) }
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
