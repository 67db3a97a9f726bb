//! Error text: an error and its causes as one line, for events, logs and answers of the API.
//!
//! Every crate that reports errors needs this, and ground crates know nothing of each other.

#![warn(missing_docs)]

use std::error::Error;

/// The error and all its causes, separated by colons: `cannot prepare /images: disk full`.
pub fn chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug)]
    struct Failed(&'static str, Box<dyn Error>);

    impl std::fmt::Display for Failed {
        fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            formatter.write_str(self.0)
        }
    }

    impl Error for Failed {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(self.1.as_ref())
        }
    }

    #[test]
    fn chain_includes_all_causes() {
        let disk = Failed("cannot write", Box::new(io::Error::other("disk on fire")));
        assert_eq!(chain(&Failed("save failed", Box::new(disk))), "save failed: cannot write: disk on fire");
        assert_eq!(chain(&io::Error::other("alone")), "alone");
    }
}
