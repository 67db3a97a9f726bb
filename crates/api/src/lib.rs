//! The API of a machine's keeper: what is asked, what is answered, by which route.
//!
//! One table (`routes::ROUTES`) drives the server's dispatch, the client, `docs/api.md` and `docs/openapi.json`, so that
//! none of them can say something else than the others. This crate holds words only: no sockets, no threads, and it
//! knows no other crate of Hearth, so that a client can be built from it alone.

#![warn(missing_docs)]

mod age;
mod dump;
mod error;
mod event;
mod fast_remount;
mod openapi;
mod page;
mod request;
mod routes;
mod status;
mod time;

pub use age::{Age, Growth, QemuAge};
pub use dump::{
    DumpCompression, DumpDiscard, DumpExcluded, DumpFormat, DumpRequest, DumpResume, DumpState, DumpStatus,
};
pub use error::{ApiError, ErrorWord};
pub use event::{EventKind, EventRecord};
pub use fast_remount::{MissedRun, PlannedRun, ReadyRequest, RemountDisk, RemountLater, RemountPlan, RemountVolume};
pub use openapi::openapi;
pub use page::page;
pub use request::{
    Accepted, CopyDiskCancel, CopyDiskRequest, CopyDiskTake, CrashMethod, CrashRequest, DiskSize, DomainCrashed,
    DomainEnded, DomainHarvested, DomainReset, DomainStarts, FreezeRequest, ParkRequest, RebootRequest,
    RejuvenateRequest, ResizeRequest, SaveCancel, SaveRequest, SaveThen, ScanRequest, StopRequest, UpgradeRequest,
};
pub use routes::{Body, Call, Method, Mismatch, Order, OrderId, Parameter, ROUTES, Resource, Route, RouteId};
pub use status::{
    AdmissionStatus, ArrivalStatus, DiskStatus, EmberMode, EmberStatus, EndCause, Explanation, FrozenStatus,
    KeeperStatus, MachineState, MachineStatus, MemoryStatus, NetStatus, NvramDevice, NvramStatus, PendingChange,
    PendingUntil, PhaseTime, QemuStatus, Recovery, RefillStatus, Refused, Rejuvenation, RestoreStatus, SaveStatus,
    ScanStatus, Unparked, UserfaultStatus,
};
pub use time::{milliseconds_of, rfc3339};
