//! Requests over lanes against a naive model: a volume of bytes, on which the same requests are carried out
//! uncut. Parts are carried out in any order of their lanes, their ends are told in any order, and each may
//! fail or be dropped.

use super::*;
use crate::format::Lanes;
use crate::testing::Random;
use proptest::prelude::*;
use std::collections::VecDeque;

const SECTOR: u64 = 512;

/// What clients ask for, with its place in sectors; both are brought within the volume.
#[derive(Clone, Copy, Debug)]
struct Asked {
    kind: Kind,
    first: u64,
    count: u64,
    /// Begins and ends where stripes do.
    is_of_stripes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read { is_sparse: bool, with_memory: bool },
    Write,
    Flush,
    Trim,
    WriteZeroes { may_unmap: bool, fast_only: bool },
    BlockStatus,
    Health,
}

fn kinds() -> impl Strategy<Value = Kind> {
    let read = (any::<bool>(), any::<bool>());
    let zeroes = (any::<bool>(), any::<bool>());
    prop_oneof![
        3 => read.prop_map(|(is_sparse, with_memory)| Kind::Read { is_sparse, with_memory }),
        3 => Just(Kind::Write),
        1 => Just(Kind::Flush),
        1 => Just(Kind::Trim),
        3 => zeroes.prop_map(|(may_unmap, fast_only)| Kind::WriteZeroes { may_unmap, fast_only }),
        1 => Just(Kind::BlockStatus),
        1 => Just(Kind::Health),
    ]
}

fn asked() -> impl Strategy<Value = Asked> {
    (kinds(), 0u64..3000, prop_oneof![1u64..20, 1u64..1000], any::<bool>())
        .prop_map(|(kind, first, count, is_of_stripes)| Asked { kind, first, count, is_of_stripes })
}

/// A request under way, and what is known of it.
struct Open {
    kind: Kind,
    offset: u64,
    len: u64,
    /// What a write writes; what a read, or a question, was shown of the uncut volume when its parts were
    /// carried out.
    bytes: Vec<u8>,
    /// Bytes of it that were carried out.
    covered: Vec<bool>,
    /// Lanes that a flush went to.
    flushed: Vec<u16>,
    /// Ends of parts that are still to be told.
    pending: usize,
    first_error: Option<ClientError>,
    is_dropped: bool,
    is_answered: bool,
}

/// The end of a part.
enum End {
    Result(Result<ClientReply, ClientError>),
    Dropped,
}

struct Model {
    pool: Pool,
    cut: LaneCut,
    lanes: (u16, u64),
    random: Random,
    /// The uncut volume.
    volume: Vec<u8>,
    /// The volumes of the lanes.
    of_lane: Vec<Vec<u8>>,
    requests: LaneRequests<usize>,
    open: Vec<Open>,
    inboxes: Vec<VecDeque<(usize, LaneRequest)>>,
    ends: Vec<(usize, PartId, End)>,
    /// One part in so many fails, one in as many is dropped; 0: none.
    fails_one_in: u64,
}

impl Model {
    fn new(cut: LaneCut, lanes: (u16, u64), seed: u64, fails_one_in: u64) -> Model {
        let pool = Pool::new(8 << 20).expect("address space");
        let bytes_of = |lane| vec![0; cut.bytes_of(LaneIndex(lane)) as usize];
        Model {
            requests: LaneRequests::new(pool.clone()),
            pool,
            cut,
            lanes,
            random: Random::new(seed),
            volume: vec![0; cut.volume_bytes() as usize],
            of_lane: (0..cut.count()).map(bytes_of).collect(),
            open: Vec::new(),
            inboxes: (0..cut.count()).map(|_| VecDeque::new()).collect(),
            ends: Vec::new(),
            fails_one_in,
        }
    }

    /// Where a byte of the volume is: lane and place there. Said without what the code makes use of.
    fn place_of(&self, at: u64) -> (usize, usize) {
        let ((count, group), stripe_bytes) = (self.lanes, self.cut.stripe_bytes());
        let stripe = at / stripe_bytes;
        let (nth, within) = (stripe / group, stripe % group);
        let (lane, stripe) = (nth % u64::from(count), nth / u64::from(count) * group + within);
        (lane as usize, (stripe * stripe_bytes + at % stripe_bytes) as usize)
    }

    /// Whether a volume of its own would refuse the request.
    fn is_refused(&self, kind: Kind, offset: u64, len: u64) -> bool {
        let stripe = self.cut.stripe_bytes();
        let is_of_stripes = offset.is_multiple_of(stripe) && len.is_multiple_of(stripe);
        matches!(kind, Kind::WriteZeroes { may_unmap, fast_only: true } if !may_unmap || !is_of_stripes)
    }

    fn begin(&mut self, Asked { kind, first, count, is_of_stripes }: Asked) {
        let (unit, end) = match is_of_stripes {
            true => (self.cut.stripe_bytes(), self.cut.volume_bytes()),
            false => (SECTOR, self.cut.volume_bytes()),
        };
        let offset = first % end.div_ceil(unit) * unit;
        let len = (count * unit).min(end - offset);
        let mut bytes = vec![0; len as usize];
        if kind == Kind::Write {
            self.random.fill(&mut bytes);
        }
        let at = VolumeOffset(offset);
        let whole = match kind {
            Kind::Read { with_memory, .. } => {
                let buf = with_memory.then(|| self.pool.alloc(len as usize));
                WholeRequest::Read { offset: at, len, buf }
            }
            Kind::Write => WholeRequest::Write { offset: at, data: copied(&self.pool, &bytes) },
            Kind::Flush => WholeRequest::Plain(ClientRequest::Flush),
            Kind::Trim => WholeRequest::Plain(ClientRequest::Trim { offset: at, len, fua: false }),
            Kind::WriteZeroes { may_unmap, fast_only } => {
                let fua = false;
                let request = ClientRequest::WriteZeroes { offset: at, len, may_unmap, fast_only, fua };
                WholeRequest::Plain(request)
            }
            Kind::BlockStatus => WholeRequest::Plain(ClientRequest::BlockStatus { offset: at, len }),
            Kind::Health => WholeRequest::Plain(ClientRequest::Health { offset: at, len }),
        };
        let id = self.open.len();
        let is_in_one = kind != Kind::Flush && self.place_of(offset).0 == self.place_of(offset + len - 1).0;
        let is_in_one = is_in_one && len <= self.lanes.1 * self.cut.stripe_bytes();
        self.open.push(Open {
            kind,
            offset,
            len,
            bytes,
            covered: vec![false; len as usize],
            flushed: Vec::new(),
            pending: 0,
            first_error: None,
            is_dropped: false,
            is_answered: false,
        });
        match self.requests.begin(&self.cut, whole, id) {
            Begun::InOneLane(piece, payload, attached) => {
                assert!(is_in_one && attached == id);
                // Its end is not told to the code under test; its bytes count all the same.
                match self.carry_out(id, piece, payload) {
                    Ok(reply) => self.check_reply(id, &reply),
                    Err(error) => {
                        assert_eq!(error, ClientError::NotSupported);
                        assert!(self.is_refused(kind, offset, len));
                    }
                }
                self.open[id].is_answered = true;
            }
            Begun::InParts(parts) => {
                assert!(!is_in_one && !self.is_refused(kind, offset, len));
                self.open[id].pending = parts.len();
                for part in parts {
                    self.inboxes[usize::from(part.piece.lane.0)].push_back((id, part));
                }
            }
            Begun::Refused(attached, error) => {
                assert!(attached == id && self.is_refused(kind, offset, len));
                assert_eq!(error, ClientError::NotSupported);
                self.open[id].is_answered = true;
            }
        }
    }

    /// Carries out a part in its lane, and the same bytes of the request in the uncut volume.
    fn carry_out(
        &mut self,
        id: usize,
        piece: LanePiece,
        payload: Option<BufMut>,
    ) -> Result<ClientReply, ClientError> {
        let LanePiece { at, lane, within, len } = piece;
        let stripe = self.cut.stripe_bytes();
        let Open { kind, offset, len: whole, .. } = self.open[id];
        if kind == Kind::Flush {
            self.open[id].flushed.push(lane.0);
            return Ok(ClientReply::Done);
        }
        assert_eq!((usize::from(lane.0), within.0 as usize), self.place_of(at.0));
        if self.is_refused(kind, within.0, len) {
            return Err(ClientError::NotSupported);
        }
        if let Some(buf) = &payload {
            assert_eq!(buf.len() as u64, len);
            assert!(
                !within.0.is_multiple_of(ROW_BYTES) || (buf.as_ptr() as u64).is_multiple_of(ROW_BYTES),
                "its memory does not lie on pages"
            );
        }
        let from = (at.0 - offset) as usize..(at.0 - offset + len) as usize;
        for covered in &mut self.open[id].covered[from.clone()] {
            assert!(!std::mem::replace(covered, true), "a byte is in two parts");
        }
        let in_whole = at.0 as usize..(at.0 + len) as usize;
        let in_lane = within.0 as usize..(within.0 + len) as usize;
        let is_trimmed = |sector: u64, start: u64, end: u64| {
            let first = sector / stripe * stripe;
            first >= start && first + stripe <= end
        };
        match kind {
            Kind::Write => {
                let data = payload.expect("a write has its payload");
                self.of_lane[usize::from(lane.0)][in_lane].copy_from_slice(&data);
                self.volume[in_whole].copy_from_slice(&self.open[id].bytes[from]);
                return Ok(ClientReply::Done);
            }
            Kind::WriteZeroes { .. } => {
                self.of_lane[usize::from(lane.0)][in_lane].fill(0);
                self.volume[in_whole].fill(0);
                return Ok(ClientReply::Done);
            }
            // Only whole stripes are trimmed: those of the part in the lane, those of the request here.
            Kind::Trim => {
                for sector in (0..len).step_by(SECTOR as usize) {
                    let (there, here) = (within.0 + sector, at.0 + sector);
                    if is_trimmed(there, within.0, within.0 + len) {
                        self.of_lane[usize::from(lane.0)][there as usize..][..SECTOR as usize].fill(0);
                    }
                    if is_trimmed(here, offset, offset + whole) {
                        self.volume[here as usize..][..SECTOR as usize].fill(0);
                    }
                }
                return Ok(ClientReply::Done);
            }
            Kind::Read { .. } | Kind::BlockStatus | Kind::Health | Kind::Flush => {}
        }
        self.open[id].bytes[from].copy_from_slice(&self.volume[in_whole]);
        let shown = &self.of_lane[usize::from(lane.0)][in_lane];
        Ok(match kind {
            Kind::Read { is_sparse, .. } => {
                let mut buf = match payload {
                    // As after a decode.
                    Some(buf) if self.random.one_in(4) => self.pool.alloc(buf.len()),
                    Some(buf) => buf,
                    None => self.pool.alloc(len as usize),
                };
                buf.copy_from_slice(shown);
                if is_sparse { read_sparse(buf) } else { ClientReply::Data(buf) }
            }
            Kind::BlockStatus => ClientReply::Extents(extents(shown)),
            _ => ClientReply::Health(health(shown)),
        })
    }

    /// A lane carries out the next of its parts.
    fn step_lane(&mut self, lane: usize) {
        let Some((id, LaneRequest { piece, payload, part })) = self.inboxes[lane].pop_front() else { return };
        let is_bad = |random: &mut Random, of: u64| of > 0 && random.one_in(of);
        let end = if is_bad(&mut self.random, self.fails_one_in) {
            // Nothing of it was carried out, or all of it.
            if self.random.one_in(2) {
                let _ = self.carry_out(id, piece, payload);
            }
            let errors = [ClientError::Io, ClientError::NoSpace, ClientError::Stopping];
            End::Result(Err(errors[self.random.index(3)]))
        } else if is_bad(&mut self.random, self.fails_one_in) {
            End::Dropped
        } else {
            let result = self.carry_out(id, piece, payload);
            assert!(result.is_ok(), "no lane refuses its part");
            End::Result(result)
        };
        self.ends.push((id, part, end));
    }

    /// The end of some part is told.
    fn tell_end(&mut self) {
        let at = self.random.index(self.ends.len());
        let (id, part, end) = self.ends.swap_remove(at);
        let open = &mut self.open[id];
        open.pending -= 1;
        let joined = match end {
            End::Result(result) => {
                if let Err(error) = result {
                    open.first_error.get_or_insert(error);
                }
                self.requests.ended(part, result)
            }
            End::Dropped => {
                open.is_dropped = true;
                self.requests.dropped(part)
            }
        };
        assert_eq!(joined.is_some(), open.pending == 0, "answered with its last part");
        let Some(joined) = joined else { return };
        assert!(!std::mem::replace(&mut open.is_answered, true), "answered twice");
        match (joined, open.is_dropped, open.first_error) {
            (Joined::Dropped(of), true, _) => assert_eq!(of, id),
            (Joined::Answer(of, Err(error)), false, Some(first)) => assert_eq!((of, error), (id, first)),
            (Joined::Answer(of, Ok(reply)), false, None) => {
                assert_eq!(of, id);
                self.check_reply(id, &reply);
            }
            (other, dropped, error) => panic!("{other:?}, dropped {dropped}, {error:?}"),
        }
    }

    /// Checks that a request that succeeded was carried out as a whole, and that its answer is that of the
    /// uncut one.
    fn check_reply(&self, id: usize, reply: &ClientReply) {
        let Open { kind, len, bytes, covered, flushed, .. } = &self.open[id];
        if *kind == Kind::Flush {
            let mut lanes = flushed.clone();
            lanes.sort_unstable();
            assert_eq!(lanes, (0..self.cut.count()).collect::<Vec<_>>(), "a flush of each lane");
        } else {
            assert!(covered.iter().all(|covered| *covered), "every byte is in a part");
        }
        match (kind, reply) {
            (Kind::Read { .. }, ClientReply::Data(buf)) => assert!(buf[..] == bytes[..], "wrong bytes"),
            (Kind::Read { is_sparse: true, .. }, ClientReply::Sparse(runs)) => {
                assert!(runs.iter().any(|run| matches!(run, ReadRun::Zeroes(_))), "no zeroes");
                let mut read = Vec::new();
                for run in runs {
                    match run {
                        ReadRun::Zeroes(len) => read.resize(read.len() + *len as usize, 0),
                        ReadRun::Data(buf) => read.extend_from_slice(buf),
                    }
                }
                assert!(read == *bytes, "wrong bytes");
            }
            (Kind::BlockStatus, ClientReply::Extents(told)) => assert_eq!(*told, extents(bytes)),
            (Kind::Health, ClientReply::Health(told)) => {
                assert_eq!(*told, health(bytes));
                assert_eq!(told.iter().map(|run| run.0).sum::<u64>(), *len);
            }
            (Kind::Write | Kind::Flush | Kind::Trim | Kind::WriteZeroes { .. }, ClientReply::Done) => {}
            (kind, reply) => panic!("{kind:?} was answered with {reply:?}"),
        }
    }

    /// Something that may happen next happens. Returns whether there was anything.
    fn step(&mut self) -> bool {
        let mut lanes: Vec<usize> = (0..self.inboxes.len()).collect();
        lanes.retain(|&lane| !self.inboxes[lane].is_empty());
        self.random.shuffle(&mut lanes);
        match lanes.first() {
            None if self.ends.is_empty() => return false,
            None => self.tell_end(),
            Some(_) if !self.ends.is_empty() && self.random.one_in(2) => self.tell_end(),
            Some(&lane) => self.step_lane(lane),
        }
        true
    }

    /// Checks that every request was answered, and that the lanes together have the bytes of the volume.
    fn check_end(&self) {
        assert!(self.open.iter().all(|open| open.is_answered) && self.requests.is_empty());
        for at in (0..self.cut.volume_bytes()).step_by(SECTOR as usize) {
            let (lane, within) = self.place_of(at);
            let here = &self.volume[at as usize..][..SECTOR as usize];
            assert!(here == &self.of_lane[lane][within..][..SECTOR as usize], "byte {at}");
        }
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// Runs of sectors of which this says the same: (bytes, that).
fn runs<T: PartialEq>(bytes: &[u8], what: impl Fn(&[u8]) -> T) -> Vec<(u64, T)> {
    let mut runs: Vec<(u64, T)> = Vec::new();
    for sector in bytes.chunks(SECTOR as usize) {
        match (runs.last_mut(), what(sector)) {
            (Some((len, last)), what) if *last == what => *len += SECTOR,
            (_, what) => runs.push((SECTOR, what)),
        }
    }
    runs
}

fn extents(bytes: &[u8]) -> Vec<VolumeExtent> {
    runs(bytes, is_zero).into_iter().map(|(len, hole)| VolumeExtent { len, hole }).collect()
}

fn health(bytes: &[u8]) -> Vec<(u64, Health)> {
    runs(bytes, |sector| match sector[0] % 3 {
        0 => Health::Clean,
        1 => Health::Degraded,
        _ => Health::Lost,
    })
}

fn read_sparse(buf: BufMut) -> ClientReply {
    let found = runs(&buf, is_zero);
    if found.iter().all(|(_, is_hole)| !is_hole) {
        return ClientReply::Data(buf);
    }
    let mut rest = buf;
    let run = |(len, is_hole): (u64, bool)| {
        let tail = rest.split_off(len as usize);
        let data = std::mem::replace(&mut rest, tail);
        if is_hole { ReadRun::Zeroes(len) } else { ReadRun::Data(data) }
    };
    ClientReply::Sparse(found.into_iter().map(run).collect())
}

/// (lanes, stripes to a group), bytes of a stripe, sectors of the volume.
fn volumes() -> impl Strategy<Value = ((u16, u64), u64, u64)> {
    (2u16..=9, 0u32..3, 1u64..4, 1u64..900)
        .prop_map(|(count, log2, chunks, sectors)| ((count, 1 << log2), chunks * 4096, sectors))
}

proptest! {
    #[test]
    fn requests_over_lanes_do_what_they_would_do_uncut(
        ((count, group), stripe, sectors) in volumes(),
        asked in prop::collection::vec(asked(), 1..12),
        (seed, fails_one_in) in (any::<u64>(), prop_oneof![Just(0u64), 2u64..12]),
        at_once in 1usize..5,
    ) {
        let lanes = Lanes { count, group: group as u32 };
        let cut = LaneCut::new(lanes, stripe, sectors * SECTOR);
        let mut model = Model::new(cut, (count, group), seed, fails_one_in);
        for some in asked.chunks(at_once) {
            some.iter().for_each(|asked| model.begin(*asked));
            for _ in 0..model.random.below(40) {
                model.step();
            }
        }
        while model.step() {}
        model.check_end();
    }
}

#[test]
fn each_rule_that_is_broken_shows() {
    let rules = [
        Mutation::FlushForgetsALane,
        Mutation::AnsweredByFirstPart,
        Mutation::LastPartAlone,
        Mutation::FastZeroesInLastLane,
        Mutation::LanesRefuseAlone,
        Mutation::PartErrorForgotten,
        Mutation::JoinedAsTheyEnd,
    ];
    let run = |seed: u64| {
        let cut = LaneCut::new(Lanes { count: 3, group: 1 }, 4096, 24 * 4096);
        let mut model = Model::new(cut, (3, 1), seed, seed % 3 * 4);
        let mut random = Random::new(seed);
        for _ in 0..8 {
            let kind = match random.below(4) {
                0 => Kind::Read { is_sparse: false, with_memory: true },
                1 => Kind::Write,
                2 => Kind::Flush,
                _ => Kind::WriteZeroes { may_unmap: true, fast_only: true },
            };
            let is_of_stripes = random.one_in(2);
            let (first, count) = (random.below(200), 1 + random.below(40));
            model.begin(Asked { kind, first, count, is_of_stripes });
            while random.one_in(2) && model.step() {}
        }
        while model.step() {}
        model.check_end();
    };
    (0..20).for_each(run);
    for rule in rules {
        let shows = |seed| rule.with(|| std::panic::catch_unwind(|| run(seed)).is_err());
        assert!((0..20).any(shows), "{} is not noticed", rule.name());
    }
}

/// Bytes of a stripe in the tests that follow.
const STRIPE: u64 = 8192;

fn requests() -> (LaneRequests<u8>, Pool, LaneCut) {
    let pool = Pool::new(4 << 20).expect("address space");
    (LaneRequests::new(pool.clone()), pool, LaneCut::new(Lanes { count: 3, group: 2 }, STRIPE, 100 * STRIPE))
}

fn parts(begun: Begun<u8>) -> Vec<LaneRequest> {
    match begun {
        Begun::InParts(parts) => parts,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_first_error_to_come_is_the_answer_unless_a_part_was_dropped() {
    let (mut requests, _, cut) = requests();
    for drops in [false, true] {
        let flush = WholeRequest::Plain(ClientRequest::Flush);
        let flush = parts(requests.begin(&cut, flush, 7));
        assert_eq!(flush.iter().map(|part| part.piece.lane.0).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(requests.ended(flush[2].part, Err(ClientError::Io)).is_none());
        assert!(requests.ended(flush[0].part, Err(ClientError::NoSpace)).is_none());
        let last = match drops {
            true => requests.dropped(flush[1].part),
            false => requests.ended(flush[1].part, Ok(ClientReply::Done)),
        };
        match last {
            Some(Joined::Answer(7, Err(ClientError::Io))) if !drops => {}
            Some(Joined::Dropped(7)) if drops => {}
            other => panic!("{other:?}"),
        }
        assert!(requests.is_empty());
    }
}

#[test]
fn a_read_that_comes_back_in_its_own_memory_is_not_copied() {
    let (mut requests, pool, cut) = requests();
    let buf = pool.alloc(4 * STRIPE as usize);
    let memory = buf.as_ptr();
    let (offset, len) = (VolumeOffset(STRIPE), 4 * STRIPE);
    let read = parts(requests.begin(&cut, WholeRequest::Read { offset, len, buf: Some(buf) }, 7));
    let mut last = None;
    for LaneRequest { part, payload, .. } in read.into_iter().rev() {
        last = requests.ended(part, Ok(ClientReply::Data(payload.expect("its part of the memory"))));
    }
    let Some(Joined::Answer(7, Ok(ClientReply::Data(buf)))) = last else { panic!("{last:?}") };
    assert_eq!((buf.as_ptr(), buf.len() as u64), (memory, len));
}

#[test]
fn a_request_that_lies_in_one_lane_goes_there_as_it_is() {
    let (mut requests, pool, cut) = requests();
    let data = pool.alloc(STRIPE as usize);
    let memory = data.as_ptr();
    let write = WholeRequest::Write { offset: VolumeOffset(9 * STRIPE), data };
    let Begun::InOneLane(piece, Some(data), 7) = requests.begin(&cut, write, 7) else { panic!("cut") };
    assert_eq!((piece.lane, piece.within, data.as_ptr()), (LaneIndex(1), VolumeOffset(3 * STRIPE), memory));
    assert!(requests.is_empty());
}
