//! Byte fuzzing of every parser.
