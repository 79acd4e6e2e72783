"""One virtual machine: qemu under software emulation, driven over a serial port of its own.

Owns the qemu process and its sockets. Must not know what a scene checks.

What a power cut is here: `cut()` ends qemu by SIGKILL. What the guest had in memory (page cache, the daemon,
requests on their way) is gone. What virtio had completed stays, flushed or not, because it is in the page
cache of the host: these cuts show that nothing is missing after a flush and that a torn sequence of writes is
mended; that *unflushed* writes may vanish is what the scene `log-writes` shows.
"""

import base64
import json
import os
import re
import select
import signal
import socket
import subprocess
import time


class VmError(Exception):
    """The machine did not do what it was told; carries what it printed."""


class Vm:
    """A machine with `disks`, a list of (serial, path). `directory` holds its sockets, console and report;
    `append` goes to the kernel.
    """

    booted = 0

    def __init__(self, image, directory, disks, memory="768M", report="report", append=""):
        self.image, self.directory = image, directory
        self.disks, self.memory = list(disks), memory
        self.report = os.path.join(directory, report)
        self.console = os.path.join(directory, "console")
        self.append = append
        self.number = 0
        self.process = None

    # -- life
    # ------------------------------------------------------------------------------------------------------

    def boot(self, seconds=180):
        for name in ("ctl", "qmp"):
            if os.path.exists(self._path(name)):
                os.unlink(self._path(name))
        arguments = [
            # One thread for both processors: with two, qemu may run kernel text that the other is patching.
            "qemu-system-x86_64", "-M", "pc", "-accel", "tcg,thread=single", "-cpu", "max", "-smp", "2", "-m", self.memory,
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-kernel", os.path.join(self.image, "vmlinuz"), "-initrd", os.path.join(self.image, "initramfs"),
            "-append", "console=ttyS0 loglevel=5 panic=-1 oops=panic mitigations=off random.trust_cpu=on "
                       f"tsc=reliable no_timer_check hung_task_panic=0 nowatchdog {self.append}",
            "-chardev", f"file,id=console,path={self.console},append=on", "-serial", "chardev:console",
            "-qmp", f"unix:{self._path('qmp')},server=on,wait=off",
            "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=ctl,path={self._path('ctl')},server=on,wait=off",
            "-device", "virtserialport,chardev=ctl,name=ctl",
            "-chardev", f"file,id=report,path={self.report},append=on",
            "-device", "virtserialport,chardev=report,name=report",
            "-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
        ]
        for serial, path in self.disks:
            arguments += ["-drive", self._drive(serial, path), "-device", self._device(serial)]
        with open(self._path("qemu.log"), "ab") as log:
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        Vm.booted += 1
        self.ctl = self._connect("ctl")
        self.buffer = b""
        self.number = 0
        self.release = self._answer(0, seconds, "boot")[1].strip()
        return self

    def cut(self):
        """The power goes."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.process = None

    def wait(self, seconds):
        """Waits for the machine to end by itself."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise VmError(f"the machine did not end within {seconds} s") from None
        self.process = None

    def off(self):
        """The power goes, after all that the guest wants to keep was synced."""
        self.sh("sync")
        self.cut()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cut()

    # -- commands
    # --------------------------------------------------------------------------------------------------

    def sh(self, script, seconds=120):
        """Runs a shell script in the guest (`sh -eu`) and returns what it printed; an exit status other than
        0 raises.
        """
        status, output = self.try_sh(script, seconds)
        if status != 0:
            raise VmError(f"exit status {status} of\n    {script.strip()}\nwhich printed\n{output}")
        return output

    def try_sh(self, script, seconds=120):
        """Like `sh`, but returns (exit status, what it printed)."""
        self.number += 1
        line = f"{self.number} {base64.b64encode(script.encode()).decode()}\n"
        self.ctl.sendall(line.encode())
        return self._answer(self.number, seconds, script)

    def until(self, script, seconds=60, what=None):
        """Runs `script` again and again until it succeeds."""
        end = time.monotonic() + seconds
        while True:
            status, output = self.try_sh(script)
            if status == 0:
                return output
            if time.monotonic() > end:
                raise VmError(f"not within {seconds} s: {what or script}\n{output}")
            time.sleep(0.2)

    # -- hardware
    # --------------------------------------------------------------------------------------------------

    def add_disk(self, serial, path):
        node, drive = f"d-{serial}", self._drive(serial, path)
        self._qmp("human-monitor-command", {"command-line": f"drive_add 0 {drive}"})
        self._qmp("device_add", {"driver": "virtio-blk-pci", "drive": node, "id": f"v-{serial}", "serial": serial})
        self.until(f"name-disks; test -e /dev/disk/{serial}")

    def pull_disk(self, serial):
        """The disk vanishes, as when its cable is pulled."""
        self._qmp("device_del", {"id": f"v-{serial}"})
        self.until(f"! grep -qs {serial} /sys/block/vd*/serial", what=f"disk {serial} is gone")

    def complaints(self):
        """What the guest's kernel had to say that no scene may ignore."""
        bad = re.compile(r"BUG:|Oops|WARNING:|hung task|blocked for more than|dev nbd\d|EXT4-fs (error|warning|\(nbd)"
                         r"|XFS \(nbd.*(error|Corrupt|Metadata|shut)|Out of memory|Kernel panic")
        benign = re.compile(r"EXT4-fs \(nbd\d+\): (mounted|unmounting|recovery complete|re-mounted|mounting)")
        with open(self.console, errors="replace") as console:
            return [line.strip() for line in console if bad.search(line) and not benign.search(line)]

    # -- inside
    # ----------------------------------------------------------------------------------------------------

    def _path(self, name):
        return os.path.join(self.directory, name)

    @staticmethod
    def _drive(serial, path):
        # write-back: the guest sees a volatile cache and sends flushes, which become fdatasync here.
        return f"if=none,id=d-{serial},file={path},format=raw,cache=writeback,aio=threads,discard=unmap"

    @staticmethod
    def _device(serial):
        return f"virtio-blk-pci,drive=d-{serial},id=v-{serial},serial={serial}"

    def _connect(self, name):
        end = time.monotonic() + 20
        while True:
            try:
                peer = socket.socket(socket.AF_UNIX)
                peer.connect(self._path(name))
                return peer
            except OSError:
                peer.close()
                if self.process.poll() is not None or time.monotonic() > end:
                    with open(self._path("qemu.log")) as log:
                        raise VmError(f"qemu did not start:\n{log.read()}") from None
                time.sleep(0.02)

    def _answer(self, number, seconds, what):
        end = time.monotonic() + seconds
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.ctl], [], [], max(0, end - time.monotonic()))
            try:
                part = self.ctl.recv(65536) if ready else None
            except ConnectionError:
                part = None
            if not part:
                with open(self.console, errors="replace") as console:
                    tail = "".join(console.readlines()[-15:])
                why = f"the machine stopped at\n    {what.strip()}" if ready else f"no answer within {seconds} s to\n    {what.strip()}"
                raise VmError(f"{why}\nits console ends\n{tail}")
            self.buffer += part
        line, self.buffer = self.buffer.split(b"\n", 1)
        answered, status, *output = line.decode().split(" ")
        if int(answered) != number:
            raise VmError(f"answer {answered} to script {number}")
        return int(status), base64.b64decode(output[0] if output else "").decode(errors="replace")

    def _qmp(self, command, arguments):
        with self._connect("qmp") as peer, peer.makefile("rw") as stream:
            json.loads(stream.readline())
            for name, values in (("qmp_capabilities", {}), (command, arguments)):
                stream.write(json.dumps({"execute": name, "arguments": values}) + "\n")
                stream.flush()
                while True:
                    reply = json.loads(stream.readline())
                    if "error" in reply:
                        raise VmError(f"qemu: {command}: {reply['error']['desc']}")
                    if "return" in reply:
                        break
