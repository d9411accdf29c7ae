//! What an answer, or the lack of one, says about a request.
//!
//! What may have been carried out is never called failed: a time-out, a cut connection, and a
//! server error that does not say "slow down" are unknown.

use std::error::Error;
use std::fmt::Write as _;
use std::io::ErrorKind;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};

use crate::port::{DeleteOutcome, PutOutcome, ReadError};

/// Longest quote of a store's own words.
const QUOTE_BYTES: usize = 300;

/// How a request ended that did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    ConditionFailed,
    Conflict,
    NotFound,
    /// 416: the object is shorter than the range's start.
    OutOfRange,
    /// It may have been carried out, or may be later.
    Unknown(String),
    /// For good, until somebody changes something.
    Refused(String),
    /// Not carried out; a repeat may succeed.
    Broken(String),
}

/// Where a store is, for people. Knows no secret.
#[derive(Clone, Debug)]
pub(crate) struct Whereabouts {
    pub(crate) bucket: String,
    /// The endpoint, or the region of AWS.
    pub(crate) endpoint: String,
    /// Where the keys come from.
    pub(crate) keys: String,
}

impl Whereabouts {
    pub(crate) fn failure<E>(&self, error: &SdkError<E, HttpResponse>) -> Failure
    where
        E: ProvideErrorMetadata + Error + 'static,
    {
        match error {
            SdkError::ServiceError(answer) => {
                let status = answer.raw().status().as_u16();
                self.answered(status, answer.err().code(), answer.err().message())
            }
            SdkError::TimeoutError(_) => {
                Failure::Unknown(format!("no answer in time from {}", self.endpoint))
            }
            SdkError::ResponseError(_) => Failure::Unknown(format!(
                "a damaged answer from {}: {}",
                self.endpoint,
                chain(error)
            )),
            SdkError::DispatchFailure(failure) => {
                // The only time-out of a connector is that of a connection's making.
                self.not_answered(error, failure.is_timeout())
            }
            SdkError::ConstructionFailure(_) => self.not_answered(error, true),
            _ => Failure::Unknown(chain(error)),
        }
    }

    fn not_answered(&self, error: &(dyn Error + 'static), never_sent: bool) -> Failure {
        let words = format!("{}: {}", self.endpoint, chain(error));
        if let Some(missing) = source::<CredentialsError>(error) {
            let words = format!("no keys for the store from {}: {}", self.keys, chain(missing));
            let for_good = matches!(
                missing,
                CredentialsError::CredentialsNotLoaded(_)
                    | CredentialsError::InvalidConfiguration(_)
            );
            return if for_good { Failure::Refused(words) } else { Failure::Broken(words) };
        }
        let refused = source::<std::io::Error>(error).is_some_and(|io| {
            matches!(
                io.kind(),
                ErrorKind::ConnectionRefused
                    | ErrorKind::HostUnreachable
                    | ErrorKind::NetworkUnreachable
                    | ErrorKind::AddrNotAvailable
            )
        });
        // Its own type is private to the SDK.
        let no_name = words.contains("dns error");
        if refused || never_sent || no_name {
            Failure::Broken(words)
        } else {
            Failure::Unknown(words)
        }
    }

    /// Judges an error answer by its code where it has one, else by its status.
    pub(crate) fn answered(&self, status: u16, code: Option<&str>, said: Option<&str>) -> Failure {
        let Self { bucket, endpoint, keys } = self;
        let words = format!(
            "{endpoint} answered {status} {}: {}",
            code.unwrap_or("without a code"),
            quote(said.unwrap_or("nothing"))
        );
        let refused = |advice: &str| Failure::Refused(format!("{words}; {advice}"));
        let bad_keys = || {
            refused(&format!(
                "check the keys (from {keys}), that bucket {bucket} is there, and that they may \
                 read, write, delete and list in it"
            ))
        };
        match code.unwrap_or_default() {
            "PreconditionFailed" => return Failure::ConditionFailed,
            "ConditionalRequestConflict" | "OperationAborted" => return Failure::Conflict,
            "NoSuchBucket" => {
                let why = format!("bucket {bucket} does not exist at {endpoint}: create it");
                return Failure::Refused(why);
            }
            "RequestTimeTooSkewed" | "RequestExpired" => {
                return refused("the clock of this machine is wrong: set it, by NTP for example");
            }
            "InvalidAccessKeyId" | "SignatureDoesNotMatch" | "ExpiredToken" | "InvalidToken" => {
                return bad_keys();
            }
            "PermanentRedirect" | "AuthorizationHeaderMalformed" | "TemporaryRedirect" => {
                return refused("the bucket is in another region: set store.region or endpoint");
            }
            "SlowDown"
            | "ServiceUnavailable"
            | "TooManyRequests"
            | "ThrottlingException"
            | "Throttling"
            | "RequestLimitExceeded"
            | "RequestTimeout"
            | "BadDigest"
            | "XAmzContentChecksumMismatch" => return Failure::Broken(words),
            _ => (),
        }
        match status {
            412 => Failure::ConditionFailed,
            409 => Failure::Conflict,
            404 => Failure::NotFound,
            416 => Failure::OutOfRange,
            // 408: the store gave up on a request that did not come.
            408 | 429 => Failure::Broken(words),
            401 | 403 => bad_keys(),
            501 => refused("the store lacks what Dormouse needs: use another one"),
            300..=399 => refused("the bucket is elsewhere: set store.region or store.endpoint"),
            400..=499 => refused("the store does not take the request"),
            // A proxy before the store may have passed it on; an error inside a 200 is that of the
            // end of a PUT in parts.
            _ => Failure::Unknown(words),
        }
    }
}

impl Failure {
    /// Whether the same request may succeed a moment later, if it may be sent twice at all.
    pub(crate) const fn passes(&self) -> bool {
        match self {
            Self::Unknown(_) | Self::Broken(_) => true,
            Self::ConditionFailed
            | Self::Conflict
            | Self::NotFound
            | Self::OutOfRange
            | Self::Refused(_) => false,
        }
    }

    /// Of a request without which the object is not written: it is certain that it is not.
    pub(crate) fn certain(self) -> Self {
        match self {
            Self::Unknown(why) => Self::Broken(why),
            Self::NotFound => Self::Broken("the upload in parts is gone".to_owned()),
            Self::ConditionFailed
            | Self::Conflict
            | Self::OutOfRange
            | Self::Refused(_)
            | Self::Broken(_) => self,
        }
    }

    pub(crate) fn of_put(self) -> PutOutcome {
        match self {
            Self::ConditionFailed => PutOutcome::ConditionFailed,
            Self::Conflict => PutOutcome::Conflict,
            Self::Unknown(why) => PutOutcome::Unknown { why },
            Self::Refused(why) => PutOutcome::Refused { why },
            Self::Broken(why) => PutOutcome::Broken { why },
            Self::NotFound => PutOutcome::Broken { why: "404 for a PUT".to_owned() },
            Self::OutOfRange => PutOutcome::Broken { why: "416 for a PUT".to_owned() },
        }
    }

    pub(crate) fn of_delete(self) -> DeleteOutcome {
        match self {
            Self::ConditionFailed => DeleteOutcome::ConditionFailed,
            Self::Conflict => DeleteOutcome::Conflict,
            Self::Unknown(why) => DeleteOutcome::Unknown { why },
            Self::Refused(why) => DeleteOutcome::Refused { why },
            Self::Broken(why) => DeleteOutcome::Broken { why },
            Self::NotFound => DeleteOutcome::Done,
            Self::OutOfRange => DeleteOutcome::Broken { why: "416 for a DELETE".to_owned() },
        }
    }

    pub(crate) fn of_read(self, key: &str) -> ReadError {
        let key = key.to_owned();
        match self {
            Self::NotFound => ReadError::NotFound { key },
            Self::Unknown(why) => ReadError::Unknown { key, why },
            Self::Refused(why) => ReadError::Refused { key, why },
            Self::Broken(why) => ReadError::Broken { key, why },
            Self::ConditionFailed | Self::Conflict => {
                ReadError::Broken { key, why: "it changed while it was read".to_owned() }
            }
            Self::OutOfRange => {
                ReadError::Broken { key, why: "it is shorter than the range".to_owned() }
            }
        }
    }
}

/// An error with its causes; none of them says a header or a body.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        // Writing to a String cannot fail.
        write!(text, ": {cause}").ok();
        next = cause.source();
    }
    quote(&text)
}

fn source<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(found) = cause.downcast_ref() {
            return Some(found);
        }
        next = cause.source();
    }
    None
}

fn quote(text: &str) -> String {
    let end = text.char_indices().map(|(at, _)| at).find(|at| *at >= QUOTE_BYTES);
    end.map_or_else(|| text.to_owned(), |end| format!("{}…", text.get(..end).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at() -> Whereabouts {
        let text = str::to_owned;
        Whereabouts { bucket: text("b"), endpoint: text("http://e"), keys: text("/keys.toml") }
    }

    #[test]
    fn each_answer_has_its_meaning() {
        type Wanted = fn(&Failure) -> bool;
        let condition: Wanted = |f| *f == Failure::ConditionFailed;
        let conflict: Wanted = |f| *f == Failure::Conflict;
        let unknown: Wanted = |f| matches!(f, Failure::Unknown(_));
        let refused: Wanted = |f| matches!(f, Failure::Refused(_));
        let broken: Wanted = |f| matches!(f, Failure::Broken(_));
        let absent: Wanted = |f| *f == Failure::NotFound;
        for (status, code, wanted) in [
            (412, None, condition),
            (200, Some("PreconditionFailed"), condition),
            (409, Some("ConditionalRequestConflict"), conflict),
            (409, None, conflict),
            (404, Some("NoSuchKey"), absent),
            (404, None, absent),
            (404, Some("NoSuchBucket"), refused),
            (403, Some("SignatureDoesNotMatch"), refused),
            (403, Some("RequestTimeTooSkewed"), refused),
            (400, Some("InvalidArgument"), refused),
            (301, Some("PermanentRedirect"), refused),
            (501, Some("NotImplemented"), refused),
            (400, Some("RequestTimeout"), broken),
            (408, None, broken),
            (400, Some("BadDigest"), broken),
            (503, Some("SlowDown"), broken),
            (429, None, broken),
            (503, None, unknown),
            (500, Some("InternalError"), unknown),
            (502, None, unknown),
            (504, None, unknown),
            (200, Some("InternalError"), unknown),
        ] {
            let failure = at().answered(status, code, Some("words"));
            assert!(wanted(&failure), "{status} {code:?}: {failure:?}");
        }
    }

    #[test]
    fn a_refusal_says_what_where_and_what_to_do() {
        for (status, code, says) in [
            (404, "NoSuchBucket", "bucket b does not exist at http://e: create it"),
            (403, "RequestTimeTooSkewed", "clock of this machine is wrong"),
            (403, "AccessDenied", "check the keys (from /keys.toml)"),
            (400, "ExpiredToken", "check the keys (from /keys.toml)"),
            (301, "PermanentRedirect", "store.region"),
        ] {
            let failure = at().answered(status, Some(code), None);
            let Failure::Refused(why) = failure else { panic!("{code}: {failure:?}") };
            assert!(why.contains(says), "{why}");
        }
    }

    #[test]
    fn long_words_of_a_store_are_cut() {
        assert_eq!(quote(&"ü".repeat(1000)).chars().count(), QUOTE_BYTES / 2 + 1);
        assert_eq!(quote("short"), "short");
    }
}
