//! `hearth top`: what the page of `hearth host` shows, in the terminal.
//!
//! survey -> view -> draw, once a second; keys in between

mod draw;

use std::io;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};

use super::survey::{Collector, View};
use super::{CliError, Context, Exit};
use draw::draw;

const EVERY: Duration = Duration::from_secs(1);

/// What the operator has chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Screen {
    /// Position of the chosen machine.
    chosen: usize,
    /// It is shown alone.
    open: bool,
    over: bool,
}

pub fn watch(context: &mut Context<'_>) -> Result<Exit, CliError> {
    if !rustix::termios::isatty(io::stdout()) || !rustix::termios::isatty(io::stdin()) {
        return Err(CliError::NoTerminal);
    }
    let mut terminal = ratatui::try_init().map_err(CliError::Terminal)?;
    let shown = show(&mut terminal, context);
    ratatui::restore();
    shown.map(|()| Exit::Done).map_err(CliError::Terminal)
}

fn show(terminal: &mut DefaultTerminal, context: &Context<'_>) -> io::Result<()> {
    let (collector, mut screen) = (Collector::new(context.root.clone()), Screen::default());
    while !screen.over {
        let view = View::of(&collector.survey(), &context.root);
        screen.chosen = screen.chosen.min(view.machines.len().saturating_sub(1));
        terminal.draw(|frame| draw(frame, &view, screen))?;
        if event::poll(EVERY)?
            && let Event::Key(key) = event::read()?
            && key.is_press()
        {
            screen = screen.after(key.code, key.modifiers);
        }
    }
    Ok(())
}

impl Screen {
    fn after(self, key: KeyCode, modifiers: KeyModifiers) -> Self {
        match key {
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Self { over: true, ..self },
            KeyCode::Char('q') => Self { over: true, ..self },
            KeyCode::Up | KeyCode::Char('k') => Self { chosen: self.chosen.saturating_sub(1), ..self },
            // The next survey says how many there are.
            KeyCode::Down | KeyCode::Char('j') => Self { chosen: self.chosen + 1, ..self },
            KeyCode::Enter => Self { open: true, ..self },
            KeyCode::Esc => Self { open: false, ..self },
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_choose_open_and_end() {
        let check = |keys: &[KeyCode], expect: Screen| {
            let after = keys.iter().fold(Screen::default(), |screen, &key| screen.after(key, KeyModifiers::NONE));
            assert_eq!(after, expect, "{keys:?}");
        };
        check(&[KeyCode::Up, KeyCode::Down, KeyCode::Down], Screen { chosen: 2, ..Screen::default() });
        check(&[KeyCode::Enter], Screen { open: true, ..Screen::default() });
        check(&[KeyCode::Enter, KeyCode::Esc], Screen::default());
        check(&[KeyCode::Char('c')], Screen::default());
        check(&[KeyCode::Char('q')], Screen { over: true, ..Screen::default() });
        assert!(Screen::default().after(KeyCode::Char('c'), KeyModifiers::CONTROL).over);
    }
}
