//! The page `docs/api.md`, made from the table of routes and the types' schemas.

use std::fmt::Write;

use schemars::SchemaGenerator;
use serde_json::Value;

use crate::openapi::common_errors;
use crate::{Body, ErrorWord, ROUTES, Route};

const HEAD: &str = "# API

*Generated from the table of routes in `crates/api`. Do not edit: `UPDATE=1 cargo test -p hearth generated` rewrites it.*

Every keeper answers HTTP/1.1 on the unix socket `api.sock` in its machine's runtime folder (`/run/hearth/NAME` unless
configured otherwise). The socket has mode 0600: everyone who can open it can do everything below. Bodies are JSON; an empty
body means an object without fields. A connection serves one request: the keeper closes it after the answer.

    curl --unix-socket /run/hearth/web/api.sock http://localhost/v1/status
    curl --unix-socket /run/hearth/web/api.sock http://localhost/v1/reboot -d '{\"cold\": true}'
    curl --unix-socket /run/hearth/web/api.sock -N 'http://localhost/v1/events?follow=1'

The same as OpenAPI: [openapi.json](openapi.json).
";

/// Markdown. Ends with a newline.
pub fn page() -> String {
    let mut page = HEAD.to_owned();
    let mut generator = SchemaGenerator::default();
    page.push_str("\n| Route | What it does | Command |\n|---|---|---|\n");
    for route in ROUTES {
        let command = if route.cli.is_empty() { String::new() } else { format!("`{}`", route.cli) };
        line(&mut page, &format!("| [`{}`](#{}) | {} | {command} |", title(route), anchor(route), route.summary));
    }
    for route in ROUTES {
        describe(&mut page, route, &mut generator);
    }
    errors(&mut page);
    types(&mut page, &mut generator);
    page
}

fn title(route: &Route) -> String {
    format!("{} {}", route.method.name(), route.path)
}

/// As GitHub and most others derive it from the heading.
fn anchor(route: &Route) -> String {
    let kept = title(route).to_lowercase().replace(' ', "-");
    kept.chars().filter(|letter| letter.is_ascii_alphanumeric() || *letter == '-').collect()
}

fn line(page: &mut String, text: &str) {
    writeln!(page, "{text}").expect("a string takes everything");
}

fn describe(page: &mut String, route: &Route, generator: &mut SchemaGenerator) {
    line(page, &format!("\n## {}\n\n{}.", title(route), route.summary));
    if !route.details.is_empty() {
        line(page, &format!("\n{}", route.details));
    }
    line(page, "");
    for parameter in route.parameters {
        let place = if parameter.in_path { "path" } else { "query" };
        line(page, &format!("- `{}` ({place}): {}", parameter.name, parameter.meaning));
    }
    if let Some(body) = route.request {
        line(page, &format!("- request: {}", body_name(body, generator)));
    }
    line(page, &format!("- answer: {}", body_name(route.response, generator)));
    let words: Vec<String> = route.errors.iter().map(|word| format!("`{}`", word.name())).collect();
    if !words.is_empty() {
        line(page, &format!("- specific errors: {}", words.join(", ")));
    }
}

fn body_name(body: Body, generator: &mut SchemaGenerator) -> String {
    match body {
        Body::Json(shape) => {
            (shape.schema)(generator);
            format!("`{}`", (shape.name)())
        }
        Body::JsonList(shape) => {
            (shape.schema)(generator);
            format!("list of `{}`", (shape.name)())
        }
        Body::JsonObject(meaning) => format!("JSON object: {meaning}"),
        Body::Text(media_type) => format!("text, `{media_type}`"),
    }
}

fn errors(page: &mut String) {
    line(
        page,
        "\n## Errors\n\nEvery failed request is answered with an `ApiError`, whose `error` is one of these words.\n",
    );
    line(page, "| Word | HTTP status | Where |\n|---|---|---|");
    for word in ErrorWord::ALL {
        let own: Vec<String> = ROUTES
            .iter()
            .filter(|route| route.errors.contains(&word))
            .map(|route| format!("`{}`", title(route)))
            .collect();
        let common = ROUTES.iter().any(|route| common_errors(route).any(|common| common == word));
        let place = match (own.is_empty(), common) {
            (false, _) => own.join(", "),
            (true, true) => "every route".to_owned(),
            (true, false) => "unknown paths".to_owned(),
        };
        line(page, &format!("| `{}` | {} | {place} |", word.name(), word.status()));
    }
}

/// The types' fields, from their schemas: the comments in the code are the text.
fn types(page: &mut String, generator: &mut SchemaGenerator) {
    generator.subschema_for::<crate::ApiError>();
    line(page, "\n## Types");
    for (name, schema) in generator.definitions() {
        line(page, &format!("\n### {name}\n"));
        if let Some(description) = schema["description"].as_str() {
            line(page, &one_line(description));
            line(page, "");
        }
        fields(page, schema);
        variants(page, schema);
    }
}

fn fields(page: &mut String, schema: &Value) {
    let Some(properties) = schema["properties"].as_object() else { return };
    for (field, of) in properties {
        let meaning = of["description"].as_str().map(|text| format!(": {}", one_line(text))).unwrap_or_default();
        line(page, &format!("- `{field}` ({}){meaning}", type_name(of)));
    }
}

fn variants(page: &mut String, schema: &Value) {
    if let Some(words) = schema["enum"].as_array() {
        line(page, &words.iter().map(|word| format!("- `{}`", text(word))).collect::<Vec<_>>().join("\n"));
    }
    for variant in schema["oneOf"].as_array().into_iter().flatten() {
        let meaning = variant["description"].as_str().map(|text| format!(": {}", one_line(text))).unwrap_or_default();
        line(page, &format!("- {}{meaning}", variant_name(variant)));
    }
}

/// A word, a group of words, or a tagged object: `phase` with `phase` (string), `duration_ms` (number).
fn variant_name(variant: &Value) -> String {
    if let Some(word) = variant.get("const") {
        return format!("`{}`", text(word));
    }
    if let Some(words) = variant["enum"].as_array() {
        return words.iter().map(|word| format!("`{}`", text(word))).collect::<Vec<_>>().join(", ");
    }
    let mut tag = String::new();
    let mut fields = Vec::new();
    for (name, of) in variant["properties"].as_object().into_iter().flatten() {
        match of.get("const") {
            Some(word) => tag = format!("`{name} = {}`", text(word)),
            None => fields.push(format!("`{name}` ({})", type_name(of))),
        }
    }
    if fields.is_empty() { tag } else { format!("{tag} with {}", fields.join(", ")) }
}

fn type_name(schema: &Value) -> String {
    if let Some(reference) = schema["$ref"].as_str() {
        return reference.rsplit('/').next().unwrap_or(reference).to_owned();
    }
    if let Some(options) = schema["anyOf"].as_array().or_else(|| schema["allOf"].as_array()) {
        return options.iter().map(type_name).collect::<Vec<_>>().join(" or ");
    }
    match &schema["type"] {
        Value::String(name) if name == "array" => format!("list of {}", type_name(&schema["items"])),
        Value::String(name) => name.clone(),
        Value::Array(names) => names.iter().map(text).collect::<Vec<_>>().join(" or "),
        _ => "any".to_owned(),
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_error_and_type_is_described() {
        let page = page();
        for route in ROUTES {
            assert!(page.contains(&format!("\n## {}\n", title(route))), "{}", title(route));
            assert!(page.contains(&format!("](#{})", anchor(route))), "{}", anchor(route));
        }
        for word in ErrorWord::ALL {
            assert!(page.contains(&format!("| `{}` | {} |", word.name(), word.status())));
        }
        for name in ["MachineStatus", "EventRecord", "ApiError", "RebootRequest"] {
            assert!(page.contains(&format!("\n### {name}\n")), "{name}");
        }
        assert!(page.contains("- `kind = incarnation_ended` with `cause` (EndCause)"));
    }
}
