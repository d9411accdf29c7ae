//! Pure HTTP/1.1 and connection state. Opens no socket, reads no clock, knows no runtime.
