//! HTTP: carries the requests of `object_store` with ureq, which is blocking: each on a thread of the runtime's.
//!
//! Bodies are taken whole, in both directions: whoever asks, asks for ranges. So a connection that breaks in the middle of one is a
//! request that failed, and is tried again as any other.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::BodyExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use ureq::Agent;
use ureq::tls::{RootCerts, TlsConfig, TlsProvider};

const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// For a whole exchange: a request of some MiB at 100 KiB/s.
const EXCHANGE_PATIENCE: Duration = Duration::from_secs(60);
/// A store that says nothing for so long will not.
const ANSWER_PATIENCE: Duration = Duration::from_secs(15);
/// No range that is asked for is longer; nor is an error or a list.
const BODY_BYTES_MAX: u64 = 64 << 20;
/// In flight at once, and kept.
const CONNECTIONS: usize = 16;

/// TLS with the host's own list of whom to trust, and the one implementation of its ciphers that is linked.
pub fn trusting_the_host() -> TlsConfig {
    TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .root_certs(RootCerts::PlatformVerifier)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build()
}

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
        let exchange = tokio::task::spawn_blocking(move || exchange(&agent, head, &body));
        exchange.await.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?
    }
}

fn exchange(agent: &Agent, head: ::ureq::http::request::Parts, body: &Bytes) -> Result<HttpResponse, HttpError> {
    // Given as none, a body of nothing is not announced either, which GET and HEAD must not do.
    let answer = if body.is_empty() && head.method != "PUT" && head.method != "POST" {
        agent.run(ureq::http::Request::from_parts(head, ()))
    } else {
        agent.run(ureq::http::Request::from_parts(head, &body[..]))
    };
    let (head, mut body) = answer.map_err(failure)?.into_parts();
    let bytes = body.with_config().limit(BODY_BYTES_MAX).read_to_vec().map_err(failure)?;
    Ok(HttpResponse::from_parts(head, bytes.into()))
}

/// The kind says whether it is worth another attempt.
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
