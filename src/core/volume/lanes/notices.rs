//! Which notices of lanes are told for the array, when, and in which words.
//!
//! What happens to a device or to the array as a whole is said by every lane for itself: a loss is told when
//! the first lane says it, what makes good a loss when the last one does. A notice about a place, or with
//! numbers that are one lane's, is told as that lane's ("lane 3: ..."), its offset as one of the whole
//! volume.
//! Where it is not sure that a notice repeats another lane's, it is told: one notice too many is better than
//! one that is missing.

use crate::array::{ArrayNotice, NoticeKind, NoticeLevel, VolumeStatus};
use crate::format::MemberState;
use crate::units::{LaneIndex, MemberIndex};
use crate::volume::LaneCut;
use std::collections::HashMap;

/// Lanes: bit by index, as there are at most 32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LaneBits(u32);

impl LaneBits {
    fn of(lane: LaneIndex) -> LaneBits {
        LaneBits(1 << lane.0)
    }

    fn contains(self, lane: LaneIndex) -> bool {
        self.0 >> lane.0 & 1 == 1
    }

    fn with(self, lane: LaneIndex) -> LaneBits {
        LaneBits(self.0 | LaneBits::of(lane).0)
    }

    fn without(self, lane: LaneIndex) -> LaneBits {
        LaneBits(self.0 & !LaneBits::of(lane).0)
    }

    fn len(self) -> u16 {
        self.0.count_ones() as u16
    }

    fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// The way in which a kind of notice is told.
enum Manner {
    /// Each time, as the lane's.
    OfLane,
    /// Each time: its place is one of the whole volume already.
    OfVolume,
    /// When the first lane says it, unless it is worse in another one.
    First,
    /// When the last of the lanes says it that had said one of these kinds.
    Ends(&'static [NoticeKind]),
    /// When every lane has said it, with all that lanes add to one another; what is not well at once.
    Every,
    /// When the member is in service in every lane.
    MemberIn,
    /// When every member is in service in every lane.
    AllIn,
}

fn manner(kind: NoticeKind) -> Manner {
    use NoticeKind as Kind;
    match kind {
        Kind::MemberOut
        | Kind::ReplacementGivenUp
        | Kind::ReplacementCancelled
        | Kind::ReplacementWaits
        | Kind::MemberFull
        | Kind::HostShort
        | Kind::MemberSlow
        | Kind::MemberKept
        | Kind::MemberNeedsRestart
        | Kind::BuildCompared
        | Kind::OldDeviceUnmarked
        | Kind::StoppedShort
        | Kind::NotStopped => Manner::First,
        Kind::ShortageEnded => Manner::Ends(&[Kind::MemberFull, Kind::HostShort]),
        Kind::MemberNotSlow => Manner::Ends(&[Kind::MemberSlow]),
        Kind::ScrubEnded | Kind::RepairEnded => Manner::Every,
        Kind::MemberRebuilt | Kind::MemberReplaced => Manner::MemberIn,
        Kind::ArrayWhole => Manner::AllIn,
        // The volume of a lane knows where that is in the whole one, since the text says so, too.
        Kind::ClientFailed => Manner::OfVolume,
        Kind::SlotLacks
        | Kind::BlocksSetAside
        | Kind::WriteFailed
        | Kind::ScrubUnresolved
        | Kind::BlocksRepaired
        | Kind::BlocksNotRepaired
        | Kind::PageUnreadable
        | Kind::PageReadable
        | Kind::MemberRebuiltWhole
        | Kind::BlocksUnreadable
        | Kind::PageLost
        | Kind::SuperblockDamaged
        | Kind::PageRepaired
        | Kind::ArrayRefused
        | Kind::LogDamaged
        | Kind::MapPageOld
        | Kind::LogReplayed
        | Kind::LogUnread
        | Kind::LogDropped
        | Kind::WritesLost
        | Kind::RowsLost
        | Kind::SlotSkipped
        | Kind::ArrayServesAgain => Manner::OfLane,
    }
}

/// What lanes have said of one thing, since it was told last.
#[derive(Default)]
struct Said {
    by: LaneBits,
    /// The level at which it was told.
    level: Option<NoticeLevel>,
    /// The words of each lane, where they are told together.
    words: Vec<(LaneIndex, String)>,
}

/// See the head of this file.
pub struct LaneNotices {
    cut: LaneCut,
    said: HashMap<(NoticeKind, Option<MemberIndex>), Said>,
    /// For each member the lanes in which it is not in service.
    out: HashMap<MemberIndex, LaneBits>,
}

impl LaneNotices {
    /// For lanes that have this status when their first notices are still to be taken.
    #[must_use]
    pub fn new(cut: LaneCut, of_lane: &[VolumeStatus]) -> LaneNotices {
        let mut out: HashMap<MemberIndex, LaneBits> = HashMap::new();
        for (lane, status) in (0..).map(LaneIndex).zip(of_lane) {
            for member in status.members.iter().filter(|member| member.state != MemberState::Online) {
                let lanes = out.entry(member.index).or_default();
                *lanes = lanes.with(lane);
            }
        }
        let mut said: HashMap<(NoticeKind, Option<MemberIndex>), Said> = HashMap::new();
        // Lanes that had changed over when a crash came before the others had.
        for new in of_lane.iter().flat_map(|lane| &lane.members).filter_map(|member| member.replacement) {
            for (lane, status) in (0..).map(LaneIndex).zip(of_lane) {
                for member in status.members.iter().filter(|member| member.uuid == new.uuid) {
                    let said = said.entry((NoticeKind::MemberReplaced, Some(member.index))).or_default();
                    said.by = said.by.with(lane);
                }
            }
        }
        LaneNotices { cut, said, out }
    }

    /// Takes a notice of a lane. Returns what is to be told now, if anything.
    pub fn take(&mut self, lane: LaneIndex, notice: ArrayNotice) -> Option<ArrayNotice> {
        if self.cut.count() == 1 {
            return Some(notice);
        }
        self.follow(lane, &notice);
        let key = (notice.kind, notice.member);
        match manner(notice.kind) {
            Manner::OfLane => Some(self.of_lane(lane, notice)),
            Manner::OfVolume => Some(notice),
            Manner::First => self.first(lane, notice),
            Manner::Ends(began) => {
                let began = began.iter().map(|kind| (*kind, notice.member));
                let is_over = |said: &mut Said| {
                    said.by = said.by.without(lane);
                    said.by.is_empty()
                };
                let mut over = true;
                for key in began {
                    if let Some(said) = self.said.get_mut(&key) {
                        match is_over(said) {
                            true => drop(self.said.remove(&key)),
                            false => over = false,
                        }
                    }
                }
                over.then_some(notice)
            }
            Manner::Every => self.every(lane, notice),
            Manner::MemberIn => {
                let said = self.said_again(key, lane);
                let replaced = (NoticeKind::MemberReplaced, notice.member);
                let others = match notice.kind {
                    NoticeKind::MemberReplaced => (NoticeKind::MemberRebuilt, notice.member),
                    _ => replaced,
                };
                let all = LaneBits(said.0 | self.said.get(&others).map_or(0, |said| said.by.0));
                // A lane in which the old device served all the time does not count the member as out.
                let is_replaced = self.said.contains_key(&replaced);
                let is_in = notice.member.is_none_or(|member| self.lanes_without(member).is_empty());
                if !is_in || is_replaced && all.len() < self.cut.count() {
                    return None;
                }
                self.said.remove(&key);
                self.said.remove(&others);
                Some(notice)
            }
            Manner::AllIn => self.out.is_empty().then_some(notice),
        }
    }

    /// Keeps count of the lanes that members are out of, and forgets what was said of a member that leaves or
    /// comes back: what lanes say from then on is new.
    fn follow(&mut self, lane: LaneIndex, notice: &ArrayNotice) {
        match (notice.kind, notice.member) {
            (NoticeKind::MemberOut, Some(member)) => {
                let lanes = self.out.entry(member).or_default();
                *lanes = lanes.with(lane);
                self.said.remove(&(NoticeKind::MemberRebuilt, Some(member)));
            }
            (NoticeKind::MemberRebuilt | NoticeKind::MemberReplaced, Some(member)) => {
                self.comes_in(lane, member);
                self.said.remove(&(NoticeKind::MemberOut, Some(member)));
                self.said.remove(&(NoticeKind::ReplacementGivenUp, Some(member)));
                self.said.remove(&(NoticeKind::ReplacementWaits, Some(member)));
            }
            (NoticeKind::ReplacementGivenUp | NoticeKind::ReplacementCancelled, Some(member)) => {
                self.said.remove(&(NoticeKind::MemberReplaced, Some(member)));
                self.said.remove(&(NoticeKind::ReplacementWaits, Some(member)));
            }
            // Members also come back without a word of their own.
            (NoticeKind::ArrayWhole, _) => {
                let members: Vec<MemberIndex> = self.out.keys().copied().collect();
                members.into_iter().for_each(|member| self.comes_in(lane, member));
            }
            _ => {}
        }
    }

    fn comes_in(&mut self, lane: LaneIndex, member: MemberIndex) {
        let left = self.lanes_without(member).without(lane);
        match left.is_empty() {
            true => drop(self.out.remove(&member)),
            false => drop(self.out.insert(member, left)),
        }
    }

    fn lanes_without(&self, member: MemberIndex) -> LaneBits {
        self.out.get(&member).copied().unwrap_or_default()
    }

    /// Records that a lane says something; what the others have said is forgotten if it says so again.
    /// Returns the lanes that have said it.
    fn said_again(&mut self, key: (NoticeKind, Option<MemberIndex>), lane: LaneIndex) -> LaneBits {
        let said = self.said.entry(key).or_default();
        if said.by.contains(lane) {
            *said = Said::default();
        }
        said.by = said.by.with(lane);
        said.by
    }

    fn first(&mut self, lane: LaneIndex, notice: ArrayNotice) -> Option<ArrayNotice> {
        let key = (notice.kind, notice.member);
        self.said_again(key, lane);
        let said = self.said.entry(key).or_default();
        let is_told = said.level.is_some_and(|told| told >= notice.level);
        said.level = said.level.max(Some(notice.level));
        (!is_told).then_some(notice)
    }

    fn every(&mut self, lane: LaneIndex, notice: ArrayNotice) -> Option<ArrayNotice> {
        let key = (notice.kind, notice.member);
        let all = self.said_again(key, lane).len() == self.cut.count();
        let said = self.said.entry(key).or_default();
        let is_well = notice.level == NoticeLevel::Info;
        // What is not well is told at once: other lanes may not end theirs.
        match is_well {
            true => said.words.push((lane, notice.text.clone())),
            false => said.level = Some(notice.level),
        }
        if !all {
            return (!is_well).then(|| self.of_lane(lane, notice));
        }
        let Said { mut words, level, .. } = self.said.remove(&key).unwrap_or_default();
        if level.is_none() && words.iter().all(|(_, text)| *text == notice.text) {
            return Some(notice);
        }
        words.sort_by_key(|(lane, ..)| lane.0);
        if !is_well {
            words.push((lane, notice.text.clone()));
        }
        let text: Vec<String> = words.iter().map(|(lane, text)| format!("lane {lane}: {text}")).collect();
        Some(ArrayNotice { text: text.join(". "), ..notice })
    }

    fn of_lane(&self, lane: LaneIndex, notice: ArrayNotice) -> ArrayNotice {
        let offset = notice.offset.map(|within| self.cut.whole_of(lane, within));
        ArrayNotice { offset, text: format!("lane {lane}: {}", notice.text), ..notice }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::ReplacementStatus;
    use crate::block_io::DeviceId;
    use crate::format::Lanes;
    use crate::testing::{SimArray, SimShape};
    use crate::units::VolumeOffset;
    use uuid::Uuid;

    const STRIPE: u64 = 8192;

    struct Told {
        notices: LaneNotices,
        told: Vec<String>,
    }

    impl Told {
        /// Of three lanes, in which every member is in service.
        fn new() -> Told {
            let cut = LaneCut::new(Lanes { count: 3, group: 1 }, STRIPE, 30 * STRIPE);
            Told { notices: LaneNotices::new(cut, &[]), told: Vec::new() }
        }

        fn say(&mut self, lane: u16, kind: NoticeKind, level: NoticeLevel, text: &str) {
            let member = text.contains("member 1").then_some(MemberIndex(1));
            let notice = ArrayNotice {
                kind,
                level,
                member,
                offset: Some(VolumeOffset(STRIPE + 512)),
                text: text.into(),
            };
            let told = self.notices.take(LaneIndex(lane), notice);
            self.told.extend(told.map(|notice| match manner(kind) {
                Manner::OfLane => format!("{} at {}", notice.text, notice.offset.expect("an offset").0),
                _ => notice.text,
            }));
        }

        fn told(&mut self) -> Vec<String> {
            std::mem::take(&mut self.told)
        }
    }

    fn out(told: &mut Told, lane: u16) {
        told.say(lane, NoticeKind::MemberOut, NoticeLevel::Warning, &format!("member 1 is out, says {lane}"));
    }

    fn rebuilt(told: &mut Told, lane: u16) {
        told.say(lane, NoticeKind::MemberRebuilt, NoticeLevel::Info, &format!("member 1 is in, says {lane}"));
    }

    #[test]
    fn a_loss_is_told_when_the_first_lane_says_so_and_its_end_when_the_last_does() {
        let mut told = Told::new();
        [2, 0, 1].into_iter().for_each(|lane| out(&mut told, lane));
        assert_eq!(told.told(), ["member 1 is out, says 2"]);
        [1, 2, 0].into_iter().for_each(|lane| rebuilt(&mut told, lane));
        assert_eq!(told.told(), ["member 1 is in, says 0"]);
        out(&mut told, 0);
        assert_eq!(told.told(), ["member 1 is out, says 0"], "it leaves again");
    }

    #[test]
    fn a_member_that_leaves_again_while_other_lanes_build_it_is_told() {
        let mut told = Told::new();
        (0..3).for_each(|lane| out(&mut told, lane));
        rebuilt(&mut told, 0);
        out(&mut told, 1);
        out(&mut told, 1);
        assert_eq!(
            told.told(),
            ["member 1 is out, says 0", "member 1 is out, says 1", "member 1 is out, says 1"]
        );
        rebuilt(&mut told, 1);
        assert_eq!(told.told(), [""; 0], "lane 2 lacks it");
        rebuilt(&mut told, 2);
        assert_eq!(told.told(), ["member 1 is in, says 2"]);
    }

    #[test]
    fn a_loss_that_is_worse_in_another_lane_is_told_again() {
        let mut told = Told::new();
        out(&mut told, 0);
        told.say(1, NoticeKind::MemberOut, NoticeLevel::Error, "member 1 is out, and lane 1 has FAILED");
        out(&mut told, 2);
        assert_eq!(told.told(), ["member 1 is out, says 0", "member 1 is out, and lane 1 has FAILED"]);
    }

    #[test]
    fn a_member_that_left_one_lane_alone_is_back_with_that_lane() {
        let mut told = Told::new();
        out(&mut told, 1);
        rebuilt(&mut told, 1);
        told.say(1, NoticeKind::ArrayWhole, NoticeLevel::Info, "all in");
        assert_eq!(told.told(), ["member 1 is out, says 1", "member 1 is in, says 1", "all in"]);
    }

    #[test]
    fn the_array_is_whole_when_its_last_lane_is() {
        let mut told = Told::new();
        (0..3).for_each(|lane| out(&mut told, lane));
        for lane in 0..3 {
            rebuilt(&mut told, lane);
            told.say(lane, NoticeKind::ArrayWhole, NoticeLevel::Info, "all in");
        }
        assert_eq!(told.told(), ["member 1 is out, says 0", "member 1 is in, says 2", "all in"]);
    }

    #[test]
    fn a_replacement_is_told_when_every_lane_has_built_it() {
        let mut told = Told::new();
        let replaced = |told: &mut Told, lane| {
            told.say(lane, NoticeKind::MemberReplaced, NoticeLevel::Info, "member 1 is replaced");
        };
        replaced(&mut told, 0);
        replaced(&mut told, 2);
        told.say(1, NoticeKind::ReplacementGivenUp, NoticeLevel::Error, "member 1 keeps its device");
        replaced(&mut told, 1);
        assert_eq!(told.told(), ["member 1 keeps its device"], "the others count anew");
        replaced(&mut told, 0);
        replaced(&mut told, 2);
        assert_eq!(told.told(), ["member 1 is replaced"]);
        // In lane 1 the member was out, so that it is rebuilt there.
        out(&mut told, 1);
        replaced(&mut told, 0);
        rebuilt(&mut told, 1);
        replaced(&mut told, 2);
        assert_eq!(told.told(), ["member 1 is out, says 1", "member 1 is replaced"]);
    }

    #[test]
    fn a_replacement_that_some_lanes_had_before_a_restart_is_told_when_the_others_have_it() {
        let mut of_lane = vec![SimArray::create(SimShape::new(2, 1, 4096, 4), 1).status(); 3];
        let (old, new) = (of_lane[0].members[1].uuid, Uuid::from_u128(9));
        of_lane[1].members[1].uuid = new;
        for lane in [0, 2] {
            let device = DeviceId(9);
            of_lane[lane].members[1].replacement =
                Some(ReplacementStatus { device, uuid: new, is_held: false });
        }
        assert_ne!(old, new);
        let mut told = Told::new();
        told.notices = LaneNotices::new(told.notices.cut, &of_lane);
        for lane in [2, 0] {
            assert_eq!(told.told(), [""; 0]);
            told.say(lane, NoticeKind::MemberReplaced, NoticeLevel::Info, "member 1 is replaced");
        }
        assert_eq!(told.told(), ["member 1 is replaced"]);
    }

    #[test]
    fn that_a_new_device_waits_for_other_lanes_is_told_once_for_each() {
        let mut told = Told::new();
        let waits = |told: &mut Told, lane| {
            told.say(lane, NoticeKind::ReplacementWaits, NoticeLevel::Info, "member 1 waits");
        };
        [1, 0].into_iter().for_each(|lane| waits(&mut told, lane));
        assert_eq!(told.told(), ["member 1 waits"]);
        told.say(2, NoticeKind::ReplacementGivenUp, NoticeLevel::Error, "member 1 keeps its device");
        told.told();
        waits(&mut told, 2);
        assert_eq!(told.told(), ["member 1 waits"], "of another device");
    }

    #[test]
    fn a_shortage_ends_with_that_of_the_last_lane() {
        let mut told = Told::new();
        let end = |told: &mut Told, lane| {
            told.say(
                lane,
                NoticeKind::ShortageEnded,
                NoticeLevel::Info,
                &format!("member 1 works, says {lane}"),
            );
        };
        told.say(0, NoticeKind::MemberFull, NoticeLevel::Error, "member 1 is full");
        told.say(1, NoticeKind::MemberFull, NoticeLevel::Error, "member 1 is full");
        told.say(2, NoticeKind::HostShort, NoticeLevel::Warning, "member 1 waits for memory");
        [0, 2, 1].into_iter().for_each(|lane| end(&mut told, lane));
        assert_eq!(told.told(), ["member 1 is full", "member 1 waits for memory", "member 1 works, says 1"]);
    }

    #[test]
    fn scrubs_are_told_together_and_numbers_stay_with_their_lane() {
        let mut told = Told::new();
        let end =
            |told: &mut Told, lane, level, text: &str| told.say(lane, NoticeKind::ScrubEnded, level, text);
        for lane in [1, 0, 2] {
            end(&mut told, lane, NoticeLevel::Info, "0 errors");
        }
        assert_eq!(told.told(), ["0 errors"]);
        end(&mut told, 1, NoticeLevel::Warning, "2 errors");
        assert_eq!(told.told(), ["lane 1: 2 errors"], "not all may end theirs");
        end(&mut told, 2, NoticeLevel::Info, "0 errors");
        assert_eq!(told.told(), [""; 0]);
        end(&mut told, 0, NoticeLevel::Warning, "3 errors");
        assert_eq!(told.told(), ["lane 2: 0 errors. lane 0: 3 errors"]);
        end(&mut told, 0, NoticeLevel::Info, "0 errors");
        assert_eq!(told.told(), [""; 0], "the next scrub has begun");
    }

    #[test]
    fn a_place_is_told_as_one_of_the_volume() {
        let mut told = Told::new();
        told.say(2, NoticeKind::BlocksUnreadable, NoticeLevel::Error, "slot 1 cannot be read");
        told.say(1, NoticeKind::WritesLost, NoticeLevel::Error, "writes are lost");
        told.say(2, NoticeKind::WritesLost, NoticeLevel::Error, "writes are lost");
        assert_eq!(
            told.told(),
            [
                format!("lane 2: slot 1 cannot be read at {}", 5 * STRIPE + 512),
                format!("lane 1: writes are lost at {}", 4 * STRIPE + 512),
                format!("lane 2: writes are lost at {}", 5 * STRIPE + 512),
            ]
        );
    }

    #[test]
    fn one_lane_is_told_word_for_word() {
        let cut = LaneCut::new(Lanes::ONE, STRIPE, 30 * STRIPE);
        let mut notices = LaneNotices::new(cut, &[]);
        for kind in
            [NoticeKind::MemberOut, NoticeKind::MemberOut, NoticeKind::PageLost, NoticeKind::ScrubEnded]
        {
            let notice = ArrayNotice {
                kind,
                level: NoticeLevel::Error,
                member: Some(MemberIndex(0)),
                offset: Some(VolumeOffset(5)),
                text: "as it is".into(),
            };
            assert_eq!(notices.take(LaneIndex(0), notice.clone()), Some(notice));
        }
    }
}
