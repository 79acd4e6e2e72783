//! Patterns with stars, over lists of anything: characters of a name, symbols of a subject. Pure.

/// Whether `pattern`, in which each item equal to `any` stands for any items or none, matches the
/// whole of `text`. Takes at most as many steps as the product of their lengths.
pub(super) fn matches_stars<T: PartialEq>(pattern: &[T], text: &[T], any: &T) -> bool {
    let (mut p, mut t) = (0, 0);
    // The place of the last star, and the end of the text that it stands for.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(any) {
            star = Some((p, t));
            p += 1;
        } else if pattern.get(p) == Some(&text[t]) {
            (p, t) = (p + 1, t + 1);
        } else if let Some((at, reach)) = star {
            star = Some((at, reach + 1));
            (p, t) = (at + 1, reach + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|item| item == any)
}
