//! Answers as untyped JSON, for tests that do not use the types of the API yet.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::TestVm;
use crate::error::Result;

fn json<T: Serialize>(value: T) -> Value {
    serde_json::to_value(value).expect("an answer is plain data")
}

impl TestVm {
    pub fn status_json(&self) -> Result<Value> {
        self.status().map(json)
    }

    pub fn explain_json(&self) -> Result<Value> {
        self.explain().map(json)
    }

    pub fn age_json(&self) -> Result<Value> {
        self.age().map(json)
    }

    pub fn wait_running_json(&self) -> Result<Value> {
        self.wait_running().map(json)
    }

    pub fn wait_status_json(&self, what: &str, look: impl Fn(&Value) -> bool) -> Result<Value> {
        self.wait_status(what, |status| look(&json(status))).map(json)
    }

    pub fn wait_event_json(&self, what: &str, look: impl Fn(&Value) -> bool) -> Result<Value> {
        self.wait_event(what, |event| Some(json(event)).filter(&look))
    }

    pub fn wait_event_within_json(&self, what: &str, limit: Duration, look: impl Fn(&Value) -> bool) -> Result<Value> {
        self.wait_event_within(what, limit, |event| Some(json(event)).filter(&look))
    }

    pub fn events_json(&self) -> Vec<Value> {
        self.events().into_iter().map(json).collect()
    }
}
