//! By what rules replicas are kept, out of the config.

use dormouse_core::time::Nanos;
use dormouse_core::upload::{Class, UploadSettings};
use dormouse_link::config::{self, App, Replication, Span};
use dormouse_replica::follow::Limits;
use dormouse_replica::levels::{Budget, LevelSettings};

/// By what rules the replicas of this box are kept. Clones share the budget.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) levels: LevelSettings,
    pub(crate) budget: Budget,
    pub(crate) limits: Limits,
}

impl Rules {
    pub(crate) fn of(config: &config::Replica) -> Self {
        let ms = |span: Span| i64::try_from(span.as_millis()).unwrap_or(i64::MAX);
        let bytes = |mib: u32| u64::from(mib) << 20;
        let levels = LevelSettings {
            windows_ms: [ms(config.level_1), ms(config.level_2), ms(config.level_3)],
            snapshot_ms: ms(config.snapshot),
            l0_retention_ms: ms(config.l0_retention),
            retention_ms: ms(config.retention),
            audit_ms: ms(config.audit),
            local_bytes_max: bytes(config.local_mib),
            ..LevelSettings::default()
        };
        let limits = Limits {
            wal_bytes_max: bytes(config.wal_max_mib),
            disk_free_min: bytes(config.disk_free_min_mib),
        };
        Self { levels, budget: Budget::default(), limits }
    }
}

/// Class and bounds of an app's uploads.
pub(crate) fn upload_of(app: &App) -> UploadSettings {
    let class = match app.replication {
        Replication::Stream => Class::Stream,
        Replication::Batched => Class::Batched { every: Nanos::from_secs(30) },
        Replication::Daily => Class::Daily { every: Nanos::from_secs(86_400) },
    };
    UploadSettings { class, ..UploadSettings::default() }
}
