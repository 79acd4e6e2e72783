//! The log: to standard error, for people or as JSON. Never user data.

use super::config::LogFormat;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

/// Environment variable with the filter ("debug", "calpe::member=trace").
pub const LOG_VARIABLE: &str = "CALPE_LOG";

/// Starts logging; `level` is what is logged when the environment does not say. Later calls do nothing.
pub fn start(format: LogFormat, level: LevelFilter) {
    let filter = EnvFilter::try_from_env(LOG_VARIABLE).unwrap_or_else(|_| EnvFilter::new(level.to_string()));
    let stderr = std::io::stderr;
    let colours = std::io::IsTerminal::is_terminal(&stderr());
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr).with_ansi(colours);
    // Fails only when a log is there already.
    let _ = match format {
        LogFormat::Human => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
