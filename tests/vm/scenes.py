"""The scenes: what is done to a machine that lives on an array, and what must hold afterwards.

Each is a function of a run, a geometry, a filesystem and whether m members are absent all the time; it
returns its counts as text and raises `Failed` or `VmError` when anything is not as it must be. Must not know
qemu.
"""

import time

from rig import ARRAY, DEVICE, MIB, MOUNT, Rig, Failed, check
from vm import VmError


def absent_members(rig, degraded):
    """The members that a degraded scene does without: the first and the last ones, as many as there is
    parity.
    """
    width, parity = rig.geometry.width, rig.geometry.parity
    return [f"m{index}" for index in ([0] + list(range(width - 1, 0, -1)))[:parity]] if degraded else []


def begin(run, geometry, filesystem, degraded, **options):
    """A rig with a served and attached array. Degraded: it was whole once, and m of its disks are not plugged
    in now.
    """
    rig = Rig(run, geometry, filesystem, **options)
    rig.boot()
    rig.create()
    rig.serve()
    if degraded:
        rig.stop()
        rig.vm.off()
        rig.absent = set(absent_members(rig, degraded))
        rig.boot()
        rig.serve()
    expect_state(rig, "DEGRADED" if degraded else "ONLINE")
    rig.attach()
    return rig


def expect_state(rig, wanted):
    state, members = rig.status()
    check(state == wanted, f"the array is {state}, not {wanted}; members {members}")


def end_and_compare(rig, seed):
    """Ends the load and detaches the device: what was durable is there, then and in a clean filesystem that
    is mounted again.
    (changes, files, blocks)"""
    rig.end_load()
    changes = rig.durable()
    files, blocks = rig.verify(seed)
    rig.unmount()
    rig.fsck()
    rig.mount()
    rig.verify(seed)
    rig.unmount()
    rig.detach()
    return changes, files, blocks


def attach(run, geometry, filesystem, degraded):
    """Attach, look at what the kernel was told, make and fill a filesystem, check it, detach, attach again,
    compare.
    """
    with begin(run, geometry, filesystem, degraded) as rig:
        offered = limits(rig)
        counts = [0, 0, 0]
        for kind in ("ext4", "xfs"):
            rig.filesystem = kind
            rig.make_filesystem()
            rig.mount()
            rig.sh("rm -f /tmp/load.log")
            rig.load(run.seed, threads=3, ops=run.few(30, 15), files=24)
            rig.sh("sync")
            rig.unmount()
            counts[2] += rig.fsck()
            rig.detach()
            rig.attach()
            rig.mount()
            files, blocks = rig.verify(run.seed)
            counts[0], counts[1] = counts[0] + files, counts[1] + blocks
            if kind == "ext4":
                notices(rig, run.seed)
            rig.unmount()
        rig.detach()
        check(rig.vm.try_sh("test $(cat /sys/block/nbd0/size) -eq 0")[0] == 0, "the detached device still has a size")
        _, read = rig.vm.try_sh(f"dd if={DEVICE} bs=4k count=1 2>/dev/null | wc -c")
        check(read.strip() == "0", "the detached device can still be read")
        if not degraded:
            rig.scrub()
        rig.end()
    return f"{counts[0]} files, {counts[1]} blocks, {counts[2]} fsck clean; {offered}"


def limits(rig):
    """What the driver knows about the device."""
    names = ["fua", "write_cache", "discard_max_bytes", "write_zeroes_max_bytes", "max_hw_sectors_kb", "max_sectors_kb"]
    lines = rig.sh("cd /sys/block/nbd0/queue; " + "; ".join(f"cat {name}" for name in names)).splitlines()
    queue = dict(zip(names, lines))
    check(queue["write_cache"] == "write back", f"the kernel would send no flush: {queue}")
    check(queue["fua"] == "1", f"no FUA: {queue}")
    check(int(queue["discard_max_bytes"]) > 0, f"no discard: {queue}")
    check(int(queue["max_hw_sectors_kb"]) >= 1024, f"requests are cut small: {queue}")
    # The driver can send WRITE_ZEROES since Linux 6.11.
    zeroes = int(queue["write_zeroes_max_bytes"])
    major, minor = (int(part) for part in rig.vm.release.split(".")[:2])
    check(zeroes > 0 or (major, minor) < (6, 11), f"no write zeroes: {queue}")
    return f"fua, flush, discard, {'write-zeroes, ' if zeroes else ''}{queue['max_sectors_kb']} KiB requests"


def notices(rig, seed):
    """The comparison would notice one changed bit, a missing file, and a version that was never written."""
    victim = rig.sh(f"find {MOUNT}/t0 -type f | head -1").strip()
    rig.sh(f"cp {victim} /tmp/kept; printf x | dd of={victim} bs=1 seek=5000 conv=notrunc 2>/dev/null")
    changed, _ = rig.try_verify(seed)
    # A file of one block has no byte 5000: then its length is wrong.
    rig.sh(f"rm {victim}")
    missing, _ = rig.try_verify(seed)
    rig.sh(f"cp /tmp/kept {victim}; cp /tmp/load.log /tmp/claims.log; echo 'b 0 0 99999 1' >> /tmp/claims.log; "
           "echo 'd 0 0 99999' >> /tmp/claims.log")
    claimed, _ = rig.try_verify(seed, log="/tmp/claims.log")
    whole, output = rig.try_verify(seed)
    check(whole == 0, f"what was put back is not there: {output}")
    check(changed != 0 and missing != 0 and claimed != 0, "the comparison notices nothing")


def kill(run, geometry, filesystem, degraded):
    """The daemon is killed under the mounted filesystem, and restarted cleanly; the load goes on and nothing
    is lost.
    """
    kills, upgrades = run.few(6, 2), run.few(2, 1)
    with begin(run, geometry, filesystem, degraded) as rig:
        rig.make_filesystem()
        rig.mount()
        rig.start_load(run.seed, threads=3)
        rig.progress()
        began = time.monotonic()
        for number in range(kills + upgrades):
            time.sleep(run.random.uniform(0.1, 1.5))
            if number < kills:
                rig.kill()
                time.sleep(run.random.uniform(0, 1.5))
            else:
                rig.stop()
            rig.serve()
            rig.progress()
        seconds = (time.monotonic() - began) / (kills + upgrades)
        changes, files, blocks = end_and_compare(rig, run.seed)
        if not degraded:
            rig.scrub()
        rig.end()
    return f"{kills} kills, {upgrades} upgrades, {changes} changes, {files} files, {blocks} blocks; {seconds:.1f} s each"


def members(run, geometry, filesystem, degraded):
    """m members fail in three ways under the mount: told so, pulled out, and erring; each time they come back
    or are replaced.
    """
    parity, width = geometry.parity, geometry.width
    erring, pulled = list(range(parity)), list(range(parity, 2 * parity))
    told = list(range(width - parity, width))
    spares = {f"s{number}": 640 * MIB // geometry.data for number in range(parity)}
    rig = Rig(run, geometry, filesystem, extra=spares)
    with rig:
        rig.boot()
        sectors = rig.member_bytes // 512
        for index in erring:
            rig.sh(f"dmsetup create e{index} --table '0 {sectors} linear /dev/disk/m{index} 0'")
            rig.name_member(index, f"/dev/mapper/e{index}")
        rig.create()
        rig.serve()
        rig.attach()
        rig.make_filesystem()
        rig.mount()
        rig.start_load(run.seed, threads=3)
        rig.progress()

        def gone(indexes, how):
            for index in indexes:
                how(index)
                rig.progress(4)
            state, states = rig.status()
            check(state == "DEGRADED" and all(states[i] != "ONLINE" for i in indexes), f"{state}, {states}")
            rig.progress()

        def whole():
            rig.sh(f"calpe wait {ARRAY} 2>&1", 300)
            rig.vm.until(f"calpe status {ARRAY} | grep -q 'state: ONLINE'", 60, "the array is whole again")
            rig.progress(3)

        gone(told, lambda index: rig.sh(f"calpe fail {ARRAY} {index}"))
        for number, index in enumerate(told):
            rig.sh(f"calpe replace {ARRAY} {index} /dev/disk/s{number} -w 2>&1", 300)
        whole()

        if parity * 2 + parity <= width:
            gone(pulled, lambda index: rig.vm.pull_disk(f"m{index}"))
            for index in pulled:
                rig.vm.add_disk(f"m{index}", rig.path(f"m{index}"))
                rig.sh(f"calpe online {ARRAY} {index} --path /dev/disk/m{index} 2>&1")
            whole()

        def table(index, text):
            rig.sh(f"echo '0 {sectors} {text}' | dmsetup load e{index}; dmsetup resume --noudevsync e{index}")

        gone(erring, lambda index: table(index, "error"))
        for index in erring:
            table(index, f"linear /dev/disk/m{index} 0")
            rig.sh(f"calpe online {ARRAY} {index} --path /dev/mapper/e{index} 2>&1")
        whole()

        changes, files, blocks = end_and_compare(rig, run.seed)
        rig.scrub()
        # The kernel complains about the disks that erred, rightly; about the array it must not.
        rig.end()
    return f"3 x {parity} members lost and back, {changes} changes, {files} files, {blocks} blocks, scrub clean"


def power(run, geometry, filesystem, degraded):
    """The power is cut during a load, again and again; all that was durable is there after each boot."""
    cycles = run.cycles if run.cycles else run.few(5, 2)
    with begin(run, geometry, filesystem, degraded) as rig:
        rig.make_filesystem()
        rig.mount()
        histories, total, claims, waited = [], [0, 0, 0], 0, 0.0
        for cycle in range(cycles):
            place = f"{MOUNT}/c{cycle}"
            rig.start_load(run.seed + cycle, to=place, log="/dev/port-report", threads=3)
            # From the very start of a load to its middle.
            time.sleep(run.random.uniform(0.5, 5.0))
            rig.cut()
            with open(rig.vm.report) as report:
                histories.append(report.read())
            began = time.monotonic()
            rig.boot()
            rig.serve()
            waited += time.monotonic() - began
            rig.attach()
            # The mount replays the filesystem's journal, the daemon has replayed its own.
            rig.mount()
            rig.unmount()
            total[2] += rig.fsck()
            rig.mount()
            last = cycle == cycles - 1
            for number in range(0 if last else cycle, cycle + 1):
                if not histories[number].count("\nd"):
                    continue
                files, blocks = rig.verify(run.seed + number, of=f"{MOUNT}/c{number}", history=histories[number])
                if number == cycle:
                    total[0], total[1] = total[0] + files, total[1] + blocks
                    # A claim that what was only announced is durable must be refuted, or the comparison is
                    # blind.
                    status, _ = rig.try_verify(run.seed + cycle, of=place, history=boasting(histories[number]))
                    claims += status != 0
        check(total[0] > 0, "no cut came after a durable change")
        check(claims > 0, "the comparison believes whatever it is told")
        rig.unmount()
        rig.detach()
        if degraded:
            # The absent members come back, and have missed all of this.
            rig.stop()
            rig.vm.off()
            rig.absent = set()
            rig.boot()
            rig.serve()
            for index in range(geometry.width):
                if f"m{index}" in absent_members(rig, True):
                    rig.vm.try_sh(f"calpe online {ARRAY} {index} 2>&1")
            rig.vm.try_sh(f"calpe wait {ARRAY} -t rebuild 2>&1", 300)
            rig.vm.until(f"calpe status {ARRAY} | grep -q 'state: ONLINE'", 60, "the array is whole again")
        rig.scrub()
        rig.end()
    return (f"{cycles} cuts, {total[2]} fsck clean, {total[0]} durable files, {total[1]} blocks, {claims} false claims refuted; "
            f"{waited / cycles:.0f} s to serve again")


def boasting(history):
    """The log as a load would have written it that says 'durable' when it only begins."""
    said = {tuple(line.split(" ")[1:4]) for line in history.splitlines() if line.startswith("d ")}
    lines = history[:history.rfind("\n") + 1].splitlines()
    ahead = [line.split(" ")[1:4] for line in lines if line.startswith("b ") and tuple(line.split(" ")[1:4]) not in said]
    return "\n".join(lines + ["d " + " ".join(words) for words in ahead]) + "\n"


def memory(run, geometry, filesystem, degraded):
    """More dirty pages than there is memory: the machine must not wait for itself."""
    size = run.few(600, 420)
    with begin(run, geometry, filesystem, degraded, memory="448M", member_bytes=480 * MIB) as rig:
        rig.make_filesystem()
        rig.mount()
        began = time.monotonic()
        rig.sh(f"dd if=/dev/zero of={MOUNT}/big bs=1M count={size} 2>&1; sync", 300)
        flood = time.monotonic() - began
        rig.sh(f"test $(stat -c %s {MOUNT}/big) -eq {size * MIB}")
        rig.unmount()
        rig.fsck()
        rig.detach()
        rig.scrub()
        rig.end()
    return f"{size} MiB dirty through 448 MiB in {flood:.0f} s"


def swap(run, geometry, filesystem, degraded):
    """Swap on the array, and more in a tmpfs than there is memory: it comes back as it was."""
    with begin(run, geometry, filesystem, degraded, memory="448M", member_bytes=480 * MIB) as rig:
        began = time.monotonic()
        rig.sh(f"mkswap {DEVICE} >/dev/null; swapon {DEVICE}; mkdir -p /tmp/full; mount -t tmpfs -o size=420M full /tmp/full")
        rig.sh("vm-load write /tmp/full --seed 3 --ops 40 --log /tmp/load.log; "
               "dd if=/dev/urandom of=/tmp/full/a bs=1M count=170 2>/dev/null; md5sum < /tmp/full/a > /tmp/sum.a; "
               "cp /tmp/full/a /tmp/full/b", 300)
        used = int(rig.sh("awk '/SwapTotal/ { t = $2 } /SwapFree/ { f = $2 } END { print int((t - f) / 1024) }' /proc/meminfo"))
        check(used >= 32, f"only {used} MiB were swapped out: the machine has too much memory to show anything")
        rig.sh("md5sum < /tmp/full/b > /tmp/sum.b; cmp /tmp/sum.a /tmp/sum.b; rm /tmp/full/a; vm-load verify /tmp/full "
               "--seed 3 --log /tmp/load.log 2>&1", 300)
        rig.sh(f"umount /tmp/full; swapoff {DEVICE}", 120)
        seconds = time.monotonic() - began
        rig.detach()
        rig.scrub()
        rig.end()
    return f"{used} MiB swapped out and in again, {seconds:.0f} s"
