"""The scenes of `recipes`: what README.md, docs/attach.md and docs/systemd.md tell a person to type is typed
as it stands, on empty disks, in this order. The documents are read when a scene runs: a recipe that changes
is tested as it is then.

What no document can say literally is put in here: names of disks in place of `...`, and the section that
`calpe create` prints, for calpe.toml. Must not know qemu.
"""

import base64
import os
import re
import shutil

from boot import DAEMON, KEEPER, System, check_order
from rig import ARRAY, MIB, Rig, check
from vm import VmError

PROJECT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../.."))
CHECKOUT = "/root/calpe"

# A mark of what was on the filesystem before the machine was booted from its configuration.
MARK = "/srv/mark"


def recipe(document, heading, number=0):
    """The lines of a code block, fenced or indented, under a heading."""
    blocks, block, inside, fenced = [], [], False, False
    with open(os.path.join(PROJECT, document)) as text:
        for line in text.read().splitlines() + [""]:
            if line.startswith("```"):
                fenced = not fenced
            elif line.startswith("#") and not fenced:
                inside = line.lstrip("#").strip() == heading
            elif inside and (fenced or line.startswith("    ")):
                block.append(line if fenced else line[4:])
                continue
            if block:
                blocks.append(block)
                block = []
    check(len(blocks) > number, f"{document} has no recipe {number} under '{heading}'")
    return blocks[number]


class Terminal:
    """A person in the checkout of the project, who types lines of the documents."""

    def __init__(self, rig):
        self.rig = rig
        with open(os.path.join(PROJECT, "README.md")) as readme:
            path = re.search(r"`(PATH=\S+/target/release:\$PATH)`", readme.read())
        check(path, "README.md does not say where the program is")
        self.begin = f"cd {CHECKOUT}; export {path.group(1)}; "
        self.typed = 0

    def types(self, line, seconds=180):
        """Runs a line to its end; what it printed."""
        self.typed += 1
        try:
            return self.rig.sh(f"{self.begin}{line}", seconds)
        except VmError as error:
            raise VmError(f"a line of the documents fails: {line}\n{error}\nthe daemon says\n{self.log()}") from None

    def types_in_another(self, line):
        """Runs a line that does not end, in another terminal."""
        self.typed += 1
        self.rig.sh(f"{self.begin}({line.split('#')[0]}) > /tmp/daemon.log 2>&1 & true")

    def log(self):
        return self.rig.vm.try_sh("cat /tmp/daemon.log 2>/dev/null || true; journalctl -b -u calpe --no-pager 2>/dev/null | tail -30")[1]


def real_disks(terminal, disks):
    """README.md: creates, serves and shows an array. What `create` printed."""
    printed = None
    for line in recipe("README.md", "On real disks"):
        if "..." in line.split("#")[0]:
            line = line.replace("/dev/disk/by-id/...", " ".join(f"/dev/disk/by-id/virtio-{name}" for name in disks))
        if line.startswith("calpe serve "):
            terminal.types_in_another(line)
            terminal.rig.vm.until("test -S /run/calpe/control.sock", 60, "the daemon answers")
            continue
        said = terminal.types(line)
        if line.startswith("calpe create "):
            printed = said
        shown = said
    check(printed, "README.md creates no array")
    check("state: ONLINE" in shown and shown.count("ONLINE") > len(disks), f"the array is not whole at the end of README's recipe:\n{shown}")
    return printed


def attached(terminal):
    """docs/attach.md: a filesystem on a block device, and detached again."""
    for line in recipe("docs/attach.md", "A block device on an array"):
        terminal.types(line)
        if "mount /dev/nbd0" in line and not line.startswith("umount"):
            terminal.types(f"grep -q ' /srv ' /proc/mounts; echo kept > {MARK}")
    check("/srv" not in terminal.types("cat /proc/mounts"), "the recipe leaves it mounted")


def stop_by_hand(terminal):
    """Ctrl-C in the other terminal."""
    terminal.types("kill -INT $(pidof calpe)")
    terminal.rig.vm.until("! pidof calpe", 60, "the daemon ends")


def by_hand(run, geometry, filesystem, degraded):
    """README.md and the first recipe of docs/attach.md, on a machine without systemd."""
    with Rig(run, geometry, filesystem, member_bytes=96 * MIB, memory="1G") as rig:
        rig.boot()
        with open(os.path.join(PROJECT, "conf/calpe.toml"), "rb") as conf:
            conf = base64.b64encode(conf.read()).decode()
        rig.sh(f"mkdir -p /srv /dev/disk/by-id {CHECKOUT}/conf {CHECKOUT}/target/release; ln -s /bin/calpe {CHECKOUT}/target/release/;"
               f" echo {conf} | base64 -d > {CHECKOUT}/conf/calpe.toml")
        for name in rig.disks:
            # As udev names them.
            rig.sh(f"ln -s /dev/disk/{name} /dev/disk/by-id/virtio-{name}")
        terminal = Terminal(rig)
        real_disks(terminal, rig.disks)
        attached(terminal)
        stop_by_hand(terminal)
        rig.end()
    return f"{terminal.typed} lines"


class Bare(System):
    """A Debian system with a checkout of the project, and nothing of it installed."""

    image, root = "", "root"

    def start(self):
        if self.root not in self.disks:
            shutil.copy(os.path.join(self.run.image, "system", "root.ext4"), self.path(self.root))
            self.disks[self.root] = 0
        super().start()


def installed(run, geometry, filesystem, degraded):
    """The same, then docs/systemd.md and docs/attach.md up to a filesystem that a boot mounts from
    /etc/fstab.
    """
    with Bare(run, geometry, filesystem, member_bytes=96 * MIB) as rig:
        members = list(rig.disks)
        rig.start()
        terminal = Terminal(rig)
        printed = real_disks(terminal, members)
        attached(terminal)
        stop_by_hand(terminal)

        section = printed[printed.index("  [[array]]"):]
        for line in recipe("docs/systemd.md", "Install"):
            if line.startswith("systemctl enable"):
                rig.sh(f"cat >> /etc/calpe/calpe.toml <<'END'\n{section}END\n")
            terminal.types(line)
        for line in recipe("docs/attach.md", "At boot"):
            terminal.types(line, 360)
        fstab = recipe("docs/attach.md", "At boot", 1)
        for line in fstab:
            rig.sh(f"echo '{line}' >> /etc/fstab")
        rig.shut_down()

        rig.start()
        rig.is_kept()
        mounted = rig.sh("grep ' /srv ' /proc/mounts")
        check(mounted.startswith("/dev/nbd0 /srv xfs rw"), f"mounted is {mounted}")
        check(rig.sh(f"cat {MARK}").strip() == "kept", "another filesystem is mounted")
        check("ordering cycle" not in rig.console(), "systemd found a circle among the units")
        owner = rig.sh(f"stat -c %U /proc/{rig.process(DAEMON)}").strip()
        check(owner == "calpe", f"the daemon runs as {owner}")
        shown = terminal.types("calpe status -v; calpe status --test")
        check("daemon: " not in shown and "state: ONLINE" in shown, f"the daemon is not well:\n{shown}")
        said = rig.sh(f"journalctl -b --no-pager -o cat -u {DAEMON} -u {KEEPER}")
        # Disks may come later than the daemon.
        complaints = [line for line in said.splitlines() if re.search(r" (WARN|ERROR) ", line) and "it is tried again" not in line]
        check(said and not complaints, f"what was installed complains:\n{said}")
        rig.shut_down()
        check_order(rig.console())
    return f"{terminal.typed} lines, mounted by fstab after a boot"
