//! io_uring and its epoll twin behind one trait. Custody of tokio-uring's traps; knows no HTTP.
