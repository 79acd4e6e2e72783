"""The scene `boot`: a machine whose systemd starts our units as docs/attach.md says, with a filesystem on an
array in /etc/fstab.

Must not know qemu, or how the machine was made (build-system).
"""

import os
import re
import time

from rig import ARRAY, DEVICE, MIB, Rig, check
from vm import Vm

PLACE = "/srv/load"
DAEMON, KEEPER = "calpe.service", "calpe-attach@nbd0.service"

# A boot takes half a minute under emulation, and much longer beside other work.
BOOT_SECONDS, SHUTDOWN_SECONDS = 300, 240


class System(Rig):
    """A rig whose machine boots systemd: from the initramfs of `image`, or from the disk `root`."""

    image, root = "system", None

    def start(self):
        self.boots += 1
        disks = [(name, self.path(name)) for name in self.disks if name not in self.absent]
        image = os.path.join(self.run.image, self.image)
        self.vm = Vm(image, self.directory, disks, "1G", report=f"report-{self.boots}",
                     append=f"calpe.root={self.root}" if self.root else "")
        self.vm.console = self.path(f"console-{self.boots}")
        self.vm.boot(BOOT_SECONDS)

    def console(self):
        with open(self.vm.console, errors="replace") as console:
            return console.read()

    def shut_down(self):
        """Ends the machine in order; the seconds that it took."""
        began = time.monotonic()
        # Not at once: who answers is stopped, too.
        self.sh("(sleep 1; systemctl --no-block poweroff) & true")
        self.vm.wait(SHUTDOWN_SECONDS)
        return time.monotonic() - began

    def at(self, unit, moment):
        """When a unit did something, in microseconds since the kernel started."""
        return int(self.sh(f"systemctl show --value -p {moment}TimestampMonotonic {unit}").strip() or 0)

    def process(self, unit):
        return int(self.sh(f"systemctl show --value -p MainPID {unit}").strip())

    def is_kept(self):
        self.vm.until(f"test $(systemctl is-active {DAEMON} {KEEPER} srv.mount | grep -c '^active$') -eq 3", 90,
                      "daemon, keeper and mount are active")


def system(run, geometry, filesystem, degraded):
    """Boots with a filesystem on a partition of the array, mounted from /etc/fstab; daemon and keeper die
    under it and come back; shuts down in order; boots
    again, and finds all that was durable in a filesystem that was left clean."""
    with System(run, geometry, filesystem, member_bytes=320 * MIB // geometry.data) as rig:
        rig.boot()
        rig.create()
        rig.serve()
        rig.attach()
        rig.sh(f"printf 'n\\np\\n1\\n\\n\\nw\\n' | fdisk {DEVICE} > /tmp/fdisk.out 2>&1 || cat /tmp/fdisk.out")
        rig.vm.until(f"test -b {DEVICE}p1", what="the partition is there")
        rig.sh(f"mkfs.ext4 -q -F -b 4096 {DEVICE}p1")
        rig.detach()
        rig.stop()
        rig.vm.off()

        rig.start()
        rig.is_kept()
        moments = [rig.at(DAEMON, "ActiveEnter"), rig.at(KEEPER, "ActiveEnter"), rig.at("srv.mount", "ActiveEnter"),
                   rig.at("local-fs.target", "ActiveEnter"), rig.at("sysinit.target", "ActiveEnter")]
        check(0 < moments[0] and moments == sorted(moments), f"daemon, device, mount, local-fs, sysinit came in another order: {moments}")
        owner = rig.sh(f"awk '/^Uid:/ {{ print $2 }}' /proc/{rig.process(DAEMON)}/status").strip()
        check(owner == "900", f"the daemon runs as {owner}")
        said = rig.console()
        check("ordering cycle" not in said, "systemd found a circle among the units")
        mounted = rig.sh("grep ' /srv ' /proc/mounts")
        check(mounted.startswith(f"{DEVICE}p1 /srv ext4 rw"), f"mounted is {mounted}")
        rig.sh(f"test $(readlink -f /dev/calpe/{ARRAY}) = {DEVICE}")
        rig.start_load(run.seed, to=PLACE, threads=2)
        rig.progress()
        for unit, how in ((DAEMON, "restart"), (DAEMON, "kill -s KILL"), (KEEPER, "kill -s KILL")):
            before = rig.process(unit)
            rig.sh(f"systemctl {how} {unit}", 240)
            rig.vm.until(f"p=$(systemctl show --value -p MainPID {unit}); test $p -gt 0 -a $p -ne {before}", 60, f"{unit} is back after {how}")
            rig.progress()
            rig.is_kept()
        # What the keeper's death did not end.
        check(rig.sh("grep -c ' /srv ' /proc/mounts").strip() == "1", "the mount went with the keeper")
        rig.end_load()
        changes = rig.durable()
        rig.verify(run.seed, of=PLACE)
        history = rig.sh("cat /tmp/load.log")
        took = rig.shut_down()
        check_order(rig.console())

        rig.start()
        rig.is_kept()
        said = rig.console()
        check("recovering journal" not in said and "recovery complete" not in said, "the filesystem was not left clean")
        check("not marked clean" not in said, "the array was not left clean")
        files, blocks = rig.verify(run.seed, of=PLACE, history=history)
        rig.shut_down()
        check_order(rig.console())
    return f"2 boots, mounted by fstab, 3 restarts under it, {changes} changes, {files} files, {blocks} blocks; {took:.0f} s to shut down"


def check_order(console):
    """At shutdown the mount went first, then the device, then the daemon, and nothing failed or was killed
    for being late.
    """
    wanted = [r"Unmounted (srv\.mount|.*/srv\.)", rf"Stopped {re.escape(KEEPER)}", rf"Stopped {re.escape(DAEMON)}"]
    places = [[match.start() for match in re.finditer(pattern, console)] for pattern in wanted]
    check(all(places), f"not all was stopped: {places}\n{tail(console)}")
    last = [place[-1] for place in places]
    check(last == sorted(last), f"mount, device and daemon were stopped in another order: {last}\n{tail(console)}")
    late = re.findall(r".*(?:[Tt]imed out|Failed unmounting|Failed to unmount|Killing process).*", console[last[0]:])
    check(not late, f"the shutdown did not go as it should: {late}")


def tail(console):
    return "\n".join(console.splitlines()[-40:])
