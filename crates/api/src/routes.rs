//! The table of routes. One row defines the route's id, its documentation, the client's call, and the order that the server
//! passes on.
//!
//! A path is matched segment by segment; `{name}` matches one segment. Twenty routes need no router crate.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::ErrorWord::{self, Failed, NoSuchDisk, NotPossible, WrongState};
use crate::{
    Accepted, Age, CopyDiskCancel, CopyDiskRequest, CopyDiskTake, CrashRequest, DiskSize, DomainCrashed, DomainEnded,
    DomainHarvested, DomainReset, DomainStarts, DumpDiscard, DumpRequest, DumpResume, EventRecord, Explanation,
    MachineStatus, ParkRequest, ReadyRequest, RebootRequest, RejuvenateRequest, RemountPlan, ResizeRequest, SaveCancel,
    SaveRequest, StopRequest, UpgradeRequest,
};

/// An HTTP method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Reads something.
    Get,
    /// Makes a request.
    Post,
}

impl Method {
    /// Name of the method, as in a request.
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
        }
    }
}

/// A request with a route of its own.
pub trait Call: Serialize {
    /// Type of the route's answer.
    type Answer: DeserializeOwned;
    /// The route for this request.
    const ROUTE: RouteId;
}

/// The answer of a route without a request body.
pub trait Resource: DeserializeOwned {
    /// The route that returns it.
    const ROUTE: RouteId;
}

/// One route: everything that server, client and documents need.
pub struct Route {
    /// Id of the route.
    pub id: RouteId,
    /// HTTP method.
    pub method: Method,
    /// Path, with `{name}` for each path parameter.
    pub path: &'static str,
    /// The route's purpose, in one line.
    pub summary: &'static str,
    /// More about the route, if the summary is not enough.
    pub details: &'static str,
    /// Parameters of the path and of the query.
    pub parameters: &'static [Parameter],
    /// Body of the request, if it has one.
    pub request: Option<Body>,
    /// Body of a successful answer.
    pub response: Body,
    /// The command that makes this call.
    pub cli: &'static str,
    /// Errors of this route, besides those of every route.
    pub errors: &'static [ErrorWord],
}

/// A part of the path or of the query.
pub struct Parameter {
    /// Name of the parameter.
    pub name: &'static str,
    /// Whether it is part of the path. If not, it is part of the query.
    pub in_path: bool,
    /// The parameter's meaning.
    pub meaning: &'static str,
}

/// Content of a body.
#[derive(Clone, Copy)]
pub enum Body {
    /// One JSON value of this type.
    Json(Shape),
    /// A JSON array of values of this type.
    JsonList(Shape),
    /// Any JSON object, documented elsewhere.
    JsonObject(&'static str),
    /// Text of this media type.
    Text(&'static str),
}

/// A type, by its name and schema.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Name of the type.
    pub name: fn() -> Cow<'static, str>,
    /// JSON schema of the type.
    pub schema: fn(&mut SchemaGenerator) -> Schema,
}

const fn shape<T: JsonSchema>() -> Shape {
    Shape { name: T::schema_name, schema: |generator| generator.subschema_for::<T>() }
}

macro_rules! request_body {
    () => {
        None
    };
    ($request:ident) => {
        Some(Body::Json(shape::<$request>()))
    };
}

macro_rules! response_body {
    ([$item:ident]) => {
        Body::JsonList(shape::<$item>())
    };
    (object $meaning:literal) => {
        Body::JsonObject($meaning)
    };
    (text $media_type:literal) => {
        Body::Text($media_type)
    };
    ($answer:ident) => {
        Body::Json(shape::<$answer>())
    };
}

macro_rules! call {
    ($id:ident ($request:ident) ($answer:ident)) => {
        impl Call for $request {
            type Answer = $answer;
            const ROUTE: RouteId = RouteId::$id;
        }
    };
    ($id:ident () ($answer:ident)) => {
        impl Resource for $answer {
            const ROUTE: RouteId = RouteId::$id;
        }
    };
    ($($other:tt)*) => {};
}

/// The table of routes.
///
/// `answered`: `Id: Method "path" (request) -> (answer) { what else there is to say }`.
/// `accepted`: `Id: "path" (request) { what else there is to say }`, requests that the keeper accepts and then works on.
macro_rules! routes {
    (
        answered {
            $($id:ident: $method:ident $path:literal ($($request:ident)?) -> ($($answer:tt)*) {
                $($field:ident: $value:expr,)*
            })*
        }
        accepted {
            $($order:ident: $order_path:literal ($order_request:ident) {
                $($order_field:ident: $order_value:expr,)*
            })*
        }
    ) => {
        /// Id of each route.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum RouteId {
            $(#[doc = concat!("`", $path, "`")] $id,)*
            /// The route of an order.
            Order(OrderId),
        }

        /// Id of each order.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum OrderId {
            $(#[doc = concat!("`", $order_path, "`")] $order,)*
        }

        /// All routes, in the order of the page.
        pub static ROUTES: &[Route] = &[
            $(Route {
                request: request_body!($($request)?),
                response: response_body!($($answer)*),
                $($field: $value,)*
                ..Route::new(RouteId::$id, Method::$method, $path)
            },)*
            $(Route {
                request: request_body!($order_request),
                response: response_body!(Accepted),
                $($order_field: $order_value,)*
                ..Route::new(RouteId::Order(OrderId::$order), Method::Post, $order_path)
            },)*
        ];

        /// A request that the keeper accepts and then works on. Events report its progress.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Order {
            $(#[doc = concat!("`", $order_path, "`")] $order($order_request),)*
        }

        impl Order {
            /// The order with this body, in JSON.
            ///
            /// # Errors
            /// The body is not the route's request.
            pub fn parse(id: OrderId, body: &[u8]) -> serde_json::Result<Self> {
                Ok(match id {
                    $(OrderId::$order => Self::$order(serde_json::from_slice(body)?),)*
                })
            }
        }

        $(call!($id ($($request)?) ($($answer)*));)*
        $(impl Call for $order_request {
            type Answer = Accepted;
            const ROUTE: RouteId = RouteId::Order(OrderId::$order);
        })*
    };
}

routes! {
    answered {
        Status: Get "/v1/status" () -> (MachineStatus) {
            summary: "Show the machine's state",
            cli: "hearth status NAME",
        }
        Age: Get "/v1/age" () -> (Age) {
            summary: "Show QEMU's age and whether it should be replaced",
            cli: "hearth age NAME",
            errors: &[WrongState],
        }
        RemountPlan: Get "/v1/remount-plan" () -> (RemountPlan) {
            summary: "Show what the next boot will read, what memory holds, and how the last boot went",
            cli: "hearth remount-plan NAME",
            errors: &[WrongState],
        }
        Events: Get "/v1/events" () -> ([EventRecord]) {
            summary: "Show the machine's events",
            details: "A JSON list, oldest first. With `follow=1`, or with `Accept: text/event-stream`, the answer is an \
             endless stream of server-sent events: `id` is the sequence number, `event` the kind, `data` the record. A \
             comment line every 15 seconds keeps it alive. A reader that is too slow gets a `gap` record with the number \
             of missed events. `Last-Event-ID` works like `since`.",
            parameters: &[
                Parameter { name: "since", in_path: false, meaning: "only events with a greater sequence number" },
                Parameter { name: "follow", in_path: false, meaning: "1: stream instead of list" },
            ],
            cli: "hearth events NAME [--follow]",
        }
        Explain: Get "/v1/explain" () -> (Explanation) {
            summary: "Show the phases of the last recovery",
            cli: "hearth explain NAME",
        }
        Resize: Post "/v1/disks/{name}/resize" (ResizeRequest) -> (DiskSize) {
            summary: "Tell the guest that a disk's image was resized",
            details: "Resize the image first, for example with `truncate`.",
            parameters: &[Parameter { name: "name", in_path: true, meaning: "name of the disk" }],
            cli: "hearth resize NAME DISK",
            errors: &[NoSuchDisk, WrongState],
        }
        Config: Get "/v1/config" () -> (object "the configuration in the keeper's own form, with sizes in bytes and absolute paths; not a machine.toml") {
            summary: "Show the configuration with all defaults filled in",
            cli: "hearth config NAME",
        }
        Metrics: Get "/metrics" () -> (text "text/plain; version=0.0.4") {
            summary: "Show metrics in Prometheus' text format",
            details: "metrics.md lists all metrics.",
        }
    }
    accepted {
        Reboot: "/v1/reboot" (RebootRequest) {
            summary: "Reboot the guest into a new incarnation",
            details: "The reboot is warm unless `cold` is true. The guest gets an ACPI power-button event and has a minute \
             to shut down. With `force` its power is cut instead.",
            cli: "hearth reboot NAME [--cold] [--force]",
            errors: &[WrongState],
        }
        Stop: "/v1/stop" (StopRequest) {
            summary: "Power the machine off and end its keeper",
            details: "The guest gets an ACPI power-button event and has a minute to shut down. With `force` QEMU ends at \
             once. Its memory is not kept.",
            cli: "hearth stop NAME [--force]",
            errors: &[WrongState],
        }
        Crash: "/v1/crash" (CrashRequest) {
            summary: "Make the guest's kernel panic, for drills",
            details: "The guest must be prepared for it: see the field `method`.",
            cli: "hearth crash NAME",
            errors: &[WrongState],
        }
        Dump: "/v1/dump" (DumpRequest) {
            summary: "Dump the memory of a running or paused guest",
            details: "The guest keeps running unless `pause` is true. The events, and `dumps` of the status, show \
             progress.",
            cli: "hearth dump NAME [--pause] [--level N] [--format F] [--compress C] [-o FILE]",
            errors: &[WrongState],
        }
        DumpResume: "/v1/dump/resume" (DumpResume) {
            summary: "Resume a waiting dump",
            details: "First remove the reason for its wait, for example by freeing disk space.",
            cli: "hearth dump NAME --resume",
            errors: &[WrongState],
        }
        DumpDiscard: "/v1/dump/discard" (DumpDiscard) {
            summary: "Discard what dumps have not written yet, and release its memory",
            details: "The files stay, marked incomplete, and can be read as far as they go.",
            cli: "hearth dump NAME --discard",
            errors: &[WrongState],
        }
        Rejuvenate: "/v1/rejuvenate" (RejuvenateRequest) {
            summary: "Replace QEMU under the running guest",
            details: "The guest pauses for some milliseconds. The event `rejuvenated` reports success. \
             `rejuvenation_failed` means that the guest continues on the old QEMU, and says why.",
            cli: "hearth rejuvenate NAME [--qemu PATH]",
            errors: &[WrongState, NotPossible],
        }
        UpgradeKeeper: "/v1/upgrade-keeper" (UpgradeRequest) {
            summary: "Replace the machine's keeper with another program",
            details: "The guest keeps running; its disks pause for about a second. If the new program cannot take over the \
             machine, nothing happens. Otherwise this keeper becomes the new one in the same process, and the API is \
             unavailable for a moment. `keeper_took_over` reports success. `keeper_upgrade_failed` means that the old \
             program continues, and says why.",
            cli: "hearth upgrade-keeper NAME [--program PATH]",
            errors: &[WrongState, Failed],
        }
        Park: "/v1/park" (ParkRequest) {
            summary: "Park the guest: leave it in memory, and end QEMU and keeper",
            details: "`parked` reports success, and the API ends. `park_failed` means that the guest continues, and says \
             why. The next keeper, perhaps under another host kernel, resumes the guest. With `check` nothing happens; an \
             error says why the guest cannot be parked now.",
            cli: "hearth host-reload prepare",
            errors: &[WrongState, NotPossible, Failed],
        }
        Save: "/v1/save" (SaveRequest) {
            summary: "Save the guest, its memory and its disks to a folder",
            details: "The guest keeps running and pauses only for the moment that is saved. The events, and `save` of the \
             status, show progress. `saved` means that the folder can be restored. `save_failed` means that there is no \
             folder, and says why. The guest continues, unless the save succeeds and `then` is `stop`.",
            cli: "hearth save NAME -o FOLDER [--stop] [--compress] [--dedup-disk] [--scan [PERIOD,ROUNDS]] [--freeze [PATIENCE]]",
            errors: &[WrongState, Failed],
        }
        SaveCancel: "/v1/save/cancel" (SaveCancel) {
            summary: "Cancel the running save",
            details: "The save's folder is removed, and the guest continues.",
            cli: "hearth save NAME --cancel",
            errors: &[WrongState],
        }
        CopyDisk: "/v1/copy-disk" (CopyDiskRequest) {
            summary: "Copy a disk of the running guest, as it is at one moment",
            details: "The disk's requests wait for that moment, usually for milliseconds. The copy then shares its blocks with \
             the image where the file system can (reflink), or is written while the guest goes on. `disk_copied` means that the \
             file is complete. `disk_copy_failed` means that there is no file, and says why.",
            cli: "hearth copy-disk NAME DISK FILE",
            errors: &[NoSuchDisk, WrongState, Failed],
        }
        CopyDiskTake: "/v1/copy-disk/take" (CopyDiskTake) {
            summary: "Take the moment of a copy whose caller freezes the guest's file systems",
            details: "The keeper waits a minute for it.",
            cli: "hearth copy-disk NAME DISK FILE",
            errors: &[WrongState],
        }
        CopyDiskCancel: "/v1/copy-disk/cancel" (CopyDiskCancel) {
            summary: "Cancel the running copy of a disk",
            details: "Ctrl-C in `hearth copy-disk` does this. What was copied is removed.",
            cli: "hearth copy-disk NAME DISK FILE",
            errors: &[WrongState],
        }
        Ready: "/v1/ready" (ReadyRequest) {
            summary: "Mark the machine's boot as finished",
            details: "For scripts. The blocks that the machine has read from its disks since its reset stay in memory for \
             its next boot. Repeating the request changes nothing.",
            cli: "hearth ready NAME",
            errors: &[WrongState],
        }
        DomainStarts: "/v1/domain/starts" (DomainStarts) {
            summary: "Serve the domain's disks, because libvirt is about to start its QEMU",
            details: "For libvirt's hook. The answer comes when the disks are served.",
            cli: "hearth hook NAME prepare begin -",
            errors: &[WrongState, NotPossible, Failed],
        }
        DomainReset: "/v1/domain/reset" (DomainReset) {
            summary: "Note that libvirt's QEMU has reset the guest",
            details: "For `hearth host`.",
            cli: "hearth host",
            errors: &[NotPossible],
        }
        DomainCrashed: "/v1/domain/crashed" (DomainCrashed) {
            summary: "Note that the guest has crashed, and that libvirt keeps its QEMU",
            details: "For `hearth host`, which then has the registers read, and the QEMU ended. Refused with \
             `on_panic = \"pause\"`. Repeating the request changes nothing.",
            cli: "hearth host",
            errors: &[WrongState, NotPossible],
        }
        DomainHarvested: "/v1/domain/harvested" (DomainHarvested) {
            summary: "Note that a crashed guest's registers were read, or cannot be",
            details: "For `hearth host`, which ends the QEMU next. Then the state is `recovering`, and `hearth host` starts \
             the domain once there is no `next_start`.",
            cli: "hearth host",
            errors: &[WrongState, NotPossible],
        }
        DomainEnded: "/v1/domain/ended" (DomainEnded) {
            summary: "Close the domain's images, because libvirt has ended its QEMU or could not start it",
            details: "For libvirt's hook. Repeating the request changes nothing.",
            cli: "hearth hook NAME release end -",
            errors: &[NotPossible],
        }
    }
}

/// Why a request fits no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// No route has this path.
    NoSuchPath,
    /// The path exists with this method.
    Method(Method),
}

impl Route {
    const fn new(id: RouteId, method: Method, path: &'static str) -> Self {
        let (request, response) = (None, Body::Text(""));
        Self { id, method, path, summary: "", details: "", parameters: &[], request, response, cli: "", errors: &[] }
    }

    /// The route with this id.
    pub fn of(id: RouteId) -> &'static Self {
        ROUTES.iter().find(|route| route.id == id).expect("each id is made from a row of the table")
    }

    /// The route for a request, and what stood in the place of `{name}`.
    pub fn find<'a>(method: &str, path: &'a str) -> Result<(&'static Self, Option<&'a str>), Mismatch> {
        let mut mismatch = Mismatch::NoSuchPath;
        for route in ROUTES {
            let Some(parameter) = route.parse(path) else { continue };
            if route.method.name() == method {
                return Ok((route, parameter));
            }
            mismatch = Mismatch::Method(route.method);
        }
        Err(mismatch)
    }

    /// The path with `{name}` filled in.
    pub fn path_with(&self, parameter: Option<&str>) -> String {
        match parameter {
            Some(value) => self.path.replace("{name}", value),
            None => self.path.to_owned(),
        }
    }

    /// None if the path is another route's, else what stood in the place of `{name}`.
    fn parse<'a>(&self, path: &'a str) -> Option<Option<&'a str>> {
        let (mut expected, mut given) = (self.path.split('/'), path.split('/'));
        let mut parameter = None;
        loop {
            match (expected.next(), given.next()) {
                (None, None) => return Some(parameter),
                (Some("{name}"), Some(segment)) if !segment.is_empty() => parameter = Some(segment),
                (Some(expected), Some(segment)) if expected == segment => {}
                _ => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: &str, path: &str, expect: Result<(RouteId, Option<&str>), Mismatch>) {
        assert_eq!(Route::find(method, path).map(|(route, name)| (route.id, name)), expect, "{method} {path}");
    }

    #[test]
    fn paths_find_their_routes() {
        check("GET", "/v1/status", Ok((RouteId::Status, None)));
        check("POST", "/v1/disks/root/resize", Ok((RouteId::Resize, Some("root"))));
        check("GET", "/v1/reboot", Err(Mismatch::Method(Method::Post)));
        check("DELETE", "/v1/status", Err(Mismatch::Method(Method::Get)));
        for path in ["", "/", "/v1", "/v1/status/", "/v1/disks//resize", "/v1/disks/resize", "//v1/status", "/v1/statu"]
        {
            check("GET", path, Err(Mismatch::NoSuchPath));
        }
    }

    #[test]
    fn every_route_is_found_by_what_it_documents() {
        for route in ROUTES {
            let path = route.path_with(Some("x"));
            let (found, _) = Route::find(route.method.name(), &path).unwrap();
            assert_eq!(found.id, route.id);
            assert!(std::ptr::eq(Route::of(route.id), route), "{path} stands twice");
            let in_path = route.parameters.iter().any(|parameter| parameter.in_path);
            assert_eq!(in_path, route.path.contains('{'), "{path}");
        }
    }
}
