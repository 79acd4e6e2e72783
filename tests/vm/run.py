"""The virtual-machine suite: chooses scenes, runs them, prints a table. Started by scripts/vm-test, which
builds what it needs.
"""

import argparse
import concurrent.futures
import os
import random
import shutil
import sys
import tempfile
import time
import traceback

import boot
import log_writes
import recipes
import scenes
from rig import Failed, Geometry
from vm import Vm, VmError

SMALL, LARGE = Geometry(2, 1), Geometry(4, 2)
# That of README.md.
REAL = Geometry(8, 3)

# (name, scene, geometry, filesystem, m members absent, also in the quick run)
CASES = [
    ("attach", scenes.attach, SMALL, "ext4", False, False),
    ("attach", scenes.attach, LARGE, "ext4", True, True),
    ("kill", scenes.kill, SMALL, "ext4", False, True),
    ("kill", scenes.kill, LARGE, "xfs", False, False),
    ("kill", scenes.kill, LARGE, "ext4", True, False),
    ("members", scenes.members, SMALL, "xfs", False, False),
    ("members", scenes.members, LARGE, "ext4", False, True),
    ("power", scenes.power, SMALL, "ext4", False, False),
    ("power", scenes.power, LARGE, "xfs", False, True),
    ("power", scenes.power, SMALL, "xfs", True, False),
    ("power", scenes.power, LARGE, "ext4", True, False),
    ("log-writes", log_writes.raw, SMALL, "raw", False, True),
    ("log-writes", log_writes.raw, LARGE, "raw", True, False),
    ("log-writes", log_writes.filesystem, LARGE, "ext4", False, False),
    ("memory", scenes.memory, SMALL, "ext4", False, True),
    ("boot", boot.system, SMALL, "ext4", False, False),
    ("recipes", recipes.by_hand, REAL, "xfs", False, True),
    ("recipes", recipes.installed, REAL, "xfs", False, False),
    ("swap", scenes.swap, SMALL, "none", False, False),
]

# Run only when named: what is known not to hold, and documented so (docs/attach.md).
BY_NAME_ONLY = {"swap"}


class Run:
    """What a scene is given: where things are, how much to do, and chances that a seed repeats."""

    def __init__(self, arguments, base, label):
        self.image, self.calpe, self.load = arguments.image, arguments.calpe, arguments.vm_load
        self.quick, self.cycles, self.seed = arguments.quick, arguments.cycles, arguments.seed
        self.base, self.directories = base, []
        self.random = random.Random(f"{self.seed} {label}")

    def directory(self):
        self.directories.append(tempfile.mkdtemp(prefix="scene-", dir=self.base))
        return self.directories[-1]

    def few(self, full, quick):
        return quick if self.quick else full


def main():
    parser = argparse.ArgumentParser(prog="scripts/vm-test", description=__doc__)
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help="attach kill members power log-writes memory boot recipes swap [default: all but swap]")
    parser.add_argument("--quick", action="store_true", help="one short case of each scene")
    parser.add_argument("--cycles", type=int, default=0, help="power cuts of each case [default: 5; quick: 2]")
    parser.add_argument("--seed", type=int, default=None, help="of the loads and the moments [default: from the clock]")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="machines at a time, a core each [default: 2]")
    parser.add_argument("--keep", action="store_true", help="keep the disks of scenes that fail")
    parser.add_argument("--image", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--calpe", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--vm-load", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--disks", default=None, metavar="DIR", help="where the disks are made [default: /dev/shm with 8 GiB free, else target/vm]")
    arguments = parser.parse_args()
    known = {case[0] for case in CASES}
    unknown = set(arguments.scenes) - known
    if unknown:
        parser.error(f"no scene {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    if arguments.seed is None:
        arguments.seed = int(time.time()) % 1_000_000
    base = tempfile.mkdtemp(prefix="calpe-vm-", dir=arguments.disks or roomy(arguments.image))
    chosen = set(arguments.scenes) or known - BY_NAME_ONLY
    wanted = [case for case in CASES if case[0] in chosen and (case[5] or not arguments.quick)]
    print(f"{len(wanted)} cases, {arguments.jobs} at a time, seed {arguments.seed}, disks in {base}", flush=True)
    rows, began = [], time.monotonic()

    def one(case):
        name, scene, geometry, filesystem, degraded, _ = case
        label = (name, str(geometry), filesystem, "degraded" if degraded else "whole")
        run, start = Run(arguments, base, " ".join(label)), time.monotonic()
        try:
            good, counts = True, scene(run, geometry, filesystem, degraded)
        except (Failed, VmError) as error:
            good, counts = False, str(error)
        except Exception:  # A mistake in the suite is a failure, too, and the others still run.
            good, counts = False, traceback.format_exc()
        rows.append((label, good, time.monotonic() - start, counts))
        print(line(rows[-1]), flush=True)
        if good or not arguments.keep:
            for directory in run.directories:
                shutil.rmtree(directory, ignore_errors=True)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(one, wanted))
    failed = [row for row in rows if not row[1]]
    print(f"\n{len(rows) - len(failed)} of {len(rows)} cases passed, {Vm.booted} boots, {time.monotonic() - began:.0f} s")
    if failed:
        print(f"failed with --seed {arguments.seed}: " + ", ".join(" ".join(row[0]) for row in failed))
        return 1
    shutil.rmtree(base, ignore_errors=True)
    return 0


def line(row):
    (name, geometry, filesystem, state), good, seconds, counts = row
    return f"{'pass' if good else 'FAIL'}  {name:<10} {geometry}  {filesystem:<4}  {state:<8} {seconds:5.0f} s  {counts}"


def roomy(image):
    """In memory where there is enough of it: a flush of the guest is then no flush of a busy disk."""
    try:
        room = os.statvfs("/dev/shm")
        if room.f_bavail * room.f_frsize >= 8 << 30:
            return "/dev/shm"
    except OSError:
        pass
    return os.path.realpath(image)


if __name__ == "__main__":
    sys.exit(main())
