//! The conditions that must hold when every fault has passed: no written data is lost or wrong, every member
//! can be made whole again, and then any `m` members can be spared.

use super::watch::remains;
use super::workload::Run;
use super::{Floor, HungEnd, Random, SimWorld};
use crate::array::assembly::AssemblyError;
use crate::format::MemberState;
use crate::units::MemberIndex;
use crate::volume::AdminRefusal::{InAlready, Kept, Unbelievable, Unfit};
use crate::volume::{ActivityKind, AdminRequest};

/// Most attempts to bring all members back: one that comes back may reveal the trouble of another.
const ATTEMPTS_MAX: usize = 6;
/// Most scrubs until one finds nothing.
const SCRUBS_MAX: usize = 4;
/// Operations after which an array counts as not coming to rest.
const STEPS_MAX: usize = 1_000_000;
/// Tenths of a second with nothing in flight after which an activity counts as hung.
const IDLE_MAX: usize = 2000;

impl Run {
    /// Ends all faults and checks the conditions in the head of this file. Appends an account of it to
    /// `said`.
    ///
    /// # Errors
    /// When a condition does not hold, with a description.
    pub fn make_peace(
        mut self,
        world: &SimWorld,
        random: &mut Random,
        said: &mut Vec<String>,
    ) -> Result<(), String> {
        self.forget_log();
        let result = self.end_all_faults(random);
        self.tell(said);
        result?;
        let mut run = self;
        if random.one_in(2) {
            said.push("the process dies".into());
            let Some(next) = run.started_again(world, random)? else { return Ok(()) };
            run = next;
        }
        let result = run.be_whole();
        run.tell(said);
        result?;
        let lost = run.lose_members(random);
        said.push(format!("members {lost:?} are lost, and the process dies"));
        run.started_again(world, random).map(|_| ())
    }

    fn end_all_faults(&mut self, random: &mut Random) -> Result<(), String> {
        self.note("all faults pass".into());
        let ids: Vec<u32> = self.sim.disks.keys().copied().collect();
        for id in ids {
            let how = if random.one_in(2) { HungEnd::Late } else { HungEnd::Failed };
            self.end_faults_of(id, how);
        }
        if random.one_in(2) {
            for disk in self.sim.disks.values_mut().filter(|disk| disk.scattered) {
                disk.bad_blocks.clear();
                disk.scattered = false;
            }
        }
        self.finish()?;
        // Waits until members that are being taken out have left, before members are counted.
        let end = self.leaving.iter().map(|(_, _, until)| *until).max();
        while end.is_some_and(|end| self.sim.now() < end) {
            if !self.sim.step() {
                self.sim.sleep(100);
            }
        }
        Ok(())
    }

    fn be_whole(&mut self) -> Result<(), String> {
        self.make_whole()?;
        self.read_every_block("with all members back")?;
        self.scrub_until_clean()?;
        self.sim.audit()?;
        self.read_every_block("after a scrub")
    }

    /// Kills the process and starts again. None: the start was refused, which is allowed with no more than
    /// half of the members.
    fn started_again(self, world: &SimWorld, random: &mut Random) -> Result<Option<Run>, String> {
        let is_forged = self.sim.disks.values().any(|disk| disk.forged.is_some() && !disk.dead);
        match self.restart(world, true, false, random)? {
            Ok(run) => Ok(Some(run)),
            Err(AssemblyError::NoMajority { .. }) if world.shape.data <= world.shape.parity => Ok(None),
            // An administrator has to take that device away.
            Err(AssemblyError::Unconfirmed { .. } | AssemblyError::Unfit { .. }) if is_forged => Ok(None),
            Err(error) => Err(format!("the start is refused when all faults have passed: {error}")),
        }
    }

    fn make_whole(&mut self) -> Result<(), String> {
        for _ in 0..ATTEMPTS_MAX {
            self.come_to_rest("what comes back")?;
            let status = self.sim.status();
            let away: Vec<_> =
                status.members.iter().filter(|member| member.state != MemberState::Online).collect();
            if away.is_empty() {
                return Ok(());
            }
            for member in away {
                if member.state != MemberState::Rebuilding && member.replacement.is_none() {
                    self.bring_back(member.index.0);
                }
            }
        }
        Err(format!("members stay away when all faults have passed: {:?}", self.sim.status().members))
    }

    /// Brings the disk of a member back, or a blank one in its place.
    fn bring_back(&mut self, member: u16) {
        let index = MemberIndex(member);
        let request = match self.sim.disk_out_of_use(member) {
            Some(id) => {
                self.note(format!("disk {id} of member {member} comes back"));
                AdminRequest::Online { member: index, device: self.reopen(id) }
            }
            None => {
                self.note(format!("member {member} gets a new disk"));
                AdminRequest::Replace { member: index, device: self.sim.add_blank_disk() }
            }
        };
        let Err(error) = self.sim.admin(request) else { return };
        self.note(format!("refused: {error}"));
        // As the refusal advises. A crash within a replacement may leave lanes with different devices.
        let (Unfit { .. } | Unbelievable { .. } | InAlready { .. } | Kept { .. }) = &error.1 else { return };
        let device = self.sim.add_blank_disk();
        if let Err(error) = self.sim.admin(AdminRequest::Replace { member: index, device }) {
            self.note(format!("refused: {error}"));
        }
    }

    fn come_to_rest(&mut self, what: &str) -> Result<(), String> {
        for _ in 0..IDLE_MAX {
            let mut steps = 0;
            while self.sim.step() {
                steps += 1;
                if steps > STEPS_MAX {
                    return Err(format!("{what} does not come to rest: {:?}", self.sim.status()));
                }
            }
            let status = self.sim.status();
            let rests = |kind: ActivityKind, paused: bool| kind == ActivityKind::Scrub && paused;
            if status.activities.iter().all(|activity| rests(activity.kind, activity.rest.is_some())) {
                return Ok(());
            }
            self.sim.sleep(100);
        }
        Err(format!("{what} hangs: {:?}", self.sim.status()))
    }

    /// Checks that every block can be read; for one that cannot, says whether the disks still hold its
    /// content.
    fn read_every_block(&mut self, when: &str) -> Result<(), String> {
        for block in 0..self.oracle.blocks() {
            if let Err(wrong) = self.read_block(block)? {
                let there = remains(&self.sim, &self.oracle, block, Floor::Flushed);
                let there = there.unwrap_or_else(|| "it is nowhere on the disks".into());
                return Err(format!("T1: block {block} cannot be read {when}: {wrong}; {there}"));
            }
        }
        let status = self.sim.status();
        if [&status.lost, &status.set_aside, &status.unreadable].iter().all(|list| list.is_empty()) {
            return Ok(());
        }
        Err(format!(
            "{:?} are listed as lost, {:?} as set aside and {:?} as unreadable {when}, and can be read",
            status.lost, status.set_aside, status.unreadable
        ))
    }

    fn scrub_until_clean(&mut self) -> Result<(), String> {
        let mut last = None;
        for _ in 0..SCRUBS_MAX {
            let _ = self.sim.admin(AdminRequest::ScrubStop);
            self.sim
                .admin(AdminRequest::ScrubStart)
                .map_err(|error| format!("a scrub is refused: {error}"))?;
            self.come_to_rest("a scrub")?;
            last = self.sim.status().last_scrub;
            if last.is_some_and(|scrub| (scrub.errors, scrub.repaired) == (0, 0)) {
                return Ok(());
            }
        }
        Err(format!("scrubs go on finding: {last:?}"))
    }

    /// Makes as many members die as can be spared.
    fn lose_members(&mut self, random: &mut Random) -> Vec<usize> {
        let lost = random.choose(self.spare_members, usize::from(self.width));
        for &member in &lost {
            let id = self.sim.disk_of(member as u16);
            if let Some(disk) = id.and_then(|id| self.sim.disks.get_mut(&id)) {
                disk.dead = true;
            }
        }
        lost
    }
}
