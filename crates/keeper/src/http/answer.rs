//! Answers one request: the one `match` over all routes.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use hearth_api::{
    Accepted, ApiError, ErrorWord, EventRecord, Explanation, Mismatch, Order, ResizeRequest, Route, RouteId,
};
use serde::Serialize;

use super::request::{ReadError, Request, number};
use super::slots::FOLLOWERS_MAX;
use super::{Context, HANGUP_PATIENCE, Shared, Slot, Stream};
use crate::control::{Answer, Command};
use crate::event_log::Received;
use crate::metrics;

const JSON: &str = "application/json";

/// The result of a request.
enum Reply {
    Text {
        media_type: &'static str,
        text: String,
    },
    /// An endless stream of events.
    Stream {
        since: u64,
    },
}

/// Reads a request from the client and answers it. An error means that the client is gone.
pub fn serve(shared: &Shared, slot: &Slot, stream: &mut UnixStream) -> io::Result<()> {
    Stream::set_write_timeout(stream, shared.client_patience)?;
    let request = match Request::read(stream, shared.client_patience) {
        Ok(request) => request,
        Err(ReadError::Refused(error)) => return refuse(stream, &error),
        Err(ReadError::Lost(error)) => return Err(error),
    };
    tracing::debug!(method = request.method, path = request.path, "API request");
    match answer(&shared.context, &request) {
        Ok(Reply::Text { media_type, text }) => send(stream, 200, media_type, text.as_bytes()),
        Ok(Reply::Stream { since }) if slot.follow() => stream_events(shared, stream, since),
        Ok(Reply::Stream { .. }) => {
            let message = format!("too many clients: {FOLLOWERS_MAX} follow the events");
            let hint = "close some of them, or request events without follow";
            refuse(stream, &ApiError::new(ErrorWord::TooManyClients, message).hint(hint))
        }
        Err(error) => refuse(stream, &error),
    }
}

pub fn refuse(stream: &mut UnixStream, error: &ApiError) -> io::Result<()> {
    send(stream, error.error.status(), JSON, json_text(error).as_bytes())
}

fn answer(context: &Context, request: &Request) -> Result<Reply, ApiError> {
    let (route, parameter) =
        Route::find(&request.method, &request.path).map_err(|mismatch| no_route(request, mismatch))?;
    match route.id {
        RouteId::Order(order) => accept(context, request.order(order)?),
        RouteId::Status => Ok(json(&context.control.status()?)),
        RouteId::Age => age(context),
        RouteId::RemountPlan => match context.control.ask(Command::RemountPlan)? {
            Answer::RemountPlan(plan) => Ok(json(&plan)),
            other => Err(unexpected(&other)),
        },
        RouteId::Resize => {
            request.body::<ResizeRequest>()?;
            resized(context, parameter.unwrap_or_default())
        }
        RouteId::Events => events(context, request),
        RouteId::Explain => explanation(context),
        RouteId::Config => Ok(json(&*context.config.lock().expect("holders only copy and assign"))),
        RouteId::Metrics => {
            let text = metrics::text(&*context.control.status()?);
            Ok(Reply::Text { media_type: metrics::MEDIA_TYPE, text })
        }
    }
}

fn no_route(request: &Request, mismatch: Mismatch) -> ApiError {
    match mismatch {
        Mismatch::NoSuchPath => ApiError::new(ErrorWord::NoSuchRoute, format!("no such route: {}", request.path))
            .hint("docs/api.md lists all routes"),
        Mismatch::Method(method) => {
            ApiError::new(ErrorWord::WrongMethod, format!("{} does not accept {}", request.path, request.method))
                .hint(format!("use {}", method.name()))
        }
    }
}

/// Passes an order on; the answer says which events belong to it.
fn accept(context: &Context, order: Order) -> Result<Reply, ApiError> {
    let since = context.events.last_sequence();
    match context.control.ask(Command::Order(order))? {
        Answer::Accepted => Ok(json(&Accepted { since })),
        other => Err(unexpected(&other)),
    }
}

fn resized(context: &Context, disk: &str) -> Result<Reply, ApiError> {
    match context.control.ask(Command::Resize { disk: disk.to_owned() })? {
        Answer::Resized(size) => Ok(json(&size)),
        other => Err(unexpected(&other)),
    }
}

fn age(context: &Context) -> Result<Reply, ApiError> {
    match context.control.ask(Command::Age)? {
        Answer::Age(signs) => Ok(json(&signs.assess())),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(answer: &Answer) -> ApiError {
    ApiError::new(ErrorWord::Failed, format!("internal error: the machine answered another request: {answer:?}"))
}

fn explanation(context: &Context) -> Result<Reply, ApiError> {
    let status = context.control.status()?;
    let recovery = status.last_recovery;
    Ok(json(&Explanation { name: status.name, incarnation: status.incarnation, recovery }))
}

fn events(context: &Context, request: &Request) -> Result<Reply, ApiError> {
    let since = match (request.query_number("since")?, &request.last_event_id) {
        (Some(since), _) => since,
        (None, Some(id)) => number("Last-Event-ID", id)?,
        (None, None) => 0,
    };
    if request.query_flag("follow") || request.accepts_events {
        return Ok(Reply::Stream { since });
    }
    Ok(json(&context.events.since(since).iter().map(AsRef::as_ref).collect::<Vec<&EventRecord>>()))
}

fn json(value: &impl Serialize) -> Reply {
    Reply::Text { media_type: JSON, text: json_text(value) }
}

fn json_text(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("API types are plain data with text keys") + "\n"
}

fn send(stream: &mut UnixStream, status: u16, media_type: &str, body: &[u8]) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status} {}\r\nContent-Type: {media_type}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        reason(status),
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat())
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        409 => "Conflict",
        413 => "Content Too Large",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Internal Server Error",
    }
}

/// Each event is written at once. A client that does not read within the write timeout is dropped; it blocks only its
/// own thread.
fn stream_events(shared: &Shared, stream: &mut UnixStream, since: u64) -> io::Result<()> {
    stream.write_all(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n",
    )?;
    let heartbeat = shared.heartbeat;
    let mut events = shared.context.events.subscribe(since);
    let mut written = Instant::now();
    loop {
        match events.next(heartbeat.saturating_sub(written.elapsed()).min(HANGUP_PATIENCE)) {
            Received::Record(record) => stream.write_all(event_text(&record).as_bytes())?,
            Received::Closed => return Ok(()),
            Received::Quiet if written.elapsed() >= heartbeat => stream.write_all(b":\n\n")?,
            Received::Quiet if stream.has_hung_up()? => return Ok(()),
            Received::Quiet => continue,
        }
        written = Instant::now();
    }
}

fn event_text(record: &EventRecord) -> String {
    let data = serde_json::to_value(record).expect("API types are plain data with text keys");
    let kind = data["kind"].as_str().unwrap_or_default();
    format!("id: {}\nevent: {kind}\ndata: {data}\n\n", record.sequence)
}
