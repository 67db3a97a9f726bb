//! File reads before and after, as bars. The first read after a reboot shows a cold cache.

use super::scale::axis_top;
use super::{ByRun, Run};
use crate::table::{escape, figure};

/// MiB/s of a read, after each way to reboot.
#[derive(Clone, Debug)]
pub struct BarGroup {
    pub label: String,
    pub values: ByRun<f64>,
}

/// Draws horizontal bars of plain blocks, which wrap and shrink with the page as a drawing would not.
pub fn draw(groups: &[BarGroup]) -> String {
    let top = axis_top(groups.iter().flat_map(|group| &group.values).map(|(_, value)| *value).fold(0.0, f64::max));
    let bar = |run: Run, value: f64| {
        let share = if top > 0.0 { value / top * 100.0 } else { 0.0 };
        format!(
            "<div class=\"bar-row\"><span class=\"bar {}\" style=\"width:{share:.1}%\"></span>\
             <span class=\"bar-value\">{} <small>{}</small></span></div>",
            run.word(),
            figure(value),
            run.word()
        )
    };
    let group = |group: &BarGroup| {
        format!(
            "<div class=\"bar-group\"><div class=\"bar-label\">{}</div><div class=\"bar-rows\">{}</div></div>",
            escape(&group.label),
            group.values.iter().map(|(run, value)| bar(*run, *value)).collect::<String>()
        )
    };
    groups.iter().map(group).collect()
}
