//! PUTs of LTX files, write-once, with their nonce; and whose file stands under a name.

use std::path::Path;

use dormouse_core::ids::{Host, Nonce};
use dormouse_core::upload::{PutAnswer, Standing};
use dormouse_store::{Body, Condition, LtxKey, Metadata, PutOutcome, ReadError, Store};

/// Metadata: the nonce of this very file.
pub const META_NONCE: &str = "dormouse-nonce";
/// Metadata: the file is a fence, and must never be deleted.
pub const META_FENCE: &str = "dormouse-fence";
/// Metadata: what Litestream reads for a restore to a time.
pub const META_TIMESTAMP: &str = "litestream-timestamp";

/// What a PUT of an LTX file carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing special.
    Plain,
    /// A fence, or a full image that serves as one.
    Fence,
}

/// Where a host's files are.
#[derive(Clone, Debug)]
pub struct Place<S> {
    /// The store.
    pub store: S,
    /// Prefix of all keys.
    pub prefix: String,
    /// The host.
    pub host: Host,
}

impl<S: Store> Place<S> {
    /// The whole key of a file.
    #[must_use]
    pub fn key(&self, file: &LtxKey) -> String {
        self.store.layout().ltx_key(&self.prefix, &self.host, file)
    }

    /// Sends a file under a name that must be free.
    pub async fn put(
        &self,
        file: &LtxKey,
        path: &Path,
        nonce: &Nonce,
        timestamp_ms: i64,
        kind: Kind,
    ) -> (PutAnswer, String) {
        let mut metadata: Metadata = [
            (META_NONCE.to_owned(), nonce.0.clone()),
            (META_TIMESTAMP.to_owned(), rfc3339(timestamp_ms)),
        ]
        .into();
        if kind == Kind::Fence {
            metadata.insert(META_FENCE.to_owned(), "1".to_owned());
        }
        let body = Body::File(path.to_owned());
        match self.store.put(&self.key(file), body, Condition::IfAbsent, metadata).await {
            PutOutcome::Done { etag } => (PutAnswer::Done { etag }, String::new()),
            PutOutcome::ConditionFailed => (PutAnswer::ConditionFailed, String::new()),
            PutOutcome::Conflict => (PutAnswer::Again, "a concurrent write".to_owned()),
            PutOutcome::Unknown { why } => (PutAnswer::Unknown, why),
            PutOutcome::Broken { why } => (PutAnswer::Again, why),
            PutOutcome::Refused { why } => (PutAnswer::Refused, why),
        }
    }

    /// What stands under a file's name.
    pub async fn standing(&self, file: &LtxKey) -> Standing {
        match self.store.head(&self.key(file)).await {
            Ok(meta) => Standing::File {
                nonce: meta.metadata.get(META_NONCE).map(|text| Nonce(text.clone())),
                etag: meta.etag,
            },
            Err(ReadError::NotFound { .. }) => Standing::Absent,
            Err(
                ReadError::Unknown { .. } | ReadError::Refused { .. } | ReadError::Broken { .. },
            ) => Standing::Unclear,
        }
    }
}

/// `2026-12-01T09:22:47.626Z`: UTC with milliseconds, as Litestream writes it.
#[must_use]
pub fn rfc3339(ms: i64) -> String {
    let (days, ms_of_day) = (ms.div_euclid(86_400_000), ms.rem_euclid(86_400_000));
    // Civil date of a day number (H. Hinnant, "chrono-compatible low-level date algorithms").
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let seconds = ms_of_day / 1000;
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60,
        ms_of_day % 1000
    )
}

/// Milliseconds since 1970 of a time as RFC 3339 has it, UTC or with an offset; none for anything
/// else, and for dates that no calendar has.
#[must_use]
pub fn parse_rfc3339(text: &str) -> Option<i64> {
    let (date, time) = text.trim().split_once(['T', 't', ' '])?;
    let mut parts = date.split('-').map(digits);
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let zone = time.find(['Z', 'z', '+', '-'])?;
    let (time, zone) = time.split_at(zone);
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut clock = time.split(':').map(digits);
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    let is_whole = parts.next().is_none() && clock.next().is_none();
    let is_day = (1..=12).contains(&month) && (1..=31).contains(&day);
    let fits = is_day && hour < 24 && minute < 60 && second <= 60;
    if !is_whole || !fits || fraction.is_empty() || digits(fraction).is_none() {
        return None;
    }
    let millis: String = fraction.chars().chain("000".chars()).take(3).collect();
    let offset_minutes = match zone {
        "Z" | "z" => 0,
        _ => {
            let (hours, minutes) = zone.get(1..)?.split_once(':')?;
            let minutes = digits(hours)?.checked_mul(60)?.checked_add(digits(minutes)?)?;
            if zone.starts_with('-') { -minutes } else { minutes }
        }
    };
    // Day number of a civil date, the inverse of the algorithm above.
    let from_march = year - i64::from(month <= 2);
    let era = from_march.div_euclid(400);
    let year_of_era = from_march.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = era * 146_097 + day_of_era - 719_468;
    let seconds = days * 86_400 + hour * 3600 + (minute - offset_minutes) * 60 + second;
    let ms = seconds.checked_mul(1000)?.checked_add(digits(&millis)?)?;
    // The 31st of a month of 30 days would come back as another day.
    let day_start = rfc3339(days.checked_mul(86_400_000)?);
    day_start.starts_with(&format!("{year:04}-{month:02}-{day:02}T")).then_some(ms)
}

fn digits(text: &str) -> Option<i64> {
    let plain = !text.is_empty() && text.len() <= 9 && text.bytes().all(|b| b.is_ascii_digit());
    if plain { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_litestream_writes_them() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(951_827_696_789), "2000-02-29T12:34:56.789Z");
        assert_eq!(rfc3339(1_796_116_967_626), "2026-12-01T09:22:47.626Z");
        assert_eq!(rfc3339(4_102_444_799_999), "2099-12-31T23:59:59.999Z");
    }

    #[test]
    fn times_are_read_back_with_any_fraction_and_zone() {
        for ms in [0, 951_827_696_789, 1_796_116_967_626, 4_102_444_799_999] {
            assert_eq!(parse_rfc3339(&rfc3339(ms)), Some(ms));
        }
        for (text, ms) in [
            ("2026-12-01T09:22:47Z", 1_796_116_967_000),
            ("2026-12-01T09:22:47.6Z", 1_796_116_967_600),
            ("2026-12-01T09:22:47.626999999Z", 1_796_116_967_626),
            ("2026-12-01T11:22:47+02:00", 1_796_116_967_000),
            ("2026-12-01 04:52:47-04:30", 1_796_116_967_000),
        ] {
            assert_eq!(parse_rfc3339(text), Some(ms), "{text}");
        }
        for bad in [
            "",
            "2026-12-01",
            "2026-13-01T00:00:00Z",
            "2026-02-30T00:00:00Z",
            "2026-12-01T24:00:00Z",
            "2026-12-01T09:22:47",
            "2026-12-01T09:22Z",
            "2026-12-01T09:22:47.Z",
            "2026-12-01T09:22:47+0200",
            "tomorrow",
        ] {
            assert_eq!(parse_rfc3339(bad), None, "{bad}");
        }
    }
}
