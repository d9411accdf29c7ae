//! Pure HTTP/1.1 and connection state: bytes in, bytes out, and what to wait for.
//!
//! - [`host`]: canonical host names.
//! - [`request`], [`response`]: strict heads, and the heads that are sent on.
//! - [`body`]: message bodies, decoded and framed anew while they stream.
//! - [`answer`]: what the proxy itself says.
//! - [`conn`]: one client connection with at most one upstream, as a state machine.
//!
//! Opens no socket, reads no clock, knows no runtime, and never panics on foreign bytes.

pub mod answer;
pub mod body;
pub mod buffer;
mod chunked;
pub mod conn;
mod exchange;
mod fields;
mod frames;
pub mod host;
pub mod request;
pub mod response;
mod tunnel;

pub use answer::{Answer, Reject};
pub use buffer::Buffer;
pub use conn::{Conn, Settings, Step, Timer};
pub use host::Host;
pub use request::{Peer, Request};
