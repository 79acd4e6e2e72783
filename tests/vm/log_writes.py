"""What a power cut may leave of disks with volatile caches, from a log of dm-log-writes.

All members are slices (dm-linear) of one disk under dm-log-writes, which logs each write when it became
durable: writes with FUA when they complete, others when a flush covers them. Each prefix of that log is a
state that a power cut can leave, and so is a prefix with any of the writes of the flush under way (`torn`).
The members are cut out of such states on the host; there `calpe check` must prove them consistent, and the
daemon, started on a copy of them, must serve all that was durable.

A mark in the log tells that a change was durable (fsync returned) when it was made. One flush is all members'
flush here: that a flush of one member says nothing about another is what the project's crash simulator
covers.

Format of the log (Documentation/admin-guide/device-mapper/log-writes.rst): a super block, then entries, each
in a sector of its own, followed by what was written.
"""

import concurrent.futures
import json
import os
import shutil
import struct
import subprocess
import time

from rig import ARRAY, DEVICE, MIB, Rig, check, condense
from scenes import absent_members, expect_state

MAGIC, VERSION = 0x6A736677736872, 1
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
SECTOR = 512
# Of each member, at its place on the one disk. A first MiB that is nobody's keeps a scan from taking the disk
# for member 0.
MEMBER_BYTES = 40 * MIB
LEAD_BYTES = MIB
# Points checked at a time: one for each core of a small machine.
WORKERS = 2


class Entry:
    """One record: where, how much (in sectors of the device), flags, and where its data is in the log."""

    def __init__(self, sector, sectors, flags, mark, data):
        self.sector, self.sectors, self.flags, self.mark, self.data = sector, sectors, flags, mark, data
        # A change of the load; the kernel and the scene make marks of their own.
        self.change = mark[:1].isdigit()


def read_log(path):
    """(sector size, entries) of a log; anything that is not one is an error."""
    entries = []
    with open(path, "rb") as log:
        magic, version, count, size = struct.unpack("<QQQI", log.read(28))
        if (magic, version) != (MAGIC, VERSION) or size not in (512, 4096):
            raise ValueError(f"{path}: not a log of dm-log-writes: magic {magic:x}, version {version}, sectors of {size}")
        at = size
        for number in range(count):
            log.seek(at)
            head = log.read(size)
            sector, sectors, flags, length = struct.unpack_from("<QQQQ", head)
            if flags >= 32 or length > size - 32:
                raise ValueError(f"{path}: entry {number} at byte {at} makes no sense: flags {flags:x}, {length} bytes of mark")
            mark = head[32:32 + length].rstrip(b"\0").decode() if flags & MARK else ""
            at += size
            entries.append(Entry(sector, sectors, flags, mark, at))
            if not flags & (DISCARD | MARK):
                at += sectors * size
    return size, entries


class Disks:
    """The members as files, brought forward entry by entry."""

    def __init__(self, directory, width, log, size):
        self.directory, self.size, self.log = directory, size, open(log, "rb")
        self.files = []
        os.makedirs(directory)
        for index in range(width):
            member = open(os.path.join(directory, f"m{index}"), "w+b", buffering=0)
            member.truncate(MEMBER_BYTES)
            self.files.append(member)

    def apply(self, entry):
        bytes_, at = entry.sectors * self.size, entry.sector * self.size - LEAD_BYTES
        if entry.flags & MARK or bytes_ == 0:
            return
        index, offset = divmod(at, MEMBER_BYTES)
        if at < 0 or index >= len(self.files) or offset + bytes_ > MEMBER_BYTES:
            raise ValueError(f"a write of {bytes_} bytes at {at} is no member's")
        if entry.flags & DISCARD:
            data = bytes(bytes_)
        else:
            self.log.seek(entry.data)
            data = self.log.read(bytes_)
        os.pwrite(self.files[index].fileno(), data, offset)

    def copy(self, directory, absent):
        """The members that are there, in another directory; holes stay holes."""
        os.makedirs(directory)
        names = [f"m{index}" for index in range(len(self.files)) if f"m{index}" not in absent]
        subprocess.run(["cp", "--sparse=always", "--reflink=auto", *(os.path.join(self.directory, name) for name in names), directory],
                       check=True)
        return [os.path.join(directory, name) for name in names]


class Oracle:
    """What must be there after so many marks: the load's own log, as far as it can have come by then."""

    def __init__(self, history):
        self.lines = history.splitlines()
        # The n-th change of the one thread: lines of its beginning, and of its end.
        self.begun = [line for line in self.lines if line.startswith("b ")]

    def after(self, marks):
        """The first `marks` changes are durable, one more may be under way. A number beyond the truth is a
        false claim.
        """
        done = self.begun[:marks]
        lines = []
        for line in done:
            lines += [line, "d " + " ".join(line.split(" ")[1:4])]
        return condense("\n".join(lines + self.begun[marks:marks + 1]) + "\n")


class Point:
    """A state of the disks: `name` for people, `marks` changes durable in it."""

    def __init__(self, name, directory, members, marks, extra):
        self.name, self.directory, self.members, self.marks, self.extra = name, directory, members, marks, extra


def consistent(run, point):
    """`calpe check` of the members as they are."""
    done = subprocess.run([run.calpe, "check", "--json", *point.members], capture_output=True, text=True, timeout=120)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return f"check says nothing: {done.stdout}{done.stderr}"
    return None if report.get("consistent") else f"not consistent: {done.stdout[:1500]}"


def served(run, point, look):
    """Starts the daemon on the members and gives the volume, copied to a file, to `look`."""
    config, socket = os.path.join(point.directory, "c.toml"), os.path.join(point.directory, "control.sock")
    with open(config, "w") as file:
        file.write(f'[daemon]\nruntime_dir = "{point.directory}"\nmemory = "32MiB"\n[gpu]\nmode = "off"\n'
                   f'[[array]]\nname = "{ARRAY}"\nsearch = ["{point.directory}"]\n')
    said = os.path.join(point.directory, "daemon.log")
    with open(said, "wb") as log:
        daemon = subprocess.Popen([run.calpe, "serve", "--config", config], stdout=log, stderr=log)
    try:
        end = time.monotonic() + 60
        while not has_started(run, socket):
            if daemon.poll() is not None or time.monotonic() > end:
                with open(said) as log:
                    return f"the array does not start: {log.read()}"
            time.sleep(0.02)
        volume = os.path.join(point.directory, "volume")
        copied = subprocess.run(["nbdcopy", f"nbd+unix:///{ARRAY}?socket={point.directory}/nbd.sock", volume], capture_output=True, text=True)
        return look(volume) if copied.returncode == 0 else f"the volume cannot be read: {copied.stderr}"
    finally:
        daemon.kill()
        daemon.wait()


def has_started(run, socket):
    """Whether the daemon has begun to serve the array, which it lists from the first."""
    done = subprocess.run([run.calpe, "--socket", socket, "status", ARRAY, "--json"], capture_output=True, text=True)
    return done.returncode == 0 and json.loads(done.stdout)["arrays"][0]["log"]["state"] != "not_started"


def compare(run, point, of, oracle, marks):
    history = os.path.join(point.directory, f"history-{marks}")
    with open(history, "w") as file:
        file.write(oracle.after(marks))
    done = subprocess.run([run.load, "verify", of, "--seed", str(run.seed), "--log", history], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip()


def look_raw(run, point, oracle):
    """The raw volume; also whether the claim that what the load had not begun is durable is refuted."""
    def look(volume):
        wrong = compare(run, point, volume, oracle, point.marks)
        point.refuted = compare(run, point, volume, oracle, point.marks + 2) is not None
        return wrong
    return look


def look_filesystem(run, point, oracle):
    """The filesystem on the volume: its journal is replayed, then it must be clean, then its files are
    compared.
    """
    def look(volume):
        replay = subprocess.run(["e2fsck", "-p", volume], capture_output=True, text=True)
        # 1: corrected, which is what replaying the journal counts as.
        if replay.returncode not in (0, 1):
            return f"the journal does not replay: {replay.stdout}{replay.stderr}"
        clean = subprocess.run(["e2fsck", "-fn", volume], capture_output=True, text=True)
        if clean.returncode != 0:
            return f"the filesystem is not clean: {clean.stdout}"
        tree = os.path.join(point.directory, "tree")
        os.makedirs(tree)
        subprocess.run(["debugfs", "-R", f"rdump /files {tree}", volume], capture_output=True, check=True)
        files = os.path.join(tree, "files")
        os.makedirs(files, exist_ok=True)
        wrong = compare(run, point, files, oracle, point.marks)
        point.refuted = compare(run, point, files, oracle, point.marks + 2) is not None
        return wrong
    return look


def record(run, geometry, degraded, filesystem, changes):
    """Runs a load in the machine on members under dm-log-writes. (path of the log, the load's own log, absent
    members)
    """
    width = geometry.width
    big = LEAD_BYTES + width * MEMBER_BYTES
    rig = Rig(run, geometry, "ext4", member_bytes=0, extra={"big": big, "log": 1024 * MIB})
    with rig:
        for index in range(width):
            del rig.disks[f"m{index}"]
        rig.boot()
        rig.sh(f"dmsetup create lw --table '0 {big // SECTOR} log-writes /dev/disk/big /dev/disk/log'")
        absent = absent_members(rig, degraded)
        for index in range(width):
            start = (LEAD_BYTES + index * MEMBER_BYTES) // SECTOR
            rig.sh(f"dmsetup create d{index} --table '0 {MEMBER_BYTES // SECTOR} linear /dev/mapper/lw {start}'")
            rig.name_member(index, f"/dev/mapper/d{index}")
        rig.create(options="--chunk 16KiB")
        for name in absent:
            rig.sh(f"rm /dev/members/{name}; dmsetup remove d{name[1:]}")
        rig.serve()
        expect_state(rig, "DEGRADED" if degraded else "ONLINE")
        rig.attach()
        to = DEVICE
        if filesystem:
            to = "/mnt/files"
            rig.make_filesystem()
            rig.mount()
            rig.sh(f"mkdir {to}; sync")
        rig.sh("dmsetup message lw 0 mark ready")
        rig.load(run.seed, to=to, ops=changes, mark="lw", files=48)
        history = rig.sh("cat /tmp/load.log")
        if filesystem:
            rig.unmount()
        rig.detach()
        rig.stop()
        rig.sh("for d in /dev/mapper/d*; do dmsetup remove $d; done; dmsetup remove --noudevsync lw; sync")
        rig.end()
    return rig.path("log"), history, absent


def replay(run, geometry, degraded, changes, sample, look, filesystem=False):
    """Records, replays, checks `sample` of the points (0: all of them). The counts."""
    path, history, absent = record(run, geometry, degraded, filesystem, changes)
    size, entries = read_log(path)
    oracle = Oracle(history)
    first = next(number for number, entry in enumerate(entries) if entry.mark == "ready")
    last = max(number for number, entry in enumerate(entries) if entry.change)
    marked = sum(entry.change for entry in entries)
    check(marked == changes, f"{marked} marks of {changes} changes are in the log")
    # A point is after an entry: each flush and FUA, each mark; and one write between two of them, which may
    # have been lost.
    durable = [n for n in range(first, last + 1) if entries[n].flags & (FLUSH | FUA | MARK)]
    between = [n for n in range(first, last + 1) if not entries[n].flags & (FLUSH | FUA | MARK)]
    if sample:
        durable = sorted(run.random.sample(durable, min(sample, len(durable))))
        between = sorted(run.random.sample(between, min(sample // 2, len(between))))
    chosen = set(durable) | set(between)
    torn = set(run.random.sample(sorted(chosen), min(len(chosen), (sample or len(chosen)) // 3)))
    base = os.path.dirname(path)
    disks = Disks(os.path.join(base, "disks"), geometry.width, path, size)
    counts = {"points": 0, "torn": 0}
    # The changes that states claimed to have come, and those of which a state refuted it. One change can have
    # many states.
    claimed, refuted = set(), set()
    marks = 0
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        waiting = []

        def judge(point):
            point.refuted = False
            wrong = consistent(run, point) or served(run, point, look(run, point, oracle))
            check(wrong is None, f"after entry {point.name} of the log, {point.marks} changes durable: {wrong}")
            counts["points"] += 1
            counts["torn"] += point.extra
            # Of the last changes there is nothing left to be claimed.
            if point.marks + 2 <= changes:
                claimed.add(point.marks + 2)
                if point.refuted:
                    refuted.add(point.marks + 2)
            shutil.rmtree(point.directory)

        def settle(most):
            while len(waiting) > most:
                waiting.pop(0).result()

        for number, entry in enumerate(entries[:last + 1]):
            disks.apply(entry)
            marks += entry.change
            if number in chosen:
                directory = os.path.join(base, f"p{number}")
                members = disks.copy(directory, absent)
                waiting.append(pool.submit(judge, Point(number, directory, members, marks, 0)))
                if number in torn:
                    directory = os.path.join(base, f"t{number}")
                    members = disks.copy(directory, absent)
                    tear(run, entries, number, disks, directory, absent)
                    waiting.append(pool.submit(judge, Point(f"{number} (torn)", directory, members, marks, 1)))
                settle(2 * WORKERS)
        settle(0)
    flushes = sum(1 for entry in entries[first:last + 1] if entry.flags & FLUSH)
    fuas = sum(1 for entry in entries[first:last + 1] if entry.flags & FUA)
    # A state may hold the change that is under way, not the one after it; only where that undoes itself is
    # the claim true: a file made and removed, 1 in 200.
    check(len(refuted) * 2 >= len(claimed) > 0, f"the comparison believes what it is told: {sorted(refuted)} of {sorted(claimed)}")
    return (f"{changes} changes, {last - first} entries, {flushes} flushes, {fuas} FUA; {counts['points']} states checked and served, "
            f"{counts['torn']} of them torn, {len(refuted)} of {len(claimed)} false claims refuted")


def tear(run, entries, number, disks, directory, absent):
    """Puts some of the writes of the flush that is under way on a copy: those up to the next flush, FUA or
    mark, by chance.
    """
    for entry in entries[number + 1:]:
        if entry.flags & (FLUSH | FUA | MARK):
            return
        if run.random.random() < 0.5 and not entry.flags & DISCARD:
            at = entry.sector * disks.size - LEAD_BYTES
            index, offset = divmod(at, MEMBER_BYTES)
            if f"m{index}" in absent:
                continue
            disks.log.seek(entry.data)
            with open(os.path.join(directory, f"m{index}"), "r+b") as member:
                member.seek(offset)
                member.write(disks.log.read(entry.sectors * disks.size))


def raw(run, geometry, filesystem, degraded):
    """Changes of the raw device, each made durable; a short log whose every point is checked, and a long one
    by samples.
    """
    short = replay(run, geometry, degraded, run.few(12, 8), run.few(0, 40), look_raw)
    if run.quick:
        return short
    return short + "; " + replay(run, geometry, degraded, 200, 100, look_raw)


def filesystem(run, geometry, filesystem, degraded):
    """Files on ext4, replayed on the host by e2fsck."""
    return replay(run, geometry, degraded, run.few(120, 20), run.few(100, 20), look_filesystem, filesystem=True)
