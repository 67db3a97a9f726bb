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
        summary: "The machine as it is now",
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
        summary: "End the living incarnation and start the next one",
        details: "Warm unless `cold` is true. The guest is asked by its power button to shut down, and has a minute to \
                  do so; with `force` it is not asked, and its file systems are as after a power cut.",
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
        details: "The guest is asked by its power button, and has a minute; with `force` QEMU is ended at once. Nothing is kept.",
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
        details: "The guest must be set up for it: see the field `method`.",
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
        summary: "Dump the memory of a guest that runs or is paused",
        details: "The guest runs on, unless `pause` is true. `dumps` of the status and the events say how far the dump is.",
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
        summary: "Go on with a dump that waits",
        details: "After its reason is gone: make room on the disk first.",
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
        summary: "Give up what dumps have not written yet, and release its memory",
        details: "The file stays, marked incomplete, and can be read as far as it goes.",
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
        details: "The guest stands still for some milliseconds. The event `rejuvenated` tells that it goes on with the \
                  new QEMU; `rejuvenation_failed` that it goes on with the old one, and why.",
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
        summary: "Let another program go on as the machine's keeper",
        details: "The guest runs on; its disks stand still for about a second. The new program is asked first, and if it would \
                  not go on with the machine nothing happens. Then this keeper becomes the new one, in the same process: the \
                  API is away for a moment. `keeper_took_over` tells that it is done, `keeper_upgrade_failed` that the old \
                  program goes on, and why.",
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
        summary: "Leave the guest in memory, and end QEMU and keeper",
        details: "`parked` tells that it is done, and the API ends; `park_failed` that the guest goes on, and why. The next \
                  keeper, perhaps under another host kernel, lets the guest go on. With `check` nothing happens: an error \
                  says why it could not be done now.",
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
        summary: "How old QEMU is, and what speaks for another one",
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
        details: "The guest runs meanwhile, and stands still for the one moment that is saved. `save` of the status and the events say how far it is; `saved` tells that \
                  the folder can be restored, `save_failed` that there is none, and why. Either way the guest goes on, unless \
                  `then` is `stop` and all went well.",
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
        summary: "Call off a save that is under way",
        details: "Nothing is left of it, and the guest goes on.",
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
        summary: "The guest has done what it boots for: its boot set is complete",
        details: "For scripts: what the machine read from its disks since its reset is held in memory for its next boot. Saying \
                  it again changes nothing.",
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
        summary: "What the next boot will read, how much of it is held, and how the last one went",
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
        summary: "What happened to the machine",
        details: "A JSON list, oldest first. With `follow=1`, or with `Accept: text/event-stream`, the answer is a stream \
                  of server-sent events that does not end: `id` is the sequence, `event` the kind, `data` the record. \
                  A comment line every 15 seconds keeps it alive. A reader that is too slow gets a `gap` record with \
                  the number of events it missed. `Last-Event-ID` works like `since`.",
        parameters: &[
            Parameter { name: "since", in_path: false, meaning: "only events with a greater sequence" },
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
        summary: "The last recovery, phase by phase",
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
        summary: "Look again how large a disk's image is, and tell the guest",
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
        summary: "The configuration as the keeper understood it, defaults filled in",
        details: "",
        parameters: &[],
        request: None,
        response: Body::JsonObject(
            "the configuration in the keeper's own form: sizes in bytes, paths absolute; no machine.toml",
        ),
        cli: "hearth config NAME",
        errors: &[],
    },
    Route {
        id: RouteId::Metrics,
        method: Method::Get,
        path: "/metrics",
        summary: "Metrics in Prometheus' text format",
        details: "All of them are listed in metrics.md.",
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
