//! The OpenAPI document, made from the table of routes and the types' schemas.

use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use crate::{ApiError, Body, ErrorWord, Parameter, ROUTES, Route};

/// OpenAPI 3.0, as JSON. Ends with a newline, as a file should.
pub fn openapi() -> String {
    let mut generator = SchemaSettings::openapi3().into_generator();
    let mut paths = Map::new();
    for route in ROUTES {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method.name().to_lowercase()] = operation(route, &mut generator);
    }
    generator.subschema_for::<ApiError>();
    let document = json!({
        "openapi": "3.0.3",
        "info": {
            "title": "Hearth",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The API of one machine's keeper, on the unix socket api.sock in the machine's runtime folder.",
        },
        "servers": [{ "url": "http://localhost" }],
        "paths": paths,
        "components": { "schemas": generator.take_definitions(true) },
    });
    serde_json::to_string_pretty(&document).expect("a document of plain values") + "\n"
}

fn operation(route: &Route, generator: &mut SchemaGenerator) -> Value {
    let mut responses = json!({
        "200": { "description": route.summary, "content": content(route.response, generator) },
    });
    for word in common_errors(route).chain(route.errors.iter().copied()) {
        add_error(&mut responses, word);
    }
    let mut operation = json!({
        "operationId": format!("{:?}", route.id).to_lowercase(),
        "summary": route.summary,
        "parameters": route.parameters.iter().map(parameter).collect::<Vec<_>>(),
        "responses": responses,
    });
    if !route.details.is_empty() {
        operation["description"] = route.details.into();
    }
    if let Some(body) = route.request {
        // An empty body means an object without fields: every field of every request has a default.
        operation["requestBody"] = json!({ "required": false, "content": content(body, generator) });
    }
    operation
}

fn content(body: Body, generator: &mut SchemaGenerator) -> Value {
    match body {
        Body::Json(shape) => json!({ "application/json": { "schema": (shape.schema)(generator) } }),
        Body::JsonList(shape) => {
            json!({ "application/json": { "schema": { "type": "array", "items": (shape.schema)(generator) } } })
        }
        Body::JsonObject(meaning) => {
            json!({ "application/json": { "schema": { "type": "object", "description": meaning } } })
        }
        Body::Text(media_type) => json!({ media_type: { "schema": { "type": "string" } } }),
    }
}

fn parameter(parameter: &Parameter) -> Value {
    json!({
        "name": parameter.name,
        "in": if parameter.in_path { "path" } else { "query" },
        "required": parameter.in_path,
        "description": parameter.meaning,
        "schema": { "type": "string" },
    })
}

/// Errors that every route can answer besides its own.
pub(crate) fn common_errors(route: &Route) -> impl Iterator<Item = ErrorWord> {
    let with_body = route.request.is_some();
    use ErrorWord::{BadRequest, Failed, Forbidden, Timeout, TooLarge, TooManyClients};
    let words = [BadRequest, Forbidden, TooLarge, TooManyClients, Timeout, Failed];
    words.into_iter().filter(move |word| with_body || *word != TooLarge)
}

/// Words that share an HTTP status share its entry.
fn add_error(responses: &mut Value, word: ErrorWord) {
    let entry = &mut responses[word.status().to_string()];
    let description = match entry["description"].as_str() {
        Some(others) => format!("{others}, `{}`", word.name()),
        None => format!("`{}`", word.name()),
    };
    *entry = json!({
        "description": description,
        "content": { "application/json": { "schema": { "$ref": "#/components/schemas/ApiError" } } },
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                if let Some(Value::String(reference)) = fields.get("$ref") {
                    found.push(reference.clone());
                }
                fields.values().for_each(|field| references(field, found));
            }
            Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let document: Value = serde_json::from_str(&openapi()).unwrap();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.iter().any(|reference| reference.ends_with("/MachineStatus")), "{found:?}");
        for reference in found {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
        }
    }

    #[test]
    fn every_route_is_there() {
        let document: Value = serde_json::from_str(&openapi()).unwrap();
        for route in ROUTES {
            let operation = &document["paths"][route.path][route.method.name().to_lowercase()];
            assert_eq!(operation["summary"], route.summary);
            for word in route.errors {
                let description = operation["responses"][word.status().to_string()]["description"].as_str().unwrap();
                assert!(description.contains(word.name()), "{} {}", route.path, word.name());
            }
        }
    }
}
