//! The SDK's client, by our settings alone: no endpoint, retry or time-out of the environment.

use aws_config::default_provider::credentials::DefaultCredentialsChain;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, Config, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    SharedCredentialsProvider, StalledStreamProtectionConfig,
};

use super::credentials::{CredentialsFileError, FromFile, read};
use super::settings::{Checksums, KeySource, S3Settings};

pub(super) async fn client(settings: &S3Settings) -> Result<Client, CredentialsFileError> {
    let region = Region::new(settings.region.clone());
    let keys = match &settings.keys {
        KeySource::File(path) => {
            read(path)?;
            SharedCredentialsProvider::new(FromFile(path.clone()))
        }
        KeySource::Chain => SharedCredentialsProvider::new(
            DefaultCredentialsChain::builder().region(region.clone()).build().await,
        ),
    };
    let (sent, received) = match settings.checksums {
        Checksums::WhenSupported => {
            (RequestChecksumCalculation::WhenSupported, ResponseChecksumValidation::WhenSupported)
        }
        Checksums::WhenRequired => {
            (RequestChecksumCalculation::WhenRequired, ResponseChecksumValidation::WhenRequired)
        }
    };
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(settings.connect_timeout)
        .operation_attempt_timeout(settings.request_timeout)
        .build();
    let mut config = Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(region)
        .credentials_provider(keys)
        .force_path_style(settings.path_style)
        // A repeated PUT whose first answer was lost fails against itself: callers repeat.
        .retry_config(RetryConfig::disabled())
        .timeout_config(timeouts)
        // Ours end a body that does not come; this one would end it with other words.
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .request_checksum_calculation(sent)
        .response_checksum_validation(received);
    config.set_endpoint_url(settings.endpoint.clone());
    Ok(Client::from_conf(config.build()))
}
