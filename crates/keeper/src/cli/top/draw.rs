//! The screen: a table of all machines, or one machine with its disks, commands and events.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Row, Table, TableState, Wrap};

use super::Screen;
use crate::cli::survey::{Disk, MachineView, Memory, Tone, View};
use crate::cli::text::bytes;

/// Cells of the bar that shows the budget.
const BAR_CELLS: u64 = 10;

pub fn draw(frame: &mut Frame<'_>, view: &View, screen: Screen) {
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)]).areas(frame.area());
    frame.render_widget(Line::from(summary(view)).style(Modifier::BOLD), head);
    let chosen = view.machines.get(screen.chosen).filter(|_| screen.open);
    let keys = match chosen {
        Some(machine) => {
            frame.render_widget(Paragraph::new(page(machine)).wrap(Wrap { trim: false }), body);
            "Esc back  ↑↓ another machine  q end"
        }
        None => {
            let mut state = TableState::default().with_selected(Some(screen.chosen));
            frame.render_stateful_widget(table(view, frame.area().width), body, &mut state);
            "↑↓ choose  Enter more  q end"
        }
    };
    frame.render_widget(Line::from(keys).style(Modifier::DIM), foot);
}

fn summary(view: &View) -> String {
    let count = |is: fn(&&MachineView) -> bool| view.machines.iter().filter(is).count();
    let bad = match count(|machine| machine.tone == Tone::Bad) {
        0 => String::new(),
        bad => format!(", {bad} need you"),
    };
    let time = view.taken_at.get(..19).unwrap_or_default();
    format!("{} machines, {} running{bad}  {time} UTC", view.machines.len(), count(|machine| machine.runs))
}

/// In a narrow terminal, name, state and what goes on are left.
fn table(view: &View, width: u16) -> Table<'_> {
    let is_wide = width >= 80;
    let row = |machine: &MachineView| {
        let (bar, amount) = machine.memory.map_or_else(Default::default, memory);
        let now = machine.now.join("; ");
        let middle = if is_wide { vec![machine.up.clone(), bar, amount, rate(machine)] } else { Vec::new() };
        let cells = [vec![machine.name.clone(), machine.state.clone()], middle, vec![now]].concat();
        Row::new(cells).style(style(machine.tone))
    };
    let (head, widths) = match is_wide {
        true => (
            vec!["NAME", "STATE", "UP", "BUDGET", "IN USE", "REQUESTS/s", "NOW"],
            vec![12, 11, 11, BAR_CELLS as u16, 10, 10, 0],
        ),
        false => (vec!["NAME", "STATE", "NOW"], vec![12, 11, 0]),
    };
    let width = |&width: &u16| if width == 0 { Constraint::Fill(1) } else { Constraint::Length(width) };
    Table::new(view.machines.iter().map(row), widths.iter().map(width))
        .header(Row::new(head).style(Modifier::DIM))
        .row_highlight_style(Modifier::REVERSED)
}

fn style(tone: Tone) -> Style {
    match tone {
        Tone::Good => Style::default(),
        Tone::Busy => Style::default().fg(Color::Yellow),
        Tone::Bad => Style::default().fg(Color::Red),
        Tone::Off => Style::default().add_modifier(Modifier::DIM),
    }
}

/// Guest `█`, ember `▒`, boot set and NVRAM `░`, as shares of the budget; and what is used.
fn memory(memory: Memory) -> (String, String) {
    let kept = memory.boot_set_bytes + memory.nvram_bytes;
    let used = memory.guest_bytes + memory.ember_bytes + kept;
    let whole = memory.budget_bytes.max(used).max(1);
    let cells = |bytes: u64| (bytes * BAR_CELLS).div_ceil(whole) as usize;
    let parts = [("█", memory.guest_bytes), ("▒", memory.ember_bytes), ("░", kept)];
    let bar: String = parts.iter().map(|(cell, bytes)| cell.repeat(cells(*bytes))).collect();
    let bar = bar.chars().take(BAR_CELLS as usize).collect::<String>();
    (format!("{bar:·<width$}", width = BAR_CELLS as usize), bytes(used))
}

/// Requests of all disks in a second.
fn rate(machine: &MachineView) -> String {
    let rates = machine.disks.iter().filter_map(|disk| disk.rates);
    let sum = rates.map(|rates| rates.reads_per_s + rates.writes_per_s).reduce(|sum, rate| sum + rate);
    sum.map(|sum| format!("{sum:>10.0}")).unwrap_or_default()
}

fn page(machine: &MachineView) -> Vec<Line<'_>> {
    let head = |text: &'static str| Line::from(text).style(Modifier::DIM);
    let state = Span::styled(machine.state.as_str(), style(machine.tone));
    let up = if machine.up.is_empty() { String::new() } else { format!(", up {}", machine.up) };
    let mut lines = vec![Line::from(vec![Span::from(format!("{}  ", machine.name)), state, Span::from(up)])];
    lines.extend(machine.now.iter().chain(&machine.last_recovery).map(|it| Line::from(it.as_str())));
    if let Some(budget) = machine.memory {
        let (bar, used) = memory(budget);
        lines.push(Line::from(format!("{bar} {used} of {} budget", bytes(budget.budget_bytes))));
    }
    lines.extend(machine.disks.iter().map(|disk| Line::from(disk_line(disk))));
    let mut section = |title, of: Vec<Line<'static>>| {
        if !of.is_empty() {
            lines.extend([Line::default(), head(title)].into_iter().chain(of));
        }
    };
    let texts = |of: &[String]| of.iter().cloned().map(Line::from).collect();
    let commands = machine.commands.iter();
    section("commands", commands.map(|it| Line::from(format!("{}    # {}", it.line, it.does))).collect());
    section("dumps", texts(&machine.dumps));
    section("snapshots saved", texts(&machine.snapshots));
    section("events, newest first", texts(&machine.events));
    lines
}

fn disk_line(disk: &Disk) -> String {
    let Disk { name, bytes: size, rates, problem } = disk;
    let rates = rates.map_or_else(String::new, |rates| {
        let image = rates.image_ms.map_or_else(String::new, |ms| format!(", image {ms:.1} ms"));
        let warm = rates.warm_pct.map_or_else(String::new, |pct| format!(" ({pct:.0} % from memory)"));
        let (read, written) = (bytes(rates.read_bytes_per_s as u64), bytes(rates.written_bytes_per_s as u64));
        format!(
            ", {:.0} reads/s {read}/s{warm}, {:.0} writes/s {written}/s{image}",
            rates.reads_per_s, rates.writes_per_s
        )
    });
    let problem = problem.as_ref().map_or_else(String::new, |problem| format!("; {problem}"));
    format!("disk {name}, {}{rates}{problem}", bytes(*size))
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::cli::survey::Collector;
    use crate::cli::survey::fake::Keepers;

    fn drawn(view: &View, screen: Screen, (width, height): (u16, u16)) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, view, screen)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn screen_shows_all_machines_or_one() {
        let keepers = Keepers::start(&["db", "web"]);
        let view = View::of(&Collector::new(keepers.root()).survey(), &keepers.root());
        let screen = Screen::default();
        let check = |screen, size, expect: &[&str]| {
            let text = drawn(&view, screen, size);
            expect.iter().for_each(|expect| assert!(text.contains(expect), "no {expect:?} in\n{text}"));
        };
        check(screen, (120, 24), &["2 machines, 2 running", "NAME", "REQUESTS/s", "███", "db", "web", "dumping, 25 %"]);
        check(screen, (60, 12), &["NAME", "STATE", "NOW", "web", "running"]);
        check(screen, (10, 2), &["2 machines"]);
        let open = Screen { chosen: 1, open: true, ..screen };
        check(
            open,
            (120, 40),
            &["web  running, up 1 min 15 s", "disk root", "console web", "guest panicked", "Esc back"],
        );
        check(open, (40, 12), &["web  running"]);
    }
}
