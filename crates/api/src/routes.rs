//! The table of routes.
//!
//! A path is matched segment by segment; `{name}` stands for one segment. A dozen routes need no router crate.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator};

use crate::{
    Accepted, Age, CrashRequest, DiskSize, DumpOrder, DumpRequest, ErrorWord, EventRecord, Explanation, MachineStatus,
    ParkRequest, ReadyRequest, RebootRequest, RejuvenateRequest, RemountPlan, ResizeRequest, SaveCancel, SaveRequest,
    StopRequest, UpgradeRequest,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Post,
}

impl Method {
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
        }
    }
}

/// Every route by name: the server answers through one `match` over these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouteId {
    Status,
    Reboot,
    Stop,
    Crash,
    Dump,
    DumpResume,
    DumpDiscard,
    Rejuvenate,
    UpgradeKeeper,
    Park,
    Age,
    Save,
    SaveCancel,
    Ready,
    RemountPlan,
    Events,
    Explain,
    Resize,
    Config,
    Metrics,
}

/// One route: all that server, client and documents need to know.
pub struct Route {
    pub id: RouteId,
    pub method: Method,
    pub path: &'static str,
    pub summary: &'static str,
    /// What a caller must know beyond the summary.
    pub details: &'static str,
    pub parameters: &'static [Parameter],
    pub request: Option<Body>,
    pub response: Body,
    /// The command that makes this call.
    pub cli: &'static str,
    /// What can go wrong besides what can go wrong with every route.
    pub errors: &'static [ErrorWord],
}

/// A part of the path or of the query.
pub struct Parameter {
    pub name: &'static str,
    pub in_path: bool,
    pub meaning: &'static str,
}

/// What a body is made of.
#[derive(Clone, Copy)]
pub enum Body {
    Json(Shape),
    JsonList(Shape),
    /// Any JSON object, documented elsewhere.
    JsonObject(&'static str),
    /// Text of this media type.
    Text(&'static str),
}

/// A type, by its name and schema.
#[derive(Clone, Copy)]
pub struct Shape {
    pub name: fn() -> Cow<'static, str>,
    pub schema: fn(&mut SchemaGenerator) -> Schema,
}

const fn shape<T: JsonSchema>() -> Shape {
    Shape { name: T::schema_name, schema: |generator| generator.subschema_for::<T>() }
}

pub static ROUTES: &[Route] = &[
    Route {
        id: RouteId::Status,
        method: Method::Get,
        path: "/v1/status",
        summary: "Show the machine's state",
        details: "",
        parameters: &[],
        request: None,
        response: Body::Json(shape::<MachineStatus>()),
        cli: "hearth status NAME",
        errors: &[],
    },
    Route {
        id: RouteId::Reboot,
        method: Method::Post,
        path: "/v1/reboot",
        summary: "Reboot the guest into a new incarnation",
        details: "The reboot is warm unless `cold` is true. The guest gets an ACPI power-button event and has a minute to \
             shut down. With `force` its power is cut instead.",
        parameters: &[],
        request: Some(Body::Json(shape::<RebootRequest>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth reboot NAME [--cold] [--force]",
        errors: &[ErrorWord::WrongState],
    },
    Route {
        id: RouteId::Stop,
        method: Method::Post,
        path: "/v1/stop",
        summary: "Power the machine off and end its keeper",
        details: "The guest gets an ACPI power-button event and has a minute to shut down. With `force` QEMU ends at once. \
             Its memory is not kept.",
        parameters: &[],
        request: Some(Body::Json(shape::<StopRequest>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth stop NAME [--force]",
        errors: &[ErrorWord::WrongState],
    },
    Route {
        id: RouteId::Crash,
        method: Method::Post,
        path: "/v1/crash",
        summary: "Make the guest's kernel panic, for drills",
        details: "The guest must be prepared for it: see the field `method`.",
        parameters: &[],
        request: Some(Body::Json(shape::<CrashRequest>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth crash NAME",
        errors: &[ErrorWord::WrongState],
    },
    Route {
        id: RouteId::Dump,
        method: Method::Post,
        path: "/v1/dump",
        summary: "Dump the memory of a running or paused guest",
        details: "The guest keeps running unless `pause` is true. The events, and `dumps` of the status, show progress.",
        parameters: &[],
        request: Some(Body::Json(shape::<DumpRequest>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth dump NAME [--pause] [--level N] [--format F] [--compress C] [-o FILE]",
        errors: &[ErrorWord::WrongState],
    },
    Route {
        id: RouteId::DumpResume,
        method: Method::Post,
        path: "/v1/dump/resume",
        summary: "Resume a waiting dump",
        details: "First remove the reason for its wait, for example by freeing disk space.",
        parameters: &[],
        request: Some(Body::Json(shape::<DumpOrder>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth dump NAME --resume",
        errors: &[ErrorWord::WrongState],
    },
    Route {
        id: RouteId::DumpDiscard,
        method: Method::Post,
        path: "/v1/dump/discard",
        summary: "Discard what dumps have not written yet, and release its memory",
        details: "The files stay, marked incomplete, and can be read as far as they go.",
        parameters: &[],
        request: Some(Body::Json(shape::<DumpOrder>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth dump NAME --discard",
        errors: &[ErrorWord::WrongState],
    },
    Route {
        id: RouteId::Rejuvenate,
        method: Method::Post,
        path: "/v1/rejuvenate",
        summary: "Replace QEMU under the running guest",
        details: "The guest pauses for some milliseconds. The event `rejuvenated` reports success. `rejuvenation_failed` \
             means that the guest continues on the old QEMU, and says why.",
        parameters: &[],
        request: Some(Body::Json(shape::<RejuvenateRequest>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth rejuvenate NAME [--qemu PATH]",
        errors: &[ErrorWord::WrongState, ErrorWord::NotPossible],
    },
    Route {
        id: RouteId::UpgradeKeeper,
        method: Method::Post,
        path: "/v1/upgrade-keeper",
        summary: "Replace the machine's keeper with another program",
        details: "The guest keeps running; its disks pause for about a second. If the new program cannot take over the \
             machine, nothing happens. Otherwise this keeper becomes the new one in the same process, and the API is \
             unavailable for a moment. `keeper_took_over` reports success. `keeper_upgrade_failed` means that the old \
             program continues, and says why.",
        parameters: &[],
        request: Some(Body::Json(shape::<UpgradeRequest>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth upgrade-keeper NAME [--program PATH]",
        errors: &[ErrorWord::WrongState, ErrorWord::Failed],
    },
    Route {
        id: RouteId::Park,
        method: Method::Post,
        path: "/v1/park",
        summary: "Park the guest: leave it in memory, and end QEMU and keeper",
        details: "`parked` reports success, and the API ends. `park_failed` means that the guest continues, and says why. \
             The next keeper, perhaps under another host kernel, resumes the guest. With `check` nothing happens; an \
             error says why the guest cannot be parked now.",
        parameters: &[],
        request: Some(Body::Json(shape::<ParkRequest>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth host-reload prepare",
        errors: &[ErrorWord::WrongState, ErrorWord::NotPossible, ErrorWord::Failed],
    },
    Route {
        id: RouteId::Age,
        method: Method::Get,
        path: "/v1/age",
        summary: "Show QEMU's age and whether it should be replaced",
        details: "",
        parameters: &[],
        request: None,
        response: Body::Json(shape::<Age>()),
        cli: "hearth age NAME",
        errors: &[ErrorWord::WrongState],
    },
    Route {
        id: RouteId::Save,
        method: Method::Post,
        path: "/v1/save",
        summary: "Save the guest, its memory and its disks to a folder",
        details: "The guest keeps running and pauses only for the moment that is saved. The events, and `save` of the \
             status, show progress. `saved` means that the folder can be restored. `save_failed` means that there is \
             no folder, and says why. The guest continues, unless the save succeeds and `then` is `stop`.",
        parameters: &[],
        request: Some(Body::Json(shape::<SaveRequest>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth save NAME -o FOLDER [--stop] [--compress] [--dedup-disk] [--scan [PERIOD,ROUNDS]] [--freeze [PATIENCE]]",
        errors: &[ErrorWord::WrongState, ErrorWord::Failed],
    },
    Route {
        id: RouteId::SaveCancel,
        method: Method::Post,
        path: "/v1/save/cancel",
        summary: "Cancel the running save",
        details: "The save's folder is removed, and the guest continues.",
        parameters: &[],
        request: Some(Body::Json(shape::<SaveCancel>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth save NAME --cancel",
        errors: &[ErrorWord::WrongState],
    },
    Route {
        id: RouteId::Ready,
        method: Method::Post,
        path: "/v1/ready",
        summary: "Mark the machine's boot as finished",
        details: "For scripts. The blocks that the machine has read from its disks since its reset stay in memory for its \
             next boot. Repeating the request changes nothing.",
        parameters: &[],
        request: Some(Body::Json(shape::<ReadyRequest>())),
        response: Body::Json(shape::<Accepted>()),
        cli: "hearth ready NAME",
        errors: &[ErrorWord::WrongState],
    },
    Route {
        id: RouteId::RemountPlan,
        method: Method::Get,
        path: "/v1/remount-plan",
        summary: "Show what the next boot will read, what memory holds, and how the last boot went",
        details: "",
        parameters: &[],
        request: None,
        response: Body::Json(shape::<RemountPlan>()),
        cli: "hearth remount-plan NAME",
        errors: &[ErrorWord::WrongState],
    },
    Route {
        id: RouteId::Events,
        method: Method::Get,
        path: "/v1/events",
        summary: "Show the machine's events",
        details: "A JSON list, oldest first. With `follow=1`, or with `Accept: text/event-stream`, the answer is an endless \
             stream of server-sent events: `id` is the sequence number, `event` the kind, `data` the record. A comment \
             line every 15 seconds keeps it alive. A reader that is too slow gets a `gap` record with the number of \
             missed events. `Last-Event-ID` works like `since`.",
        parameters: &[
            Parameter { name: "since", in_path: false, meaning: "only events with a greater sequence number" },
            Parameter { name: "follow", in_path: false, meaning: "1: stream instead of list" },
        ],
        request: None,
        response: Body::JsonList(shape::<EventRecord>()),
        cli: "hearth events NAME [--follow]",
        errors: &[],
    },
    Route {
        id: RouteId::Explain,
        method: Method::Get,
        path: "/v1/explain",
        summary: "Show the phases of the last recovery",
        details: "",
        parameters: &[],
        request: None,
        response: Body::Json(shape::<Explanation>()),
        cli: "hearth explain NAME",
        errors: &[],
    },
    Route {
        id: RouteId::Resize,
        method: Method::Post,
        path: "/v1/disks/{name}/resize",
        summary: "Tell the guest that a disk's image was resized",
        details: "Resize the image first, for example with `truncate`.",
        parameters: &[Parameter { name: "name", in_path: true, meaning: "name of the disk" }],
        request: Some(Body::Json(shape::<ResizeRequest>())),
        response: Body::Json(shape::<DiskSize>()),
        cli: "hearth resize NAME DISK",
        errors: &[ErrorWord::NoSuchDisk, ErrorWord::WrongState],
    },
    Route {
        id: RouteId::Config,
        method: Method::Get,
        path: "/v1/config",
        summary: "Show the configuration with all defaults filled in",
        details: "",
        parameters: &[],
        request: None,
        response: Body::JsonObject(
            "the configuration in the keeper's own form, with sizes in bytes and absolute paths; not a machine.toml",
        ),
        cli: "hearth config NAME",
        errors: &[],
    },
    Route {
        id: RouteId::Metrics,
        method: Method::Get,
        path: "/metrics",
        summary: "Show metrics in Prometheus' text format",
        details: "metrics.md lists all metrics.",
        parameters: &[],
        request: None,
        response: Body::Text("text/plain; version=0.0.4"),
        cli: "",
        errors: &[],
    },
];

/// Why a request fits no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    NoSuchPath,
    /// The path exists with this method.
    Method(Method),
}

impl Route {
    pub fn of(id: RouteId) -> &'static Self {
        ROUTES.iter().find(|route| route.id == id).expect("every id stands in the table: a test looks")
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
