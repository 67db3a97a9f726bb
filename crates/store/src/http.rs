//! HTTP: sends the requests of `object_store` with ureq. ureq blocks, so each request runs on a thread of the runtime.
//!
//! Bodies are transferred whole in both directions, because callers ask for ranges. So a connection that breaks inside
//! a body is a failed request, and is retried like any other.
//!
//! Dropping a request does not end it: its thread continues, and an unwanted object may arrive after its removal. So a
//! request that may be cancelled runs under a `CancelToken`. When that is cancelled, a request ends inside its body, and the
//! store makes no object of it. Once the whole body has been sent, the answer must be awaited.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::BodyExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use ureq::http::header::CONTENT_LENGTH;
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};
use ureq::{Agent, SendBody};

/// Timeout of a connection attempt.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// Timeout of a whole exchange: a request of some MiB at 100 KiB/s.
const EXCHANGE_PATIENCE: Duration = Duration::from_secs(60);
/// Timeout of the answer's head.
const ANSWER_PATIENCE: Duration = Duration::from_secs(15);
/// Maximum size of an answer's body: more than any range, error or list has.
const BODY_BYTES_MAX: u64 = 64 << 20;
/// Maximum number of idle connections.
const CONNECTIONS: usize = 16;

tokio::task_local! {
    static LEASH: CancelToken;
}

/// Cancels the requests of one piece of work.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<Held>);

#[derive(Debug, Default)]
struct Held {
    cancelled: AtomicBool,
    under_way: AtomicUsize,
}

impl CancelToken {
    /// Runs `work` with its requests under this leash.
    pub async fn hold<T>(&self, work: impl Future<Output = T>) -> T {
        LEASH.scope(self.clone(), work).await
    }

    /// Cancels the requests: none begins any more, and bodies that are being sent end.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, SeqCst);
    }

    /// Whether a request is in flight whose result the work does not know yet.
    pub fn is_under_way(&self) -> bool {
        self.0.under_way.load(SeqCst) > 0
    }
}

/// A request in flight.
#[derive(Debug)]
struct RequestGuard(Arc<Held>);

impl RequestGuard {
    fn begin() -> Result<Self, HttpError> {
        let CancelToken(held) = LEASH.try_with(CancelToken::clone).unwrap_or_default();
        held.under_way.fetch_add(1, SeqCst);
        let leashed = Self(held);
        // `object_store` does not retry errors of this kind.
        leashed.must_go_on().map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        Ok(leashed)
    }

    fn must_go_on(&self) -> io::Result<()> {
        if self.0.cancelled.load(SeqCst) { Err(io::Error::other("it was cancelled")) } else { Ok(()) }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, SeqCst);
    }
}

/// The part of the body that is still to be sent.
struct Rest<'a> {
    bytes: &'a [u8],
    leashed: &'a RequestGuard,
}

impl Read for Rest<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if !self.bytes.is_empty() {
            self.leashed.must_go_on()?;
        }
        self.bytes.read(into)
    }
}

/// TLS with the host's trust store and the only implementation of the ciphers that is linked.
pub fn trusting_the_host() -> TlsConfig {
    TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .root_certs(RootCerts::PlatformVerifier)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build()
}

/// Makes ureq clients for `object_store`.
#[derive(Debug)]
pub struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp).as_deref() == Some("true");
        let agent = Agent::config_builder()
            .tls_config(trusting_the_host())
            .https_only(!allows_http)
            .timeout_global(Some(EXCHANGE_PATIENCE))
            .timeout_connect(Some(CONNECT_PATIENCE))
            .timeout_recv_response(Some(ANSWER_PATIENCE))
            .max_idle_connections(CONNECTIONS)
            .max_idle_connections_per_host(CONNECTIONS)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .build()
            .new_agent();
        Ok(HttpClient::new(Service(agent)))
    }
}

#[derive(Debug)]
struct Service(Agent);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let agent = self.0.clone();
        let leashed = RequestGuard::begin()?;
        // The request counts as in flight until its answer is taken here.
        let exchange = tokio::task::spawn_blocking(move || (exchange(&agent, head, &body, &leashed), leashed));
        let (answer, _leashed) = exchange.await.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        answer
    }
}

fn exchange(
    agent: &Agent,
    mut head: ::ureq::http::request::Parts,
    body: &Bytes,
    leashed: &RequestGuard,
) -> Result<HttpResponse, HttpError> {
    // An empty body is passed as no body, because GET and HEAD must not announce one.
    let answer = if body.is_empty() && head.method != "PUT" && head.method != "POST" {
        agent.run(ureq::http::Request::from_parts(head, ()))
    } else {
        head.headers.insert(CONTENT_LENGTH, body.len().into());
        let mut rest = Rest { bytes: body, leashed };
        agent.run(ureq::http::Request::from_parts(head, SendBody::from_reader(&mut rest)))
    };
    let (head, mut body) = answer.map_err(failure)?.into_parts();
    let bytes = body.with_config().limit(BODY_BYTES_MAX).read_to_vec().map_err(failure)?;
    Ok(HttpResponse::from_parts(head, bytes.into()))
}

/// Converts an error; its kind decides whether `object_store` retries.
fn failure(error: ureq::Error) -> HttpError {
    let kind = match &error {
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed => HttpErrorKind::Connect,
        ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => HttpErrorKind::Connect,
        ureq::Error::Timeout(_) => HttpErrorKind::Timeout,
        ureq::Error::Io(_) | ureq::Error::Protocol(_) => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Unknown,
    };
    HttpError::new(kind, error)
}
