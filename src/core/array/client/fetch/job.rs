//! Judges a round of a fetch that read much as one job once all of it is here. The job hashes every block,
//! and in the same pass computes what can be had from those bytes: columns that no member has, and what the
//! caller blends from the columns it wants.
//!
//! Nothing is believed sooner than without jobs. A job only computes: its hashes are compared with the
//! expected ones here, and a block that it computed counts only where every block it came from was good.
//! Otherwise it is dropped, as if it had not been computed. Must not know what the bytes are for.

use crate::array::Core;
use crate::array::client::fetch::{BLOCK, Fetch, Fetched, Part, State};
use crate::array::mutation::{Mutation, is_off};
use crate::array::{Array, Urgency};
use crate::block_io::{Buf, BufMut};
use crate::codec::{BlockHasher, CodecJob, CodedColumns, Column, Outputs, Transform};
use crate::units::{BlockHash, ColumnIndex};

/// A combination of wanted parts and of columns at hand, all of the same rows, to be computed while the parts
/// are verified. Tried once: it succeeds when every part of it was read whole and all their blocks are good.
// Plain data: what the operation behind a fetch wants computed.
pub(in crate::array) struct Blend {
    pub transform: Transform,
    /// The inputs of the transform, in order.
    pub inputs: Vec<Ingredient>,
    /// Whether the resulting columns are wanted, or their hashes only.
    pub keeps: bool,
}

pub(in crate::array) enum Ingredient {
    /// A wanted part, by the order of wanting.
    Wanted(usize),
    /// Bytes at hand.
    Known(Buf),
}

/// The result of a [`Blend`]. Hashes are those of blocks, column after column.
// Plain data: given to the operation behind a fetch.
pub(in crate::array) struct Blended {
    /// Hashes of the ingredients at hand.
    pub known_hashes: Vec<BlockHash>,
    /// None when only the hashes are wanted.
    pub outputs: Vec<BufMut>,
    pub output_hashes: Vec<BlockHash>,
}

/// What the job under way was given.
pub(super) struct JobOut {
    /// The part behind each input; none where its bytes were at hand.
    inputs: Vec<Option<usize>>,
    /// How many of the inputs, from the first on, are those of the transform.
    sources: usize,
    yields: Yields,
}

enum Yields {
    Nothing,
    /// Parts that no member has.
    Parts(Vec<usize>),
    Blend,
}

impl Blend {
    fn known_bytes(&self) -> usize {
        let known = |ingredient: &Ingredient| match ingredient {
            Ingredient::Wanted(_) => 0,
            Ingredient::Known(buf) => buf.len(),
        };
        self.inputs.iter().map(known).sum()
    }
}

impl Fetch {
    /// Has `blend` computed on the way; it comes out of [`Fetch::take_blended`].
    pub(crate) fn blend(&mut self, blend: Blend) {
        self.blend = Some(blend);
    }

    /// The blended columns, if the blend succeeded: every block of the parts among their ingredients is good.
    pub(crate) fn take_blended(&mut self) -> Option<Blended> {
        self.blended.take()
    }

    /// The parts to be judged. Empty unless the round was one in bulk.
    fn unjudged(&self) -> Vec<usize> {
        (0..self.parts.len()).filter(|&at| self.parts[at].unjudged.is_some()).collect()
    }

    fn take_column(&mut self, at: usize) -> Column {
        Column::Owned(self.parts[at].buf.take().expect("what was read is here until it is judged"))
    }
}

impl Part {
    fn bytes(&self) -> usize {
        self.rows.len() * BLOCK
    }

    pub(super) fn is_wholly(&self, state: State) -> bool {
        self.blocks.iter().all(|block| *block == state)
    }
}

impl Array {
    /// Whether what this round reads whole is judged as a job.
    pub(super) fn is_bulk(&self, fetch: &Fetch) -> bool {
        let bytes = fetch.round_bytes + fetch.blend.as_ref().map_or(0, Blend::known_bytes);
        let is_much = fetch.batch_small || bytes >= self.core.config.job_bytes_min;
        self.pages.checksums().is_some() && bytes > 0 && is_much
    }

    /// Whether requests of several clients have blocks to be hashed side by side, so that a job pays even for
    /// small reads.
    pub(in crate::array) fn gains_from_batching(&self) -> bool {
        self.core.load.client_ops > 1 && self.pages.checksums().is_some_and(BlockHasher::gains_from_batching)
    }

    /// Gives away what the round has read, if it was much. False: everything that was read is judged.
    pub(super) fn send_fetch_job(&mut self, key: usize, fetch: &mut Fetch) -> bool {
        let is_bulk = self.is_bulk(fetch);
        fetch.round_bytes = 0;
        let blend = fetch.blend.take();
        let Some(hasher) = self.pages.checksums().filter(|_| is_bulk) else { return false };
        let blend = blend.filter(|blend| blend.fits(fetch));
        let unjudged = fetch.unjudged();
        if unjudged.is_empty() && blend.is_none() {
            return false;
        }
        let work = match blend {
            Some(blend) => self.core.blending_job(fetch, blend, &unjudged, hasher),
            None => self.core.recovering_job(fetch, &unjudged, hasher),
        };
        let work = work.unwrap_or_else(|| {
            let inputs = unjudged.iter().map(|&at| fetch.take_column(at)).collect();
            let parts = unjudged.iter().copied().map(Some).collect();
            fetch.job = Some(JobOut { inputs: parts, sources: 0, yields: Yields::Nothing });
            CodecJob { transform: None, hasher: Some(hasher), inputs, outputs: Outputs::Hashed }
        });
        let urgency = if fetch.rules.background { Urgency::Background } else { self.core.client_urgency() };
        self.core.give_away(key, work, urgency);
        true
    }

    /// Takes the end of the fetch's job.
    pub(in crate::array) fn fetch_coded(
        &mut self,
        key: usize,
        fetch: &mut Fetch,
        coded: CodedColumns,
    ) -> Fetched {
        let JobOut { inputs, sources, yields } =
            fetch.job.take().expect("a fetch waits for one job at a time");
        let mut hashes = &coded.hashes[..];
        let mut next_hashes = |bytes: usize| {
            let (these, rest) = hashes.split_at(bytes / BLOCK);
            hashes = rest;
            these
        };
        assert_eq!(inputs.len(), coded.inputs.len(), "a job hands its inputs back");
        let mut known_hashes = Vec::new();
        for (place, column) in inputs.iter().zip(coded.inputs) {
            let these = next_hashes(column.len());
            match (*place, column) {
                (None, _) => known_hashes.extend_from_slice(these),
                (Some(at), Column::Owned(buf)) => {
                    fetch.parts[at].buf = Some(buf);
                    self.judge_hashes(fetch, at, these);
                }
                (Some(_), Column::Shared(_)) => unreachable!("a job hands its inputs back as they came"),
            }
        }
        let sources = &inputs[..sources];
        match yields {
            Yields::Nothing => {}
            Yields::Parts(wanted) => {
                for (at, buf) in wanted.into_iter().zip(coded.outputs) {
                    let these = next_hashes(buf.len());
                    self.take_recovered(fetch, at, buf, these, sources);
                }
            }
            Yields::Blend => {
                let mut parts = sources.iter().flatten().map(|&at| &fetch.parts[at]);
                // Drops what was computed from bytes other than the expected ones.
                if parts.all(|part| part.is_wholly(State::Good)) || is_off(Mutation::BlendNotVerified) {
                    let (outputs, output_hashes) = (coded.outputs, hashes.to_vec());
                    fetch.blended = Some(Blended { known_hashes, outputs, output_hashes });
                }
            }
        }
        self.settle_fetch(key, fetch)
    }

    /// Judges a part that was read, by the hashes of its blocks.
    fn judge_hashes(&mut self, fetch: &mut Fetch, at: usize, hashes: &[BlockHash]) {
        let part = &mut fetch.parts[at];
        let member = part.unjudged.take().expect("some member gave what is judged");
        let blocks = 0..part.rows.len();
        assert_eq!(hashes.len(), blocks.len(), "a hash for each block");
        let verdicts = self.expected(fetch, at).zip(hashes).map(|(wanted, hash)| wanted == *hash).collect();
        self.pass_verdicts(fetch, at, blocks, member, verdicts);
    }

    /// Takes what was computed of a part that no member has. A block of it is good where all the blocks it
    /// came from are, and where its own hash matches.
    fn take_recovered(
        &self,
        fetch: &mut Fetch,
        at: usize,
        buf: BufMut,
        hashes: &[BlockHash],
        sources: &[Option<usize>],
    ) {
        let verdicts: Vec<bool> = (0..)
            .zip(self.expected(fetch, at).zip(hashes))
            .map(|(block, (wanted, hash))| {
                let mut sources = sources.iter().flatten().map(|&source| &fetch.parts[source]);
                sources.all(|source| source.blocks[block] == State::Good) && wanted == *hash
            })
            .collect();
        let part = &mut fetch.parts[at];
        part.buf = Some(buf);
        for (state, _) in part.blocks.iter_mut().zip(verdicts).filter(|(_, good)| *good) {
            *state = State::Good;
        }
    }

    /// Expected hashes of the blocks of a part.
    fn expected(&self, fetch: &Fetch, at: usize) -> impl Iterator<Item = BlockHash> + '_ {
        let Part { column, rows, .. } = &fetch.parts[at];
        self.pages.store().hashes(fetch.slot, rows.clone(), ColumnIndex(*column as u16))
    }
}

impl Core {
    /// The caller's blend, with the other parts behind its own. None where these differ in length.
    fn blending_job(
        &self,
        fetch: &mut Fetch,
        blend: Blend,
        unjudged: &[usize],
        hasher: BlockHasher,
    ) -> Option<CodecJob> {
        let length = blend.length(fetch)?;
        if unjudged.iter().any(|&at| fetch.parts[at].bytes() != length) {
            return None;
        }
        let Blend { transform, inputs: ingredients, keeps } = blend;
        let (mut parts, mut inputs) = (Vec::new(), Vec::new());
        for ingredient in ingredients {
            match ingredient {
                Ingredient::Wanted(at) => {
                    parts.push(Some(at));
                    inputs.push(fetch.take_column(at));
                }
                Ingredient::Known(buf) => {
                    parts.push(None);
                    inputs.push(Column::Shared(buf));
                }
            }
        }
        let sources = inputs.len();
        for &at in unjudged {
            if !parts.contains(&Some(at)) {
                parts.push(Some(at));
                inputs.push(fetch.take_column(at));
            }
        }
        let outputs = if keeps {
            Outputs::Into((0..transform.outputs()).map(|_| self.pool.alloc(length)).collect())
        } else {
            Outputs::Hashed
        };
        fetch.job = Some(JobOut { inputs: parts, sources, yields: Yields::Blend });
        Some(CodecJob { transform: Some(transform), hasher: Some(hasher), inputs, outputs })
    }

    /// A job that computes parts that no member has from those that were read of the same rows. None where
    /// there are no such parts, where there are too few sources, or where lengths differ.
    fn recovering_job(&self, fetch: &mut Fetch, unjudged: &[usize], hasher: BlockHasher) -> Option<CodecJob> {
        let parts = &fetch.parts;
        let is_absent = |part: &Part| part.wanted && part.buf.is_some() && part.is_wholly(State::Absent);
        let rows = parts.iter().find(|part| is_absent(part))?.rows.clone();
        if unjudged.iter().any(|&at| parts[at].rows.len() != rows.len()) {
            return None;
        }
        // Sorted by column, so that the same loss is the same transform whichever read ended first.
        let mut sources: Vec<usize> = unjudged.iter().copied().filter(|&at| parts[at].rows == rows).collect();
        sources.sort_by_key(|&at| parts[at].column);
        sources.dedup_by_key(|at| parts[*at].column);
        sources.truncate(self.map.k);
        let read = |column: usize| unjudged.iter().any(|&at| parts[at].column == column);
        let mut wanted: Vec<usize> = (0..parts.len())
            .filter(|&at| is_absent(&parts[at]) && parts[at].rows == rows && !read(parts[at].column))
            .collect();
        wanted.sort_by_key(|&at| parts[at].column);
        wanted.dedup_by_key(|at| parts[*at].column);
        if sources.len() < self.map.k || wanted.is_empty() {
            return None;
        }
        let columns = |places: &[usize]| places.iter().map(|&at| parts[at].column).collect::<Vec<_>>();
        let transform = self
            .shape
            .codec
            .recovery(&columns(&sources), &columns(&wanted))
            .expect("k distinct present columns decode any others");
        let mut inputs = sources;
        inputs.extend(unjudged.iter().filter(|at| !inputs.contains(at)).copied().collect::<Vec<_>>());
        let columns = inputs.iter().map(|&at| fetch.take_column(at)).collect();
        let outputs = wanted.iter().map(|&at| {
            let buf = fetch.parts[at].buf.take();
            buf.expect("no read fills a part that no member has")
        });
        let outputs = Outputs::Into(outputs.collect());
        let inputs = inputs.into_iter().map(Some).collect();
        fetch.job = Some(JobOut { inputs, sources: self.map.k, yields: Yields::Parts(wanted) });
        Some(CodecJob { transform: Some(transform), hasher: Some(hasher), inputs: columns, outputs })
    }
}

impl Blend {
    /// Whether every part of it was read whole, and all are of one length.
    fn fits(&self, fetch: &Fetch) -> bool {
        let read = |ingredient: &Ingredient| match ingredient {
            Ingredient::Wanted(at) => fetch.parts[*at].unjudged.is_some(),
            Ingredient::Known(_) => true,
        };
        self.inputs.iter().all(read) && self.length(fetch).is_some()
    }

    /// Bytes of each ingredient, if all have the same length.
    fn length(&self, fetch: &Fetch) -> Option<usize> {
        let mut lengths = self.inputs.iter().map(|ingredient| match ingredient {
            Ingredient::Wanted(at) => fetch.parts[*at].bytes(),
            Ingredient::Known(buf) => buf.len(),
        });
        let first = lengths.next()?;
        lengths.all(|length| length == first).then_some(first)
    }
}
