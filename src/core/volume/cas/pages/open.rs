//! The start: reads the pages of locations, from the root down, and the pages that stay in memory.

use super::cache::is_resident;
use super::tree::Tree;
use super::{BadPage, BadSpace, PageLoad};
use crate::format::cas::{CasKey, PageName, PageSpace, RawCasPage, SPACES, SpaceRoot};
use std::collections::VecDeque;
use std::ops::Range;

/// Pages of a volume that starts.
pub(in crate::volume::cas) struct Opening {
    pub(super) key: CasKey,
    pub(super) trees: [Tree; SPACES],
    /// Resident pages that were read.
    pub(super) resident: Vec<(PageName, Box<RawCasPage>)>,
    to_read: VecDeque<PageLoad>,
    /// Handed out by [`Opening::next_to_read`] and not taken in.
    reading: usize,
    /// Numbers of loads.
    loads: u64,
}

impl Opening {
    /// Begins with what a root says.
    ///
    /// # Errors
    /// When it contradicts itself.
    pub(in crate::volume::cas) fn new(
        key: CasKey,
        spaces: &[SpaceRoot; SPACES],
    ) -> Result<Opening, BadSpace> {
        let mut trees = Vec::with_capacity(SPACES);
        for (space, root) in PageSpace::ALL.into_iter().zip(spaces) {
            trees.push(Tree::of_root(space, root).ok_or(BadSpace { space })?);
        }
        let Ok(trees) = trees.try_into() else { unreachable!("a tree for each space") };
        let (resident, to_read) = (Vec::new(), VecDeque::new());
        let mut opening = Opening { key, trees, resident, to_read, reading: 0, loads: 0 };
        for (space, root) in PageSpace::ALL.into_iter().zip(spaces) {
            opening.read_level(space, root.height, 0..root.top.len() as u64);
        }
        Ok(opening)
    }

    fn read_level(&mut self, space: PageSpace, level: u8, indexes: Range<u64>) {
        if level == 0 && !is_resident(space) {
            return;
        }
        for index in indexes {
            if let Some(at) = self.trees[space as usize].location(level, index) {
                self.loads += 1;
                let name = PageName { space, level, index };
                self.to_read.push_back(PageLoad { name, at, number: self.loads });
            }
        }
    }

    /// A page to be read next; any number may be under way. None while all wait for others, and at the end.
    pub(in crate::volume::cas) fn next_to_read(&mut self) -> Option<PageLoad> {
        let load = self.to_read.pop_front()?;
        self.reading += 1;
        Some(load)
    }

    /// Takes in the bytes of a page of [`Opening::next_to_read`].
    ///
    /// # Errors
    /// When they are not this page. It may be read again.
    pub(in crate::volume::cas) fn loaded(&mut self, load: PageLoad, bytes: &[u8]) -> Result<(), BadPage> {
        let PageLoad { name, at, .. } = load;
        let page = RawCasPage::open(bytes, &self.key, name).ok_or(BadPage { name, at })?;
        if name.level == 0 {
            self.resident.push((name, page));
        } else {
            let tree = &mut self.trees[name.space as usize];
            let below = tree.take_in(name.level, name.index, &page).ok_or(BadPage { name, at })?;
            self.read_level(name.space, name.level - 1, below);
        }
        self.reading -= 1;
        Ok(())
    }

    /// Whether all is read.
    pub(in crate::volume::cas) fn is_complete(&self) -> bool {
        self.to_read.is_empty() && self.reading == 0
    }
}
