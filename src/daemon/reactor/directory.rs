//! The arrays that are served, with their lanes, as clients see them. Any reactor may look. Must not know
//! volumes.

use super::error::ReactorError;
use super::fence::{Fence, Session};
use super::orders::{ArrayId, LaneId, ReactorId, Requester};
use crate::member::SharedDevice;
use crate::tls::PeerRules;
use calpe_core::block_io::DeviceId;
use calpe_core::nbd::{ExportInfo, Request};
use calpe_core::units::LaneIndex;
use calpe_core::volume::{ArrayNotice, ClientRequest, LaneCut, LaneNotices, PartLen, ViewReader, Volume};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Directory {
    all: RwLock<Vec<Arc<Listed>>>,
}

/// The devices of a lane that any reactor may read, in the order of their ids.
#[derive(Debug, Default)]
pub(super) struct SharedDevices {
    all: RwLock<Vec<(DeviceId, Arc<SharedDevice>)>>,
    /// Changes whenever they do.
    version: AtomicU64,
}

impl SharedDevices {
    pub(super) fn add(&self, id: DeviceId, device: Arc<SharedDevice>) {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let at = all.partition_point(|(other, _)| *other < id);
        all.insert(at, (id, device));
        self.version.fetch_add(1, Ordering::Release);
    }

    pub(super) fn remove(&self, id: DeviceId) {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(other, _)| *other != id);
        self.version.fetch_add(1, Ordering::Release);
    }

    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    pub(super) fn all(&self) -> Vec<(DeviceId, Arc<SharedDevice>)> {
        self.all.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A lane of an array, as clients see it.
pub(super) struct ListedLane {
    id: LaneId,
    owner: ReactorId,
    part_len: PartLen,
    /// For reads on any reactor; none where they are not possible.
    reader: Option<ViewReader>,
    devices: SharedDevices,
}

impl std::fmt::Debug for ListedLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ListedLane").field("id", &self.id).field("owner", &self.owner).finish_non_exhaustive()
    }
}

impl ListedLane {
    pub(super) fn new(id: LaneId, owner: ReactorId, volume: &dyn Volume) -> ListedLane {
        let (part_len, reader) = (volume.part_len(), volume.view_reader());
        ListedLane { id, owner, part_len, reader, devices: SharedDevices::default() }
    }

    pub(super) fn id(&self) -> LaneId {
        self.id
    }

    /// The reactor that its volume runs on.
    pub(super) fn owner(&self) -> ReactorId {
        self.owner
    }

    /// For reads on any reactor; none where they are not possible.
    pub(super) fn reader(&self) -> Option<&ViewReader> {
        self.reader.as_ref()
    }

    /// The devices that any reactor may read.
    pub(super) fn devices(&self) -> &SharedDevices {
        &self.devices
    }
}

/// One array, as clients see it.
pub(super) struct Listed {
    id: ArrayId,
    export: ExportInfo,
    cut: LaneCut,
    lanes: Vec<Arc<ListedLane>>,
    notices: Mutex<LaneNotices>,
    /// Lanes whose volumes are gone.
    gone: AtomicUsize,
    /// Which certificates may use it; none: all of them.
    rules: RwLock<Option<Arc<PeerRules>>>,
    is_ready: AtomicBool,
    is_stopping: AtomicBool,
    fence: Fence,
}

impl std::fmt::Debug for Listed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listed")
            .field("id", &self.id)
            .field("export", &self.export.name)
            .finish_non_exhaustive()
    }
}

impl Listed {
    pub(super) fn new(
        id: ArrayId,
        export: ExportInfo,
        (cut, lanes, notices): (LaneCut, Vec<ListedLane>, LaneNotices),
        rules: Option<Arc<PeerRules>>,
    ) -> Listed {
        assert_eq!(lanes.len(), usize::from(cut.count()));
        Listed {
            id,
            export,
            cut,
            lanes: lanes.into_iter().map(Arc::new).collect(),
            notices: Mutex::new(notices),
            gone: AtomicUsize::new(0),
            rules: RwLock::new(rules),
            is_ready: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            fence: Fence::default(),
        }
    }

    pub(super) fn id(&self) -> ArrayId {
        self.id
    }

    /// Its lanes.
    pub(super) fn lanes(&self) -> &[Arc<ListedLane>] {
        &self.lanes
    }

    pub(super) fn lane(&self, lane: LaneIndex) -> &Arc<ListedLane> {
        &self.lanes[usize::from(lane.0)]
    }

    /// How its volume is cut into those of its lanes.
    pub(super) fn cut(&self) -> &LaneCut {
        &self.cut
    }

    /// Takes a notice of a lane. Returns what is to be told of the array now, if anything.
    pub(super) fn take_notice(&self, lane: LaneIndex, notice: ArrayNotice) -> Option<ArrayNotice> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).take(lane, notice)
    }

    /// Whether a reactor owns one of its lanes.
    pub(super) fn is_of(&self, reactor: ReactorId) -> bool {
        self.lanes.iter().any(|lane| lane.owner == reactor)
    }

    /// The reactor that its first lane runs on.
    pub(super) fn first_owner(&self) -> ReactorId {
        self.lanes[0].owner
    }

    /// What it offers.
    pub(super) fn export(&self) -> &ExportInfo {
        &self.export
    }

    pub(super) fn rules(&self) -> Option<Arc<PeerRules>> {
        self.rules.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn is_serving(&self) -> bool {
        self.is_ready.load(Ordering::Acquire) && !self.is_stopping.load(Ordering::Acquire)
    }

    /// Its lanes are all there: clients may come.
    pub(super) fn begin_serving(&self) {
        self.is_ready.store(true, Ordering::Release);
    }

    /// It is to stop: nobody becomes a client of it any more.
    pub(super) fn stop_serving(&self) {
        self.is_stopping.store(true, Ordering::Release);
    }

    /// Whether the volume of one of its lanes is gone.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire) > 0
    }

    /// The minimum block of its export, in bytes.
    pub(super) fn block(&self) -> u64 {
        u64::from(self.export.block_min)
    }

    /// How many bytes of a request without payload are done at once; see [`LaneCut::part_len`].
    pub(super) fn part_len(&self, request: &ClientRequest) -> u64 {
        self.cut.part_len((self.lanes[0].part_len)(request), request)
    }

    /// Its clients.
    pub(super) fn fence(&self) -> &Fence {
        &self.fence
    }
}

impl Directory {
    /// Lists an array that does not serve yet.
    ///
    /// # Errors
    /// When its name is taken.
    pub(super) fn add(&self, listed: Listed) -> Result<Arc<Listed>, ReactorError> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if all.iter().any(|other| other.export.name == listed.export.name) {
            return Err(ReactorError::NameTaken { name: listed.export.name });
        }
        let listed = Arc::new(listed);
        all.push(Arc::clone(&listed));
        Ok(listed)
    }

    /// A lane of an array is gone: it does not serve any more, and with its last lane it is gone, too.
    pub(super) fn lane_is_gone(&self, listed: &Arc<Listed>) {
        listed.stop_serving();
        if listed.gone.fetch_add(1, Ordering::AcqRel) + 1 == listed.lanes.len() {
            self.remove(listed);
        }
    }

    /// Removes an array.
    pub(super) fn remove(&self, listed: &Arc<Listed>) {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| !Arc::ptr_eq(other, listed));
    }

    /// An array that is there, serving or stopping.
    pub(super) fn get(&self, id: ArrayId) -> Option<Arc<Listed>> {
        self.all.read().unwrap_or_else(PoisonError::into_inner).iter().find(|listed| listed.id == id).cloned()
    }

    /// All arrays, in the order in which they came.
    pub(super) fn all(&self) -> Vec<Arc<Listed>> {
        self.all.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The array of an export that is being served.
    pub(super) fn of_export(&self, name: &str) -> Option<Arc<Listed>> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|listed| listed.is_serving() && listed.export.name == name).cloned()
    }

    /// How many lanes a reactor owns.
    pub(super) fn count_of(&self, owner: ReactorId) -> usize {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().flat_map(|listed| &listed.lanes).filter(|lane| lane.owner == owner).count()
    }

    /// Replaces the rules of an array.
    ///
    /// # Errors
    /// When it is not there.
    pub(super) fn set_rules(&self, id: ArrayId, rules: Option<Arc<PeerRules>>) -> Result<(), ReactorError> {
        let listed = self.get(id).ok_or(ReactorError::NoSuchArray)?;
        *listed.rules.write().unwrap_or_else(PoisonError::into_inner) = rules;
        Ok(())
    }
}

/// The array of one client. Its clones are counted in memory of the client's own: those of an `Arc<Listed>`
/// are counted for all clients together, and the core that counts takes the place of the count from all
/// others.
#[derive(Clone, Debug)]
pub(super) struct ChosenArray(Arc<Chosen>);

#[derive(Debug)]
struct Chosen(Arc<Listed>);

impl ChosenArray {
    pub(super) fn new(listed: &Arc<Listed>) -> ChosenArray {
        ChosenArray(Arc::new(Chosen(Arc::clone(listed))))
    }

    /// The array as all clients have it.
    pub(super) fn listed(&self) -> &Arc<Listed> {
        &self.0.0
    }
}

impl Deref for ChosenArray {
    type Target = Listed;

    fn deref(&self) -> &Listed {
        &self.0.0
    }
}

/// A client's place at an array; left when it is dropped.
#[derive(Debug)]
pub(super) struct Seat {
    listed: Arc<Listed>,
    session: Arc<Session>,
}

impl Seat {
    pub(super) fn take(listed: Arc<Listed>, session: Session) -> Seat {
        let session = Arc::new(session);
        listed.fence.enter(&session);
        Seat { listed, session }
    }

    pub(super) fn session(&self) -> &Session {
        &self.session
    }

    /// Counts a modifying request that is about to be handed over.
    pub(super) fn begin_modifying(&self) {
        self.listed.fence.begin(&self.session);
    }

    /// It has ended, or its volume does not have it.
    pub(super) fn end_modifying(&self) {
        self.listed.fence.end(&self.session);
    }

    /// See [`Fence::look`].
    pub(super) fn look(&self, hands_over: bool, orphan: impl FnMut(Requester)) {
        self.listed.fence.look(&self.session, hands_over, orphan);
    }

    /// See [`Fence::rest`].
    pub(super) fn rest(&self) {
        self.listed.fence.rest(&self.session);
    }

    /// Whether other clients of the array have modifying requests, or are about to.
    pub(super) fn others_modify(&self) -> bool {
        self.listed.fence.others_modify(&self.session)
    }

    /// Counts a request that has succeeded.
    pub(super) fn count(&self, request: &Request) {
        self.session.count(request);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.rest();
        for _ in 0..self.session.modifying() {
            self.end_modifying();
        }
        self.listed.fence.leave(&self.session);
    }
}
