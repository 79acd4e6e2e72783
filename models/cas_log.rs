//! Explicit-state model of what the cas volume adds to the redo log: payloads, a second tail, the root,
//! joining members.
//!
//! Run: `cargo run --release -p calpe-models --bin cas-log` (`explorer.rs` says what it accepts).
//! In traces A, B, C, D are the members and batches count from 1; "log end 2" means that two sequences are
//! in the log.
//!
//! MODELLED
//!   A batch has a manifest on every live member and a payload (the volume's records) on min(m+1, live) of
//!   them; both may be lost, kept or rotten independently of each other. Several batches may have the same
//!   sequence, since one that a recovery drops stays readable on the disk: this is how a wrong piece comes to
//!   be taken for the right one.
//!   Each member also has a note {durable_upto, volume's tail, epoch}, the array's tail, a log start {end,
//!   epoch, volume's tail, hash of the last batch}, its epoch, and the first m+1 of them a copy of the
//!   volume's root. A note lies in the ring, hence it is void once its epoch is older than the log start's.
//!   The volume's state is the set of batches whose records it includes. A root is {position, that set}: a
//!   recovery that takes the wrong root, the wrong batch or too few of them ends with a different set.
//! ENUMERATED, breadth first, every interleaving of:
//!   running:  issue a batch; flush of one member; note; array checkpoint (the array's tail moves to what is
//!             noted); writing a root; reuse of log space, member by member; failure of a member, its cache
//!             kept or lost; a member that joins, returning with what it held or new and empty: it fetches
//!             pages and pieces, each again if it fell behind, and when it is whole it enters the live set,
//!             superblock by superblock;
//!   crash:    power loss (each cached item of each member kept or lost independently) or process death
//!             (caches stay; the batch and the root that were being written may be partly written), at any
//!             point, recovery included;
//!   recovery: with every set of at least k present members, after new rot of manifests, payloads and root
//!             copies, step by step.
//! ORACLE
//!   After recovery the volume holds a prefix of the batches that may still count, without a gap. It includes
//!   every acknowledged batch (process death) or flushed batch (power loss), and what an earlier recovery
//!   served; it holds nothing that an earlier recovery dropped. Within the budget (members absent or out of
//!   date, plus pieces that became bad since the last recovery, at most m) a refusal is a violation, too.
//!   Beyond it a refusal is right, and of the required batches only those that were noted still are. Where
//!   k <= m, assembly itself may refuse without a majority of the members.
//! NOT MODELLED
//!   The stripes' own columns, fresh records, page checksums (the model of the redo log has the first two).
//!   Epochs are bumped in one step, save for that of a join; a recovery flushes and writes its epoch in one
//!   step with its decision. Positions in the ring; the trees and segments under a root; the content of
//!   records; timing; failures while a member enters the live set. Outside the live set a member is never
//!   read, unless it joins.
//! BOUNDS
//!   Per scenario, see scenarios(): 1 to 3 batches, 1 to 3 crashes, 0 to 2 failures, 0 to 2 joins, 0 or 1 bad
//!   pieces, 2 to 4 members. States are kept as 64-bit fingerprints. Scenarios and mutations together take
//!   about 50 s of processor time on two threads, and 1 GB.
//! WHAT THE MODEL ADDED TO THE RULES
//!   The log start carries the hash of the last batch, else there is nothing to chain backwards from
//!   (start_carries_last).
//!   A piece below the array's tail is void for the array only: also above the log start it counts for the
//!   volume, from the volume's tail on (below_array_tail_counts).
//!   A joining member needs manifests from the lower of both tails on, payloads from the volume's
//!   (join_from_both_tails); the log start and both tails as durable as on the others (join_holds_tails); its
//!   copy of the root that counts (join_holds_root). The volume's tail that both rules about joining mean is
//!   the one durable on all live members (join_durable_tail).
//! WHAT IS NOT NEEDED
//!   The position of the chosen root can stand for the carried tail of the volume (variants tail-from-root*):
//!   it is never below a tail that counts. If the log start keeps the tail that was found, the chosen root
//!   need not be written to all copies first, save where a copy is unreadable (variants found-tail-kept*).
use calpe_models::{self as explorer, Model};

const MEMBERS: usize = 4;
const BATCHES: usize = 3;
const EPOCHS: usize = 10;
const NONE: u8 = 255;

/// One switch per rule. True is the rule, false what its mutation does instead.
#[derive(Clone, Copy)]
struct Rules {
    /// A payload has min(m+1, live) copies. False: m.
    payload_copies: bool,
    /// The manifest has the payload's hash. False: the first copy is taken, whatever it is.
    payload_hash: bool,
    /// A prefix is recoverable only with a valid copy of each payload. False: the manifests decide alone.
    prefix_needs_payload: bool,
    /// That, and the restoring of pieces, begin at the volume's tail. False: at the array's.
    recover_from_volume_tail: bool,
    /// Recovery restores missing payload copies. False: manifests only.
    restore_payloads: bool,
    /// They are flushed before the note is written. False: both share a flush.
    restore_before_note: bool,
    /// A root includes only what a note durable on all live members covers. False: whatever is issued.
    root_after_note: bool,
    /// A root counts when it is durable in all copies. False: when it is in one.
    root_counts_in_all_copies: bool,
    /// Recovery writes the root it chose to all copies. False: it leaves them as they are.
    root_written_everywhere: bool,
    /// It does so before the log start. False: after it, without waiting.
    root_before_log_start: bool,
    /// The log start carries the volume's tail. False: its end is taken for both tails.
    start_carries_volume_tail: bool,
    /// The log start carries the hash of the last batch. False: any batch of the last sequence is taken.
    start_carries_last: bool,
    /// Notes carry the volume's tail. False: only log starts do; space is used again once the root counts.
    note_carries_volume_tail: bool,
    /// Below the log start, pieces of older epochs count for the volume. False: they are void.
    older_epochs_count: bool,
    /// They are chained backwards from the log start. False: forwards from the volume's tail.
    chained_backwards: bool,
    /// Pieces between the volume's tail and the array's count when they are above the log start. False: void.
    below_array_tail_counts: bool,
    /// Log space is used again below both tails. False: below the array's.
    reuse_below_volume_tail: bool,
    /// False: below the volume's.
    reuse_below_array_tail: bool,
    /// The volume's tail is durable on all live members before that. False: it is reused at once.
    reuse_after_tail_durable: bool,
    /// A joining member holds its pieces from the volume's tail on. False: nobody looks.
    join_holds_pieces: bool,
    /// (Repair) It holds manifests from the lower of both tails on. False: from the volume's, like payloads.
    join_from_both_tails: bool,
    /// Its pieces are flushed. False: written is enough.
    join_flushed: bool,
    /// The volume's tail has passed every batch with fewer than m+1 copies. False: nobody looks.
    join_after_few_copies: bool,
    /// The tail meant by both is the one that is durable on all live members. False: the one in memory.
    join_durable_tail: bool,
    /// (Repair) The joining member holds the log start and both tails, as durable as on the others. False:
    /// nobody looks.
    join_holds_tails: bool,
    /// The joining member holds the root that counts, if it has a copy. False: nobody looks.
    join_holds_root: bool,
    /// (Variant, off) Recovery starts at the position of the root that it chose, whatever tail is carried.
    tail_from_root: bool,
    /// (Variant, off) The log start carries the volume's tail as found, not the position of the chosen root.
    start_keeps_found_tail: bool,
}

const ALL_ON: Rules = Rules {
    payload_copies: true,
    payload_hash: true,
    prefix_needs_payload: true,
    recover_from_volume_tail: true,
    restore_payloads: true,
    restore_before_note: true,
    root_after_note: true,
    root_counts_in_all_copies: true,
    root_written_everywhere: true,
    root_before_log_start: true,
    start_carries_volume_tail: true,
    start_carries_last: true,
    note_carries_volume_tail: true,
    older_epochs_count: true,
    chained_backwards: true,
    below_array_tail_counts: true,
    reuse_below_volume_tail: true,
    reuse_below_array_tail: true,
    reuse_after_tail_durable: true,
    join_holds_pieces: true,
    join_from_both_tails: true,
    join_flushed: true,
    join_after_few_copies: true,
    join_durable_tail: true,
    join_holds_tails: true,
    join_holds_root: true,
    tail_from_root: false,
    start_keeps_found_tail: false,
};

/// What one scenario explores.
#[derive(Clone)]
struct Config {
    name: &'static str,
    k: usize,
    m: usize,
    batches: usize,
    crashes: u8,
    fails: u8,
    joins: u8,
    rot: u8,
    power: bool,
    process: bool,
    /// Members that are out of date from the beginning.
    absent: u8,
    rules: Rules,
}

/// Sets of batches, by number, of which a member has a piece of one sort.
#[derive(Clone, Copy, Hash, PartialEq, Eq, Default)]
struct Items {
    cached: u8,
    durable: u8,
    bad: u8,
}

impl Items {
    fn valid(&self) -> u8 {
        self.cached | self.durable
    }
    fn flush(&mut self) {
        self.durable |= self.cached;
        self.bad &= !self.cached;
        self.cached = 0;
    }
}

/// A root: the records of all batches in `content`, which fill the log up to `position`.
#[derive(Clone, Copy, Hash, PartialEq, Eq, Default)]
struct Root {
    position: u8,
    content: u8,
}

#[derive(Clone, Copy, Hash, PartialEq, Eq, Default)]
struct Note {
    durable_upto: u8,
    volume_tail: u8,
    epoch: u8,
}

#[derive(Clone, Copy, Hash, PartialEq, Eq)]
struct LogStart {
    end: u8,
    epoch: u8,
    volume_tail: u8,
    last: u8,
}

const FIRST_START: LogStart = LogStart { end: 0, epoch: 0, volume_tail: 0, last: NONE };

#[derive(Clone, Copy, Hash, PartialEq, Eq)]
struct Member {
    manifest: Items,
    payload: Items,
    root: Option<Root>,
    root_cached: Option<Root>,
    note: Note,
    note_cached: Option<Note>,
    tail: u8,
    tail_cached: Option<u8>,
    start: LogStart,
    epoch: u8,
}

impl Member {
    /// A new device, with nothing on it.
    const EMPTY: Member = Member {
        manifest: Items { cached: 0, durable: 0, bad: 0 },
        payload: Items { cached: 0, durable: 0, bad: 0 },
        root: None,
        root_cached: None,
        note: Note { durable_upto: 0, volume_tail: 0, epoch: 0 },
        note_cached: None,
        tail: 0,
        tail_cached: None,
        start: FIRST_START,
        epoch: NONE,
    };
    fn has_cached(&self) -> bool {
        self.manifest.cached | self.payload.cached != 0
            || self.root_cached.is_some()
            || self.note_cached.is_some()
            || self.tail_cached.is_some()
    }
    fn flush(&mut self) {
        self.manifest.flush();
        self.payload.flush();
        self.root = self.root_cached.take().or(self.root);
        self.note = self.note_cached.take().unwrap_or(self.note);
        self.tail = self.tail_cached.take().unwrap_or(self.tail);
    }
    fn lose_cache(&mut self) {
        self.manifest.cached = 0;
        self.payload.cached = 0;
        self.root_cached = None;
        self.note_cached = None;
        self.tail_cached = None;
    }
    /// The note as far as it counts beside a log start of this epoch.
    fn valid_note(&self, start_epoch: u8) -> Note {
        if self.note.epoch >= start_epoch { self.note } else { Note::default() }
    }
    /// Everything that may be left of this member after a loss of power.
    fn after_power_loss(&self) -> Vec<Member> {
        let mut result = vec![];
        for manifests in subsets(self.manifest.cached) {
            for payloads in subsets(self.payload.cached) {
                for others in 0..8u8 {
                    let (root, note, tail) = (others & 1 != 0, others & 2 != 0, others & 4 != 0);
                    let impossible = root && self.root_cached.is_none()
                        || note && self.note_cached.is_none()
                        || tail && self.tail_cached.is_none();
                    if impossible {
                        continue;
                    }
                    let mut kept = *self;
                    kept.manifest.cached = manifests;
                    kept.payload.cached = payloads;
                    kept.root_cached = self.root_cached.filter(|_| root);
                    kept.note_cached = self.note_cached.filter(|_| note);
                    kept.tail_cached = self.tail_cached.filter(|_| tail);
                    kept.flush();
                    result.push(kept);
                }
            }
        }
        result
    }
}

/// What the manifests of a batch say, the same on all members.
#[derive(Clone, Copy, Hash, PartialEq, Eq, Default)]
struct Batch {
    sequence: u8,
    epoch: u8,
    previous: u8,
    holders: u8,
}

#[derive(Clone, Copy, Hash, PartialEq, Eq)]
enum Phase {
    Off,
    Run,
    Restored,
    Noted,
    RootWritten,
    LogStarts,
}

/// What the daemon has in memory; all zero while it is off.
#[derive(Clone, Copy, Hash, PartialEq, Eq)]
struct Memory {
    /// End of the log at the last log start, and now.
    start_end: u8,
    end: u8,
    last: u8,
    content: u8,
    volume_tail: u8,
    root: Root,
}

const NO_MEMORY: Memory = Memory {
    start_end: 0,
    end: 0,
    last: NONE,
    content: 0,
    volume_tail: 0,
    root: Root { position: 0, content: 0 },
};

#[derive(Clone, Copy, Hash, PartialEq, Eq)]
struct State {
    phase: Phase,
    members: [Member; MEMBERS],
    batches: [Batch; BATCHES],
    issued: u8,
    live: u8,
    joining: u8,
    /// Members that are not up to date.
    out: u8,
    epoch: u8,
    epoch_live: [u8; EPOCHS],
    memory: Memory,
    /// Batches that must be there: after the crash that happened, or would happen by process death; after a
    /// power loss; beyond the budget.
    floor_process: u8,
    floor_power: u8,
    floor_noted: u8,
    /// Batches that may be there.
    possible: u8,
    crashes: u8,
    fails: u8,
    joins: u8,
    rot: u8,
    /// Bad pieces since the last complete recovery.
    rot_now: u8,
}

type Label = (&'static str, u8, u8);
type Steps = Vec<(Label, State, Option<&'static str>)>;

/// The numbers of the ones in `set`.
fn each(set: u8) -> impl Iterator<Item = usize> {
    (0..8).filter(move |i| set >> i & 1 == 1)
}

fn subsets(set: u8) -> impl Iterator<Item = u8> {
    (0..=set).filter(move |subset| subset & !set == 0)
}

/// What a recovery found, or why it refuses.
struct Found {
    memory: Memory,
    restore: u8,
    garbage: bool,
}

impl Model for Config {
    type State = State;

    fn name(&self) -> &str {
        self.name
    }

    fn start(&self) -> State {
        self.first_state()
    }

    fn steps(&self, state: &State, steps: &mut Vec<explorer::Step<State>>) {
        let mut all = Vec::new();
        self.all_steps(state, &mut all);
        steps.extend(all.into_iter().map(|(label, after, wrong)| explorer::Step {
            text: show(&label),
            after,
            wrong: wrong.map(str::to_owned),
        }));
    }
}

impl Config {
    fn count(&self) -> usize {
        self.k + self.m
    }
    fn all(&self) -> u8 {
        (1 << self.count()) - 1
    }
    /// Members with a copy of the root.
    fn root_members(&self) -> u8 {
        (1 << (self.m + 1)) - 1
    }

    fn first_state(&self) -> State {
        let member = Member { root: Some(Root::default()), epoch: 0, ..Member::EMPTY };
        let mut members = [Member::EMPTY; MEMBERS];
        for x in each(self.all()) {
            members[x] = member;
        }
        let live = self.all() & !self.absent;
        let mut state = State {
            phase: Phase::Run,
            members,
            batches: [Batch::default(); BATCHES],
            issued: 0,
            live,
            joining: 0,
            out: self.absent,
            epoch: 0,
            epoch_live: [0; EPOCHS],
            memory: NO_MEMORY,
            floor_process: 0,
            floor_power: 0,
            floor_noted: 0,
            possible: 0,
            crashes: 0,
            fails: 0,
            joins: 0,
            rot: 0,
            rot_now: 0,
        };
        state.epoch_live[0] = self.all();
        if self.absent != 0 {
            self.bump(&mut state);
        }
        state
    }

    /// Makes a new epoch of the live set and writes it on all of it.
    fn bump(&self, state: &mut State) -> bool {
        if !self.new_epoch(state, state.live) {
            return false;
        }
        for x in each(state.live) {
            state.members[x].epoch = state.epoch;
        }
        self.forget(state);
        true
    }
    fn new_epoch(&self, state: &mut State, live: u8) -> bool {
        if state.epoch as usize + 1 >= EPOCHS {
            return false;
        }
        state.epoch += 1;
        state.epoch_live[state.epoch as usize] = live;
        true
    }
    /// Members that are out for good are never read again; what they hold makes no difference.
    fn forget(&self, state: &mut State) {
        if state.joins == self.joins {
            for x in each(self.all() & !state.live & !state.joining) {
                state.members[x] = Member { epoch: state.members[x].epoch, ..Member::EMPTY };
            }
        }
    }
    fn bumping(&self, state: &State) -> bool {
        state.epoch_live[state.epoch as usize] != state.live
            || each(state.live).any(|x| state.members[x].epoch != state.epoch)
    }

    /// The batch of the present history with this sequence.
    fn at(&self, state: &State, sequence: u8) -> Option<usize> {
        each(state.memory.content).find(|&b| state.batches[b].sequence == sequence)
    }
    fn start_epoch(&self, state: &State) -> u8 {
        each(state.live).map(|x| state.members[x].start.epoch).max().unwrap_or(0)
    }
    fn batch_durable(&self, state: &State, b: usize) -> bool {
        each(state.live).all(|x| {
            let member = &state.members[x];
            member.manifest.durable >> b & 1 == 1
                && (state.batches[b].holders >> x & 1 == 0 || member.payload.durable >> b & 1 == 1)
        })
    }
    /// How far the log is durable on all live members.
    fn committed(&self, state: &State) -> u8 {
        let mut end = state.memory.start_end;
        while let Some(b) = self.at(state, end) {
            if end >= self.durable_volume_tail(state) && !self.batch_durable(state, b) {
                break;
            }
            end += 1;
        }
        end
    }
    /// How far a note covers it that is durable on all live members.
    fn noted(&self, state: &State) -> u8 {
        let epoch = self.start_epoch(state);
        each(state.live)
            .map(|x| state.members[x].valid_note(epoch).durable_upto.max(state.members[x].start.end))
            .min()
            .unwrap_or(0)
    }
    /// The volume's tail as it would be found on this member.
    fn carried_tail(&self, member: &Member, start_epoch: u8) -> u8 {
        member.valid_note(start_epoch).volume_tail.max(member.start.volume_tail)
    }
    fn durable_volume_tail(&self, state: &State) -> u8 {
        let epoch = self.start_epoch(state);
        each(state.live).map(|x| self.carried_tail(&state.members[x], epoch)).min().unwrap_or(0)
    }
    fn durable_array_tail(&self, state: &State) -> u8 {
        each(state.live).map(|x| state.members[x].tail.max(state.members[x].start.end)).min().unwrap_or(0)
    }
    /// The volume's tail in memory: the position of the newest root that counts.
    fn volume_tail(&self, state: &State) -> u8 {
        let positions = each(state.live & self.root_members())
            .map(|x| state.members[x].root.map_or(0, |root| root.position));
        let counts = if self.rules.root_counts_in_all_copies { positions.min() } else { positions.max() };
        counts.unwrap_or(0).max(state.memory.volume_tail)
    }
    /// Records what may be acknowledged now.
    fn acknowledge(&self, state: &mut State) {
        let (committed, noted) = (self.committed(state), self.noted(state));
        for b in each(state.memory.content) {
            if state.batches[b].sequence < committed {
                state.floor_power |= 1 << b;
            }
            if state.batches[b].sequence < noted {
                state.floor_noted |= 1 << b;
            }
        }
    }

    fn all_steps(&self, state: &State, steps: &mut Steps) {
        match state.phase {
            Phase::Off => self.assemble(state, steps),
            Phase::Run => self.run(state, steps),
            _ => self.recover(state, steps),
        }
        if state.phase != Phase::Off && state.crashes < self.crashes {
            self.crash(state, steps);
        }
    }

    fn run(&self, state: &State, steps: &mut Steps) {
        // While a member enters the live set, nothing but its epoch is written.
        if self.bumping(state) {
            for x in each(state.live).filter(|&x| state.members[x].epoch != state.epoch) {
                let mut next = *state;
                next.members[x].epoch = state.epoch;
                steps.push((("epoch on", x as u8, 0), next, None));
            }
            let joined = state.epoch_live[state.epoch as usize];
            for x in each(joined & !state.live).filter(|&x| state.members[x].epoch != state.epoch) {
                let mut next = *state;
                next.members[x].epoch = state.epoch;
                steps.push((("epoch on", x as u8, 0), next, None));
            }
            if each(joined).all(|x| state.members[x].epoch == state.epoch) {
                let mut next = *state;
                next.live = joined;
                next.joining &= !joined;
                next.out &= !joined;
                self.forget(&mut next);
                steps.push((("joined", 0, 0), next, None));
            }
            return;
        }
        let (committed, noted) = (self.committed(state), self.noted(state));
        let volume_tail = self.volume_tail(state);
        let durable_tail = self.durable_volume_tail(state);
        let start_epoch = self.start_epoch(state);
        self.issue(state, steps);
        for x in each(state.live | state.joining).filter(|&x| state.members[x].has_cached()) {
            let mut next = *state;
            next.members[x].flush();
            self.acknowledge(&mut next);
            steps.push((("flush", x as u8, 0), next, None));
        }
        // One note at a time is in flight.
        let carried = if self.rules.note_carries_volume_tail { volume_tail } else { 0 };
        let note = Note { durable_upto: committed, volume_tail: carried, epoch: state.epoch };
        let behind = each(state.live).any(|x| {
            let old = state.members[x].valid_note(start_epoch);
            old.durable_upto.max(state.members[x].start.end) < note.durable_upto
                || old.volume_tail.max(state.members[x].start.volume_tail) < note.volume_tail
        });
        if behind && each(state.live).all(|x| state.members[x].note_cached.is_none()) {
            let mut next = *state;
            for x in each(state.live) {
                next.members[x].note_cached = Some(note);
            }
            steps.push((("note", committed, carried), next, None));
        }
        // The array's checkpoint: in-place writes are not modelled, so its tail may follow the note at once.
        let no_tail_cached = each(state.live).all(|x| state.members[x].tail_cached.is_none());
        if no_tail_cached
            && each(state.live).any(|x| state.members[x].tail.max(state.members[x].start.end) < noted)
        {
            let mut next = *state;
            for x in each(state.live) {
                next.members[x].tail_cached = Some(noted);
            }
            steps.push((("array's tail", noted, 0), next, None));
        }
        // The volume's checkpoint.
        let position = if self.rules.root_after_note { noted } else { state.memory.end };
        let roots = state.live & self.root_members();
        let no_root_cached = each(roots).all(|x| state.members[x].root_cached.is_none());
        if no_root_cached && position > state.memory.root.position {
            let included = each(state.memory.content).filter(|&b| state.batches[b].sequence < position);
            let root = Root { position, content: included.fold(0, |set, b| set | 1 << b) };
            let mut next = *state;
            next.memory.root = root;
            for x in each(roots) {
                next.members[x].root_cached = Some(root);
            }
            steps.push((("root", position, 0), next, None));
        }
        // Space below both tails is written over.
        let array_tail = self.durable_array_tail(state);
        let mut free = NONE;
        if self.rules.reuse_below_array_tail {
            free = free.min(array_tail);
        }
        if self.rules.reuse_below_volume_tail {
            free = free.min(volume_tail);
            if self.rules.reuse_after_tail_durable && self.rules.note_carries_volume_tail {
                free = free.min(durable_tail);
            }
        }
        for b in each(state.memory.content).filter(|&b| state.batches[b].sequence < free) {
            for x in each(state.live) {
                let mut next = *state;
                for items in [&mut next.members[x].manifest, &mut next.members[x].payload] {
                    items.cached &= !(1 << b);
                    items.durable &= !(1 << b);
                    items.bad &= !(1 << b);
                }
                if next != *state {
                    steps.push((("space reused", b as u8, x as u8), next, None));
                }
            }
        }
        self.fail(state, steps);
        self.join(state, steps);
    }

    fn issue(&self, state: &State, steps: &mut Steps) {
        let b = state.issued as usize;
        if b >= self.batches {
            return;
        }
        let mut next = *state;
        let copies = if self.rules.payload_copies { self.m + 1 } else { self.m };
        // The copies begin at another member with every batch.
        let order = (0..self.count()).map(|i| (b + i) % self.count()).filter(|&x| state.live >> x & 1 == 1);
        let holders = order.take(copies).fold(0, |set, x| set | 1 << x);
        next.batches[b] =
            Batch { sequence: state.memory.end, epoch: state.epoch, previous: state.memory.last, holders };
        for x in each(state.live) {
            next.members[x].manifest.cached |= 1 << b;
            if holders >> x & 1 == 1 {
                next.members[x].payload.cached |= 1 << b;
            }
        }
        next.issued += 1;
        next.possible |= 1 << b;
        next.memory.content |= 1 << b;
        next.memory.end += 1;
        next.memory.last = b as u8;
        steps.push((("issue batch", b as u8, holders), next, None));
    }

    fn fail(&self, state: &State, steps: &mut Steps) {
        if state.fails >= self.fails || state.live.count_ones() as usize <= self.k {
            return;
        }
        for x in each(state.live) {
            for lost in [false, true] {
                if lost && !state.members[x].has_cached() {
                    continue;
                }
                let mut next = *state;
                next.fails += 1;
                next.live &= !(1 << x);
                next.out |= 1 << x;
                if lost {
                    next.members[x].lose_cache();
                }
                if self.bump(&mut next) {
                    self.acknowledge(&mut next);
                    steps.push((("fails", x as u8, lost as u8), next, None));
                }
            }
        }
    }

    fn join(&self, state: &State, steps: &mut Steps) {
        if state.joins < self.joins {
            for x in each(self.all() & !state.live & !state.joining) {
                for new in [false, true] {
                    let mut next = *state;
                    next.joins += 1;
                    next.joining |= 1 << x;
                    if new {
                        next.members[x] = Member::EMPTY;
                    }
                    self.forget(&mut next);
                    steps.push((("join begins", x as u8, new as u8), next, None));
                }
            }
        }
        let start_epoch = self.start_epoch(state);
        let durable_tail = self.durable_volume_tail(state);
        let tail = if self.rules.join_durable_tail { durable_tail } else { self.volume_tail(state) };
        let source = each(state.live).next().unwrap();
        let from = |sequence: u8| {
            let batches = each(state.memory.content).filter(move |&b| state.batches[b].sequence >= sequence);
            batches.fold(0u8, |set, b| set | 1 << b)
        };
        let pieces = from(tail);
        let lower =
            if self.rules.join_from_both_tails { tail.min(self.durable_array_tail(state)) } else { tail };
        let manifests = from(lower);
        for x in each(state.joining) {
            let member = &state.members[x];
            let payloads = each(pieces).filter(|&b| state.batches[b].holders >> x & 1 == 1);
            let payloads = payloads.fold(0u8, |set, b| set | 1 << b);
            // Pages, the log start, the note and the tail, as they are durable on the others.
            let mut next = *state;
            let fetched = &mut next.members[x];
            fetched.lose_cache();
            fetched.start = state.members[source].start;
            fetched.tail = each(state.live).map(|y| state.members[y].tail).min().unwrap();
            let durable_upto = self.noted(state);
            fetched.note = Note { durable_upto, volume_tail: durable_tail, epoch: state.epoch };
            if self.root_members() >> x & 1 == 1 && self.rules.join_holds_root {
                let others = each(state.live & self.root_members());
                fetched.root = others.filter_map(|y| state.members[y].root).max_by_key(|root| root.position);
            }
            let fetched = next.members[x];
            if fetched != *member {
                steps.push((("pages fetched by", x as u8, 0), next, None));
            }
            // Its pieces.
            let mut next = *state;
            let readable = each(state.live).map(|y| &state.members[y]);
            let (held_manifests, held_payloads) = readable.fold((0, 0), |(manifests, payloads), other| {
                (manifests | other.manifest.valid(), payloads | other.payload.valid())
            });
            next.members[x].manifest.cached |= manifests & held_manifests & !member.manifest.valid();
            next.members[x].payload.cached |= payloads & held_payloads & !member.payload.valid();
            if next != *state {
                steps.push((("pieces fetched by", x as u8, 0), next, None));
            }
            // Is it whole?
            let held = |items: &Items| {
                if self.rules.join_flushed { items.durable } else { items.valid() }
            };
            let has_pieces = !self.rules.join_holds_pieces
                || manifests & !held(&member.manifest) == 0 && payloads & !held(&member.payload) == 0;
            let enough_copies = !self.rules.join_after_few_copies
                || each(pieces).all(|b| state.batches[b].holders.count_ones() as usize > self.m);
            let has_root = !self.rules.join_holds_root
                || self.root_members() >> x & 1 == 0
                || member.root.is_some_and(|root| root.position >= self.volume_tail(state));
            let has_tails = !self.rules.join_holds_tails
                || member.start == state.members[source].start
                    && self.carried_tail(member, start_epoch) >= durable_tail
                    && member.tail.max(member.start.end) >= self.durable_array_tail(state);
            if has_pieces && enough_copies && has_root && has_tails {
                let mut next = *state;
                if self.new_epoch(&mut next, state.live | 1 << x) {
                    steps.push((("whole, new epoch with", x as u8, 0), next, None));
                }
            }
        }
    }

    fn crash(&self, state: &State, steps: &mut Steps) {
        let mut off = *state;
        off.crashes += 1;
        off.phase = Phase::Off;
        off.live = 0;
        off.joining = 0;
        off.memory = NO_MEMORY;
        off.epoch = each(self.all())
            .map(|x| state.members[x].epoch)
            .filter(|&epoch| epoch != NONE)
            .max()
            .unwrap_or(0);
        for epoch in off.epoch as usize + 1..EPOCHS {
            off.epoch_live[epoch] = 0;
        }
        if self.power {
            let mut all = vec![off];
            all[0].floor_process = all[0].floor_power;
            for x in each(self.all()) {
                let outcomes = state.members[x].after_power_loss();
                let old = std::mem::take(&mut all);
                for mut after in old {
                    for &member in &outcomes {
                        after.members[x] = member;
                        all.push(after);
                    }
                }
            }
            steps.extend(all.into_iter().map(|after| (("POWER LOSS", 0, 0), after, None)));
        }
        if self.process {
            let mut whole = off;
            let mut partial = vec![];
            if state.phase == Phase::Run && state.memory.end > state.memory.start_end {
                let b = state.memory.last as usize;
                let others = state.memory.content & !(1 << b);
                whole.floor_process |= state.memory.content;
                off.floor_process |= others;
                let being_written = each(state.live).all(|x| state.members[x].manifest.cached >> b & 1 == 1);
                if being_written && !self.bumping(state) {
                    let holders = state.batches[b].holders & state.live;
                    for manifests in subsets(state.live) {
                        for payloads in subsets(holders) {
                            if (manifests, payloads) == (state.live, holders) {
                                continue;
                            }
                            let mut after = off;
                            for x in each(state.live & !manifests) {
                                after.members[x].manifest.cached &= !(1 << b);
                            }
                            for x in each(holders & !payloads) {
                                after.members[x].payload.cached &= !(1 << b);
                            }
                            partial
                                .push((("PROCESS DEATH, batch partly written", b as u8, manifests), after));
                        }
                    }
                }
            }
            partial.push((("PROCESS DEATH", 0, 0), whole));
            let roots = each(self.all()).filter(|&x| state.members[x].root_cached.is_some());
            let roots = roots.fold(0u8, |set, x| set | 1 << x);
            for (label, after) in partial {
                for lost in subsets(roots) {
                    let mut after = after;
                    for x in each(lost) {
                        after.members[x].root_cached = None;
                    }
                    steps.push((label, after, None));
                }
            }
        }
    }

    /// Every set of present members, with every new rot.
    fn assemble(&self, state: &State, steps: &mut Steps) {
        for present in subsets(self.all()).filter(|set| set.count_ones() as usize >= self.k) {
            self.start_with(state, present, steps);
            if state.rot >= self.rot {
                continue;
            }
            let mut rotten = vec![*state];
            for number in state.rot + 1..=self.rot {
                let before = std::mem::take(&mut rotten);
                for old in before {
                    for x in each(present) {
                        for b in each(old.members[x].manifest.durable) {
                            let mut next = old;
                            next.members[x].manifest.durable &= !(1 << b);
                            next.members[x].manifest.bad |= 1 << b;
                            rotten.push(next);
                        }
                        for b in each(old.members[x].payload.durable) {
                            let mut next = old;
                            next.members[x].payload.durable &= !(1 << b);
                            next.members[x].payload.bad |= 1 << b;
                            rotten.push(next);
                        }
                        if self.root_members() >> x & 1 == 1 && old.members[x].root.is_some() {
                            let mut next = old;
                            next.members[x].root = None;
                            rotten.push(next);
                        }
                    }
                }
                for next in rotten.iter_mut() {
                    next.rot = number;
                    next.rot_now += 1;
                }
                for next in &rotten {
                    self.start_with(next, present, steps);
                }
            }
        }
    }

    fn start_with(&self, state: &State, present: u8, steps: &mut Steps) {
        let label = ("assemble", present, state.rot_now);
        let Some(usable) = self.usable(state, present) else {
            let good = (present & !state.out).count_ones() as usize;
            let must = good >= self.k
                && self.count() - good + state.rot_now as usize <= self.m
                && 2 * good > self.count();
            if must {
                steps.push((label, *state, Some("assembly refused within the budget")));
            }
            return;
        };
        let mut next = *state;
        next.live = usable;
        next.out = self.all() & !usable;
        if !self.bump(&mut next) {
            return;
        }
        for x in each(usable) {
            next.members[x].flush();
        }
        let beyond = self.beyond_budget(&next);
        match self.decide(&next) {
            Err(why) => {
                if !beyond {
                    steps.push((label, next, Some(why)));
                }
            }
            Ok(found) => {
                next.memory = found.memory;
                for b in each(found.restore) {
                    let holders = if self.rules.restore_payloads { state.batches[b].holders } else { 0 };
                    let readable = each(usable).any(|x| next.members[x].payload.valid() >> b & 1 == 1);
                    for x in each(usable) {
                        let member = &mut next.members[x];
                        member.manifest.cached |= (1 << b) & !member.manifest.durable;
                        if holders >> x & 1 == 1 && readable {
                            member.payload.cached |= (1 << b) & !member.payload.durable;
                        }
                    }
                }
                next.phase = Phase::Restored;
                if !self.rules.restore_before_note {
                    self.write_note(&mut next);
                }
                let violation = if found.garbage {
                    Some("the records of something else were replayed")
                } else {
                    self.judge(&next, beyond)
                };
                steps.push((label, next, violation));
            }
        }
    }

    fn beyond_budget(&self, state: &State) -> bool {
        self.count() - state.live.count_ones() as usize + state.rot_now as usize > self.m
    }

    /// The members that may be used, of those present: those that hold the newest admissible epoch, or belong
    /// to it and hold its parent.
    fn usable(&self, state: &State, present: u8) -> Option<u8> {
        for epoch in (0..=state.epoch).rev() {
            let live = state.epoch_live[epoch as usize];
            let holding = each(present).filter(|&x| state.members[x].epoch == epoch).count();
            if holding == 0 {
                continue;
            }
            let usable = each(present)
                .filter(|&x| {
                    let held = state.members[x].epoch;
                    held == epoch || epoch > 0 && live >> x & 1 == 1 && held == epoch - 1
                })
                .fold(0u8, |set, x| set | 1 << x);
            let enough = usable.count_ones() as usize;
            if enough >= self.k && (2 * enough > self.count() || live & !usable == 0) {
                return Some(usable);
            }
        }
        None
    }

    /// Reads the logs of the usable members.
    fn decide(&self, state: &State) -> Result<Found, &'static str> {
        let rules = &self.rules;
        let members = || each(state.live).map(|x| &state.members[x]);
        let manifest = |b: usize| members().any(|member| member.manifest.valid() >> b & 1 == 1);
        let start =
            members().map(|member| member.start).max_by_key(|start| (start.epoch, start.end)).unwrap();
        let committed =
            members().map(|member| member.valid_note(start.epoch).durable_upto).max().unwrap().max(start.end);
        let array_tail = members().map(|member| member.tail).max().unwrap().max(start.end);
        let copies = each(state.live & self.root_members()).filter_map(|x| state.members[x].root);
        let root = copies.max_by_key(|root| root.position).ok_or("no root is readable")?;
        let mut volume_tail = members().map(|member| self.carried_tail(member, start.epoch)).max().unwrap();
        if rules.tail_from_root {
            volume_tail = root.position;
        }
        if root.position < volume_tail {
            return Err("the root is older than the volume's tail");
        }
        // The log, by sequence: first what the volume needs below the log start.
        let mut log: Vec<usize> = vec![];
        let issued = || 0..state.issued as usize;
        let named = |b: usize, sequence: u8| state.batches[b].sequence == sequence && manifest(b);
        let mut last = start.last;
        if rules.older_epochs_count && volume_tail < start.end {
            if rules.chained_backwards {
                if !rules.start_carries_last {
                    let any = issued().find(|&b| named(b, start.end - 1));
                    last = any.ok_or("no batch before the log start is readable")? as u8;
                }
                let mut at = last;
                for sequence in (volume_tail..start.end).rev() {
                    if at == NONE || !named(at as usize, sequence) {
                        return Err("a batch between the volume's tail and the log start is missing");
                    }
                    log.insert(0, at as usize);
                    at = state.batches[at as usize].previous;
                }
            } else {
                let mut previous = None;
                for sequence in volume_tail..start.end {
                    let fits = |b: usize| previous.is_none_or(|p| state.batches[b].previous == p);
                    let next = issued().find(|&b| named(b, sequence) && fits(b));
                    let next =
                        next.ok_or("a batch between the volume's tail and the log start is missing")?;
                    previous = Some(next as u8);
                    log.push(next);
                }
            }
        }
        // Then what comes after it, in the epochs since. Space below both tails may have been used again.
        let needed_from =
            if rules.below_array_tail_counts { volume_tail.min(array_tail) } else { array_tail };
        // If it was, nothing names the first batch that is still there; its epoch and sequence must do.
        let mut end = start.end.max(needed_from);
        let mut previous = if end > start.end { None } else { Some(start.last) };
        while let Some(b) = issued().find(|&b| {
            named(b, end)
                && state.batches[b].epoch >= start.epoch
                && previous.is_none_or(|p| state.batches[b].previous == p)
        }) {
            log.push(b);
            previous = Some(b as u8);
            end += 1;
        }
        // The longest prefix with all payloads.
        let checked_from = if rules.recover_from_volume_tail { volume_tail } else { array_tail };
        let payload = |b: usize| members().any(|member| member.payload.valid() >> b & 1 == 1);
        let mut kept = vec![];
        let mut garbage = false;
        end = start.end.max(needed_from);
        for b in log {
            let sequence = state.batches[b].sequence;
            if !rules.payload_hash {
                let first = each(state.live & state.batches[b].holders).next();
                garbage |= first.is_some_and(|x| state.members[x].payload.valid() >> b & 1 == 0);
            } else if rules.prefix_needs_payload
                && sequence >= checked_from
                && sequence >= volume_tail
                && !payload(b)
            {
                if sequence < start.end {
                    return Err("a payload between the volume's tail and the log start is lost");
                }
                break;
            }
            kept.push(b);
            if sequence >= start.end {
                end = sequence + 1;
                last = b as u8;
            }
        }
        if end < committed {
            return Err("the log ends before what was committed");
        }
        let replayed = kept.iter().filter(|&&b| state.batches[b].sequence >= root.position);
        let readable = replayed.filter(|&&b| payload(b) || !rules.payload_hash);
        let content = readable.fold(root.content, |set, &b| set | 1 << b);
        let restored_from = checked_from.min(array_tail);
        let restored = kept.iter().filter(|&&b| state.batches[b].sequence >= restored_from);
        let restore = restored.fold(0u8, |set, &b| set | 1 << b);
        let carried = if rules.start_keeps_found_tail { volume_tail } else { root.position };
        let memory = Memory { start_end: end, end, last, content, volume_tail: carried, root };
        Ok(Found { memory, restore, garbage })
    }

    /// Compares what is about to be served with what must and may be there.
    fn judge(&self, state: &State, beyond: bool) -> Option<&'static str> {
        let content = state.memory.content;
        let floor = if beyond { state.floor_noted } else { state.floor_process };
        if content & !state.possible != 0 {
            return Some("records are back that an earlier recovery dropped");
        }
        if floor & !content != 0 {
            return Some("acknowledged records are lost");
        }
        let newest = 8 - content.leading_zeros();
        if state.possible & ((1u16 << newest) - 1) as u8 != content {
            return Some("the records have a gap");
        }
        None
    }

    fn write_note(&self, state: &mut State) {
        let epoch = self.start_epoch(state);
        let found = each(state.live).map(|x| self.carried_tail(&state.members[x], epoch)).max().unwrap();
        let volume_tail = if self.rules.note_carries_volume_tail { found } else { 0 };
        let note = Note { durable_upto: state.memory.end, volume_tail, epoch: state.epoch };
        for x in each(state.live) {
            state.members[x].note_cached = Some(note);
        }
    }

    fn write_root(&self, state: &mut State) {
        let root = state.memory.root;
        for x in each(state.live & self.root_members()) {
            let copy = state.members[x].root;
            let unreadable = copy.is_none() && self.rules.start_keeps_found_tail;
            if copy != Some(root) && (self.rules.root_written_everywhere || unreadable) {
                state.members[x].root_cached = Some(root);
            }
        }
    }

    fn recover(&self, state: &State, steps: &mut Steps) {
        let mut next = *state;
        match state.phase {
            Phase::Restored => {
                for x in each(state.live) {
                    next.members[x].flush();
                }
                if self.rules.restore_before_note {
                    self.write_note(&mut next);
                }
                next.phase = Phase::Noted;
                steps.push((("recovery: pieces restored, log end", state.memory.end, 0), next, None));
            }
            Phase::Noted => {
                for x in each(state.live) {
                    next.members[x].flush();
                }
                next.phase = Phase::LogStarts;
                if self.rules.root_before_log_start {
                    self.write_root(&mut next);
                    if each(next.live).any(|x| next.members[x].has_cached()) {
                        next.phase = Phase::RootWritten;
                    }
                }
                steps.push((("recovery: note flushed", 0, 0), next, None));
            }
            Phase::RootWritten => {
                for x in each(state.live) {
                    next.members[x].flush();
                }
                next.phase = Phase::LogStarts;
                steps.push((("recovery: root flushed", state.memory.root.position, 0), next, None));
            }
            _ => {
                let memory = &state.memory;
                let carries = self.rules.start_carries_volume_tail;
                let volume_tail = if carries { memory.volume_tail } else { memory.end };
                let start = LogStart { end: memory.end, epoch: state.epoch, volume_tail, last: memory.last };
                for x in each(state.live).filter(|&x| state.members[x].start != start) {
                    let mut next = *state;
                    next.members[x].start = start;
                    if each(next.live).all(|y| next.members[y].start == start) {
                        self.serve(&mut next);
                        steps.push((("recovery: serves after log start on", x as u8, 0), next, None));
                    } else {
                        steps.push((("recovery: log start on", x as u8, 0), next, None));
                    }
                }
            }
        }
    }

    fn serve(&self, state: &mut State) {
        let content = state.memory.content;
        state.phase = Phase::Run;
        state.rot_now = 0;
        state.possible = content;
        state.floor_process = content;
        state.floor_power = content;
        state.floor_noted = content;
        if !self.rules.root_before_log_start {
            self.write_root(state);
        }
    }
}

fn show(label: &Label) -> String {
    let member = |x: u8| (b'A' + x) as char;
    let set = |set: u8| each(set).map(|x| member(x as u8)).collect::<String>();
    let (text, one, two) = *label;
    match text {
        "issue batch" => format!("issue batch {}, payload on {}", one + 1, set(two)),
        "flush" | "epoch on" | "pages fetched by" | "pieces fetched by" | "whole, new epoch with" => {
            format!("{text} {}", member(one))
        }
        "recovery: log start on" | "recovery: serves after log start on" => format!("{text} {}", member(one)),
        "note" => format!("note up to {one}, volume's tail {two}"),
        "array's tail" | "root" => format!("{text} at {one}"),
        "recovery: pieces restored, log end" | "recovery: root flushed" => format!("{text} {one}"),
        "space reused" => format!("space of batch {} reused on {}", one + 1, member(two)),
        "fails" => format!("{} fails{}", member(one), if two == 1 { " losing its cache" } else { "" }),
        "join begins" => format!("{} {}", member(one), if two == 1 { "joins as new" } else { "returns" }),
        "assemble" => format!("assemble {}, {two} bad pieces", set(one)),
        "PROCESS DEATH, batch partly written" => {
            format!("PROCESS DEATH, batch {} partly written, manifest on {}", one + 1, set(two))
        }
        _ => text.to_string(),
    }
}

fn scenarios(rules: Rules) -> Vec<Config> {
    let base = Config {
        name: "",
        k: 2,
        m: 1,
        batches: 1,
        crashes: 1,
        fails: 0,
        joins: 0,
        rot: 0,
        power: true,
        process: true,
        absent: 0,
        rules,
    };
    vec![
        Config { name: "a 2+1, 1 batch, 3 crashes, rot", crashes: 3, rot: 1, ..base },
        Config { name: "b 2+1, 2 batches, 2 crashes", batches: 2, crashes: 2, ..base },
        Config { name: "c 2+1, 2 batches, 3 process deaths", batches: 2, crashes: 3, power: false, ..base },
        Config { name: "d 2+1, 3 batches, 2 process deaths", batches: 3, crashes: 2, power: false, ..base },
        Config { name: "e 2+1, 2 batches, failure, 1 crash, rot", batches: 2, fails: 1, rot: 1, ..base },
        Config { name: "f 2+1, 1 batch, failure, join, 2 crashes", crashes: 2, fails: 1, joins: 1, ..base },
        Config { name: "g 2+1, 1 batch, 2 failures, join, rot", fails: 2, joins: 1, rot: 1, ..base },
        Config {
            name: "h 2+2, 1 batch, 2 power losses, rot",
            m: 2,
            crashes: 2,
            rot: 1,
            process: false,
            ..base
        },
        Config {
            name: "i 2+2, two absent that join, 1 batch, 2 failures",
            m: 2,
            fails: 2,
            joins: 2,
            power: false,
            absent: 12,
            ..base
        },
        Config {
            name: "j 1+1, 1 batch, failures, joins, 2 crashes",
            k: 1,
            crashes: 2,
            fails: 2,
            joins: 2,
            ..base
        },
        Config {
            name: "k 2+1, 2 batches, join, 2 process deaths",
            batches: 2,
            crashes: 2,
            joins: 1,
            power: false,
            ..base
        },
        Config {
            name: "l 2+1, 2 batches, failure, 2 power losses",
            batches: 2,
            crashes: 2,
            fails: 1,
            process: false,
            ..base
        },
        Config { name: "m 2+2, 1 batch, failure, join, rot", m: 2, fails: 1, joins: 1, rot: 1, ..base },
        Config {
            name: "n 2+2, 2 batches, 1 power loss, rot",
            m: 2,
            batches: 2,
            rot: 1,
            process: false,
            ..base
        },
    ]
}

fn mutations() -> Vec<(&'static str, Rules, &'static str)> {
    let without = |switch_off: fn(&mut Rules)| {
        let mut rules = ALL_ON;
        switch_off(&mut rules);
        rules
    };
    vec![
        ("payload-copies", without(|rules| rules.payload_copies = false), "a"),
        ("payload-hash", without(|rules| rules.payload_hash = false), "a"),
        ("prefix-needs-payload", without(|rules| rules.prefix_needs_payload = false), "b"),
        ("recover-from-volume-tail", without(|rules| rules.recover_from_volume_tail = false), "a"),
        ("restore-payloads", without(|rules| rules.restore_payloads = false), "a"),
        ("restore-before-note", without(|rules| rules.restore_before_note = false), "a"),
        ("root-after-note", without(|rules| rules.root_after_note = false), "b"),
        ("root-counts-in-all-copies", without(|rules| rules.root_counts_in_all_copies = false), "a"),
        ("root-written-everywhere", without(|rules| rules.root_written_everywhere = false), "b"),
        ("root-before-log-start", without(|rules| rules.root_before_log_start = false), "b"),
        ("start-carries-volume-tail", without(|rules| rules.start_carries_volume_tail = false), "a"),
        ("start-carries-last", without(|rules| rules.start_carries_last = false), "bc"),
        ("note-carries-volume-tail", without(|rules| rules.note_carries_volume_tail = false), "a"),
        ("older-epochs-count", without(|rules| rules.older_epochs_count = false), "a"),
        ("chained-backwards", without(|rules| rules.chained_backwards = false), "bc"),
        ("below-array-tail-counts", without(|rules| rules.below_array_tail_counts = false), "a"),
        ("reuse-below-volume-tail", without(|rules| rules.reuse_below_volume_tail = false), "a"),
        ("reuse-below-array-tail", without(|rules| rules.reuse_below_array_tail = false), "a"),
        ("reuse-after-tail-durable", without(|rules| rules.reuse_after_tail_durable = false), "a"),
        ("join-holds-pieces", without(|rules| rules.join_holds_pieces = false), "fg"),
        ("join-from-both-tails", without(|rules| rules.join_from_both_tails = false), "j"),
        ("join-flushed", without(|rules| rules.join_flushed = false), "fg"),
        ("join-after-few-copies", without(|rules| rules.join_after_few_copies = false), "ij"),
        ("join-durable-tail", without(|rules| rules.join_durable_tail = false), "fg"),
        ("join-holds-tails", without(|rules| rules.join_holds_tails = false), "j"),
        ("join-holds-root", without(|rules| rules.join_holds_root = false), "fg"),
    ]
}

/// Rules that do as well: a name, and what is changed.
type Variant = (&'static str, fn(&mut Rules));

/// All of these hold in all scenarios.
fn variants() -> Vec<Variant> {
    vec![
        // The position of the root that was chosen says where recovery begins; the carried tail is not used.
        ("tail-from-root", |rules| rules.tail_from_root = true),
        // The same, with no tail carried anywhere, and space used again as soon as the root counts.
        ("tail-from-root-none-carried", |rules| {
            rules.tail_from_root = true;
            rules.start_carries_volume_tail = false;
            rules.note_carries_volume_tail = false;
            rules.join_durable_tail = false;
        }),
        // The log start keeps the tail that was found, though a newer root was chosen.
        ("found-tail-kept", |rules| rules.start_keeps_found_tail = true),
        // Then the chosen root need not be written everywhere, save where a copy is unreadable.
        ("found-tail-kept-root-not-rewritten", |rules| {
            rules.start_keeps_found_tail = true;
            rules.root_written_everywhere = false;
        }),
    ]
}

fn main() {
    let changed = |change: fn(&mut Rules)| {
        let mut rules = ALL_ON;
        change(&mut rules);
        rules
    };
    let variants: Vec<_> = variants().into_iter().map(|(name, change)| (name, changed(change))).collect();
    explorer::run(scenarios, ALL_ON, &mutations(), &variants);
}
