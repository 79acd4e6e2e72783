//! Counts with their noun, in the singular after 1. Must not know what is counted.

use std::fmt;

/// A count with its noun: `Count(1, "error")` reads "1 error", `Count(2, "error")` "2 errors".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count<'n>(pub u64, pub &'n str);

impl<'n> Count<'n> {
    /// A count of things in memory.
    #[must_use]
    pub fn of(count: usize, noun: &'n str) -> Count<'n> {
        Count(count as u64, noun)
    }

    /// "is" or "are".
    #[must_use]
    pub fn are(self) -> &'static str {
        self.one_or("is", "are")
    }

    /// "was" or "were".
    #[must_use]
    pub fn were(self) -> &'static str {
        self.one_or("was", "were")
    }

    fn one_or(self, one: &'static str, many: &'static str) -> &'static str {
        if self.0 == 1 { one } else { many }
    }
}

impl fmt::Display for Count<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Count(count, noun) = self;
        let ending = match count {
            1 => "",
            _ if noun.ends_with("ch") => "es",
            _ => "s",
        };
        write!(f, "{count} {noun}{ending}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular_and_all_others_are_plural() {
        let told = [0, 1, 2].map(|count| Count(count, "error").to_string());
        assert_eq!(told, ["0 errors", "1 error", "2 errors"]);
        assert_eq!([1, 3].map(|n| Count(n, "batch").to_string()), ["1 batch", "3 batches"]);
        assert_eq!([1, 3].map(|n| Count::of(n, "file").are()), ["is", "are"]);
        assert_eq!([1, 3].map(|n| Count::of(n, "file").were()), ["was", "were"]);
    }
}
