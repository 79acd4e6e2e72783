"""An array of Calpe inside a virtual machine: its disks, its daemon, its attached device, the load on it.

Owns the names and paths in the guest. Must not know which scene it serves.
"""

import base64
import os
import re

from vm import Vm, VmError

ARRAY = "tank"
DEVICE = "/dev/nbd0"
MOUNT = "/mnt"
MIB = 1 << 20

# An unmounted filesystem is checked by its own tool, which must find nothing at all and may change nothing.
FSCK = {"ext4": f"e2fsck -fn {DEVICE}", "xfs": f"xfs_repair -n {DEVICE}"}
# Blocks of 4 KiB, which is what the load takes for one: those of a small filesystem are smaller, and a page
# in four of them is not old or new as a whole after a power cut.
MKFS = {"ext4": f"mkfs.ext4 -q -F -b 4096 {DEVICE}", "xfs": f"mkfs.xfs -q -f {DEVICE}"}


class Geometry:
    def __init__(self, data, parity, checksum="blake3"):
        self.data, self.parity, self.checksum = data, parity, checksum
        self.width = data + parity

    def __str__(self):
        return f"{self.data}+{self.parity}"


class Rig:
    """`extra` disks beside the members; `absent` members are not plugged in at the next boot."""

    def __init__(self, run, geometry, filesystem="ext4", member_bytes=None, extra=(), memory="768M"):
        self.run, self.geometry, self.filesystem, self.memory = run, geometry, filesystem, memory
        self.directory = run.directory()
        self.member_bytes = member_bytes or (640 * MIB // geometry.data)
        self.absent = set()
        self.disks = {f"m{index}": self.member_bytes for index in range(geometry.width)} | dict(extra)
        for name, size in self.disks.items():
            with open(self.path(name), "wb") as disk:
                disk.truncate(size)
        self.vm = None
        self.boots = 0

    def path(self, name):
        return os.path.join(self.directory, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.vm:
            self.vm.cut()

    # -- the machine
    # -----------------------------------------------------------------------------------------------

    def boot(self):
        self.boots += 1
        disks = [(name, self.path(name)) for name in self.disks if name not in self.absent]
        self.vm = Vm(self.run.image, self.directory, disks, self.memory, report=f"report-{self.boots}")
        self.vm.boot()
        config = f'[daemon]\nmemory = "64MiB"\n[[array]]\nname = "{ARRAY}"\nsearch = ["/dev/members"]\n'
        self.vm.sh(f"echo '{config}' > /etc/calpe.toml; modprobe nbd; mkdir -p {MOUNT} /dev/members")
        for index in range(self.geometry.width):
            if f"m{index}" in self.disks and f"m{index}" not in self.absent:
                self.name_member(index, f"/dev/disk/m{index}")
        return self

    def name_member(self, index, device):
        """The daemon finds member `index` at `device`."""
        self.sh(f"ln -sfn {device} /dev/members/m{index}")

    def sh(self, script, seconds=120):
        return self.vm.sh(script, seconds)

    def cut(self):
        self.vm.cut()

    def end(self):
        """The end of a scene: the kernel must have had nothing to complain about."""
        complaints = self.vm.complaints()
        self.vm.cut()
        check(not complaints, "the kernel complains:\n" + "\n".join(complaints[:10]))

    # -- the array
    # -------------------------------------------------------------------------------------------------

    def create(self, devices=None, options=""):
        devices = devices or [f"/dev/members/m{index}" for index in range(self.geometry.width)]
        self.sh(f"calpe create {ARRAY} -k {self.geometry.data} -m {self.geometry.parity}"
                f" --checksum {self.geometry.checksum} {options} {' '.join(devices)}")

    def serve(self, seconds=60):
        """Starts the daemon, which imports the array, and waits until it serves."""
        self.sh("calpe serve --config /etc/calpe.toml >> /tmp/daemon.log 2>&1 & echo $! > /run/daemon.pid")
        try:
            self.vm.until(f"calpe status {ARRAY} 2>&1", seconds, "the array is served")
        except VmError as error:
            raise VmError(f"{error}\nthe daemon says\n{self.sh('cat /tmp/daemon.log')}") from None

    def kill(self):
        self.sh("kill -9 $(cat /run/daemon.pid)")

    def stop(self):
        self.sh("p=$(cat /run/daemon.pid); kill $p; while kill -0 $p 2>/dev/null; do sleep 0.05; done", 60)

    def status(self):
        """(state of the array, states of its members)"""
        text = self.sh(f"calpe status {ARRAY}")
        state = re.search(r"state: (\S+)", text).group(1)
        members = re.findall(r"^ +(\d+) \S+ +([A-Z]+)", text, re.M)
        return state, [state for _, state in members]

    def attach(self):
        # The driver sends again what a dead connection had under way when the request's time is up, not
        # sooner: a short time makes short scenes.
        self.sh(f"calpe attach {ARRAY} {DEVICE} --connections 4 --timeout 10 2>> /tmp/attach.log")
        # The capacity is set by the driver after it has answered.
        self.vm.until(f"test $(cat /sys/block/nbd0/size) -gt 0", what="the device has its size")

    def detach(self):
        self.sh(f"calpe detach {DEVICE} 2>&1")

    def scrub(self):
        """A scrub that must find nothing wrong, of an array that must be whole."""
        self.sh(f"calpe scrub {ARRAY} -w 2>&1", 300)
        self.sh(f"calpe status --test {ARRAY} 2>&1")

    # -- filesystems
    # -----------------------------------------------------------------------------------------------

    def make_filesystem(self):
        self.sh(MKFS[self.filesystem], 120)

    def mount(self):
        self.sh(f"mount -t {self.filesystem} {DEVICE} {MOUNT}", 120)

    def unmount(self):
        self.sh(f"umount {MOUNT}", 120)

    def fsck(self):
        status, output = self.vm.try_sh(FSCK[self.filesystem] + " 2>&1", 180)
        check(status == 0, f"the filesystem is not clean (exit status {status}):\n{output}")
        return 1

    # -- the load
    # --------------------------------------------------------------------------------------------------

    def load(self, seed, to=MOUNT, log="/tmp/load.log", **options):
        """Runs a load to its end; what it did."""
        words = " ".join(f"--{name} {value}" for name, value in options.items())
        self.sh(f"mkdir -p {to} 2>/dev/null || true; vm-load write {to} --seed {seed} --log {log} {words}", 300)

    def start_load(self, seed, to=MOUNT, log="/tmp/load.log", **options):
        """Starts a load that runs until `end_load`."""
        words = " ".join(f"--{name} {value}" for name, value in options.items())
        self.sh(f"rm -f /tmp/load.stop; mkdir -p {to}; (vm-load write {to} --seed {seed} --log {log} --stop /tmp/load.stop {words}"
                " > /tmp/load.out 2>&1; echo $? > /tmp/load.status) & rm -f /tmp/load.status")

    def end_load(self):
        """Stops the load, which must have had no error."""
        self.sh("touch /tmp/load.stop")
        self.vm.until("test -s /tmp/load.status", 120, "the load ends")
        said = self.sh("cat /tmp/load.out; cat /tmp/load.status").strip()
        check(said.endswith("\n0"), f"the load met an error: {said}")

    def durable(self, log="/tmp/load.log"):
        """Changes that the load in the guest said to be durable."""
        return int(self.sh(f"grep -c ^d {log} 2>/dev/null || true").strip() or 0)

    def progress(self, more=6, seconds=90):
        """The load goes on: `more` further changes become durable."""
        goal = self.durable() + more
        self.vm.until(f"test $(grep -c ^d /tmp/load.log) -ge {goal} 2>/dev/null || {{ cat /tmp/load.out; test ! -s /tmp/load.status; false; }}",
                      seconds, f"{more} more changes are durable")

    def verify(self, seed, of=MOUNT, log="/tmp/load.log", history=None):
        """Everything durable is there; (files, blocks) compared. `history`: a log kept by the host."""
        status, output = self.try_verify(seed, of, log, history)
        check(status == 0, f"data is lost or wrong:\n{output}")
        files, blocks = re.search(r"(\d+) durable files, \d+ under way, (\d+) blocks", output).groups()
        return int(files), int(blocks)

    def try_verify(self, seed, of=MOUNT, log="/tmp/load.log", history=None):
        if history is not None:
            log = "/tmp/history.log"
            packed = base64.b64encode(condense(history).encode()).decode()
            self.sh(f"echo {packed} | base64 -d > {log}")
        # From the device, not from the guest's memory.
        return self.vm.try_sh(f"sync; echo 3 > /proc/sys/vm/drop_caches; vm-load verify {of} --seed {seed} --log {log} 2>&1", 300)


def condense(history):
    """A log without the changes that later durable ones of the same file have replaced; the oracle reads the
    same from it.
    """
    lines = [line.split(" ") for line in history[:history.rfind("\n") + 1].splitlines()]
    durable = {}
    for kind, thread, file, version, *_ in lines:
        if kind == "d":
            durable[thread, file] = int(version)
    kept = [line for line in lines if int(line[3]) >= durable.get((line[1], line[2]), 0)]
    return "".join(" ".join(line) + "\n" for line in kept)


class Failed(Exception):
    """A scene saw what must not be."""


def check(holds, otherwise):
    if not holds:
        raise Failed(otherwise)
