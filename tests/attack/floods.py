#!/usr/bin/env python3
"""What one client can do to another: floods of cheap or awkward requests against one array, while a victim reads 4 KiB at a time
from another one of the same daemon. nbdkit's file plugin, two files, stands beside it in the same run.

    floods.py --calpe BINARY [--nbdkit] [--connections 20,100] [--seconds 3] [--only NAME;...] [--json] [--bound MS]

For each flood: connections, bytes sent to the server, the victim's median, 99th percentile and longest wait in ms. With --bound, exit
status 1 when a 99th percentile of calpe's is above it. Loopback and unix sockets only; ends by itself.
"""
import argparse, json, os, random, selectors, shutil, signal, socket, struct, subprocess, sys, tempfile, time

OPT_GO, OPT_LIST, OPT_STRUCTURED, OPT_SET_META, OPT_STARTTLS = 7, 3, 8, 10, 5
READ, WRITE, DISC, FLUSH, TRIM, CACHE, ZEROES, STATUS = range(8)
GIB = 1 << 30
VOLUME = 8 * GIB
# What a victim reads: it holds data, so that members are read, too.
WRITTEN = 64 << 20


def option(code, data=b""):
    return b"IHAVEOPT" + struct.pack(">II", code, len(data)) + data


def recv_all(sock, count):
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the server closed the connection")
        data += more
    return data


def option_reply(sock):
    """Replies to one option until the last: the codes."""
    while True:
        _, _, code, length = struct.unpack(">QIII", recv_all(sock, 20))
        recv_all(sock, length)
        if code & 0x80000000 or code == 1:
            return code


def connect(target, export, context=None):
    """A connection in its transmission phase. With a context, structured replies and that context."""
    sock = dial(target)
    recv_all(sock, 18)
    sock.sendall(struct.pack(">I", 3))
    name = export.encode()
    if context:
        sock.sendall(option(OPT_STRUCTURED))
        option_reply(sock)
        query = context.encode()
        data = struct.pack(">I", len(name)) + name + struct.pack(">II", 1, len(query)) + query
        sock.sendall(option(OPT_SET_META, data))
        option_reply(sock)
    sock.sendall(option(OPT_GO, struct.pack(">I", len(name)) + name + struct.pack(">H", 0)))
    if option_reply(sock) != 1:
        raise ConnectionError("the server refused the export")
    return sock


def dial(target):
    sock = socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET)
    sock.settimeout(60)
    sock.connect(target)
    return sock


def request(command, offset, length, flags=0, cookie=1):
    return struct.pack(">IHHQQI", 0x25609513, flags, command, cookie, offset, length)


def batch(make):
    """Some 32 KiB of requests."""
    return b"".join(make() for _ in range(1000))


def anywhere(length):
    return random.randrange(0, (VOLUME - length) // 4096 + 1) * 4096


def small_or_wide():
    """Writes that wait for each other one by one, and now and then what overlaps many of them."""
    if random.random() < 0.02:
        return request(TRIM, anywhere(256 << 20), 256 << 20)
    return request(WRITE, random.randrange(VOLUME), 1) + b"w"


LONG = (1 << 32) - 4096 * 1024
# name: (context, whether replies are read, a maker of the bytes that are sent over and over, or a special)
FLOODS = {
    "none": None,
    "status, whole volume": ("base:allocation", True, lambda: request(STATUS, 0, LONG)),
    "status, 4 KiB": ("base:allocation", True, lambda: request(STATUS, anywhere(4096), 4096)),
    "health, whole volume": ("calpe:health", True, lambda: request(STATUS, 0, LONG)),
    "trim, 4 GiB": (None, True, lambda: request(TRIM, 0, LONG)),
    "trim, 1 MiB": (None, True, lambda: request(TRIM, anywhere(1 << 20), 1 << 20)),
    "zeroes, 4 GiB": (None, True, lambda: request(ZEROES, 0, LONG)),
    "flush": (None, True, lambda: request(FLUSH, 0, 0)),
    "cache": (None, True, lambda: request(CACHE, anywhere(4096), 4096)),
    "unknown commands": (None, True, lambda: request(77, 0, 0)),
    "reads, 4 KiB": (None, True, lambda: request(READ, anywhere(4096), 4096)),
    "reads, 1 MiB": (None, True, lambda: request(READ, anywhere(1 << 20), 1 << 20)),
    "writes, 4 KiB": (None, True, lambda: request(WRITE, anywhere(4096), 4096) + b"w" * 4096),
    "one byte, wide trims": (None, True, lambda: small_or_wide()),
    "replies never read": (None, False, lambda: request(READ, anywhere(1 << 20), 1 << 20)),
    "status never read": ("base:allocation", False, lambda: request(STATUS, 0, LONG)),
    "payloads never sent": (None, False, "announce"),
    "connects": (None, False, "connects"),
    "silent handshakes": (None, False, "silent"),
    "options": (None, True, "options"),
}


def attack(target, name, connections, seconds):
    """Child process: floods until the time is over; prints how many bytes it sent."""
    context, reads, make = FLOODS[name]
    deadline = time.monotonic() + seconds
    sent = 0
    if make == "connects":
        while time.monotonic() < deadline:
            try:
                dial(target).close()
                sent += 1
            except OSError:
                pass
        print(sent)
        return
    socks = []
    payload = b""
    for _ in range(connections):
        try:
            if make in ("silent", "options"):
                sock = dial(target)
                if make == "options":
                    sock.sendall(struct.pack(">I", 3))
                    payload = option(OPT_LIST) * 30
            else:
                sock = connect(target, "a", context)
                if make == "announce":
                    sock.sendall(request(WRITE, 0, 32 << 20) + b"x" * 4096)
                    sent += 4096
            socks.append(sock)
        except OSError:
            pass
    if make in ("silent", "announce"):
        time.sleep(max(0, deadline - time.monotonic()))
        print(sent)
        return
    if callable(make):
        payload = batch(make)
    selector = selectors.DefaultSelector()
    left = {}
    for sock in socks:
        sock.setblocking(False)
        left[sock] = memoryview(payload)
        selector.register(sock, selectors.EVENT_WRITE | (selectors.EVENT_READ if reads else 0))
    while time.monotonic() < deadline:
        for key, events in selector.select(0.1):
            sock = key.fileobj
            try:
                if events & selectors.EVENT_READ and not sock.recv(1 << 20):
                    raise ConnectionError
                if events & selectors.EVENT_WRITE:
                    count = sock.send(left[sock])
                    sent += count
                    left[sock] = left[sock][count:] or memoryview(payload)
            except BlockingIOError:
                pass
            except OSError:
                selector.unregister(sock)
                sock.close()
                if make == "options":
                    try:
                        sock = dial(target)
                        sock.sendall(struct.pack(">I", 3))
                        sock.setblocking(False)
                        left[sock] = memoryview(payload)
                        selector.register(sock, selectors.EVENT_WRITE | selectors.EVENT_READ)
                    except OSError:
                        pass
    print(sent)


def fill(target):
    sock = connect(target, "b")
    for offset in range(0, WRITTEN, 1 << 20):
        sock.sendall(request(WRITE, offset, 1 << 20) + os.urandom(1 << 20))
        if recv_all(sock, 16)[4:8] != bytes(4):
            raise SystemExit("a write failed")
    sock.close()


def victim(target, seconds):
    """Waits of single 4 KiB reads of what was written, in ms; connects anew for every hundredth, which counts as one, too."""
    waits, deadline = [], time.monotonic() + seconds
    sock, turn = None, 0
    while time.monotonic() < deadline:
        begun = time.monotonic()
        while True:
            try:
                if turn % 100 == 0:
                    if sock:
                        sock.close()
                    sock = connect(target, "b")
                else:
                    sock.sendall(request(READ, random.randrange(WRITTEN // 4096) * 4096, 4096))
                    recv_all(sock, 16 + 4096)
                break
            except OSError:
                # It comes again, and goes on waiting.
                sock, turn = None, 0
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
        waits.append((time.monotonic() - begun) * 1000)
        turn += 1
        time.sleep(0.0005)
    return sorted(waits)


def measure(target, name, connections, seconds, settle=0.7):
    child = None
    if FLOODS[name]:
        child = subprocess.Popen(
            [sys.executable, __file__, "--attack", name, "--target", json.dumps(target), "--connections",
             str(connections), "--seconds", str(seconds + 2 * settle)], stdout=subprocess.PIPE, text=True)
        time.sleep(settle)
    waits = victim(target, seconds)
    sent = 0
    if child:
        try:
            sent = int(child.communicate(timeout=60)[0] or 0)
        except subprocess.TimeoutExpired:
            child.kill()
    at = lambda share: waits[min(len(waits) - 1, int(len(waits) * share))]
    return {"flood": name, "connections": connections if child else 0, "bytes": sent, "reads": len(waits),
            "p50": at(0.5), "p99": at(0.99), "longest": waits[-1]}


class Calpe:
    name = "calpe"

    def __init__(self, binary, folder):
        self.binary, self.folder = os.path.abspath(binary), folder
        config = f'[daemon]\nruntime_dir = "{folder}"\nreclaim_safe = false\n[listen]\nunix = "{folder}/nbd.sock"\nmax_connections = 110\n'
        for name in "ab":
            members = [f"{folder}/{name}{index}.img" for index in range(3)]
            subprocess.run([self.binary, "create", name, "--data", "2", "--parity", "1", "--size", str(VOLUME),
                            *members], check=True, stdout=subprocess.DEVNULL)
            config += f'[[array]]\nname = "{name}"\nsearch = ["{folder}"]\n'
        with open(f"{folder}/calpe.toml", "w") as file:
            file.write(config)
        self.log = open(f"{folder}/log", "w")
        self.process = subprocess.Popen([self.binary, "serve", "--config", f"{folder}/calpe.toml"],
                                        stdout=self.log, stderr=self.log)
        self.target = f"{folder}/nbd.sock"

    def revive(self):
        pass

    def memory(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("VmHWM")), 0) << 10

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Nbdkit(Calpe):
    name = "nbdkit"

    def __init__(self, folder):
        os.mkdir(f"{folder}/files")
        for name in "ab":
            with open(f"{folder}/files/{name}", "wb") as file:
                file.truncate(VOLUME)
        self.target = f"{folder}/nbdkit.sock"
        self.start = ["nbdkit", "-f", "-U", self.target, "file", f"dir={folder}/files"]
        self.process = None
        self.revive()

    def revive(self):
        if self.process is None or self.process.poll() is not None:
            if os.path.exists(self.target):
                os.unlink(self.target)
            self.process = subprocess.Popen(self.start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            ready(self)


def ready(server):
    for _ in range(600):
        try:
            for name in "ab":
                connect(server.target, name).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{server.name} does not answer")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calpe")
    parser.add_argument("--nbdkit", action="store_true")
    parser.add_argument("--connections", default="20,100")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--settle", type=float, default=0.7, help="how long a flood runs before its victim begins")
    parser.add_argument("--only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bound", type=float)
    parser.add_argument("--attack")
    parser.add_argument("--target")
    args = parser.parse_args()
    if args.attack:
        target = json.loads(args.target)
        return attack(target if isinstance(target, str) else tuple(target), args.attack, int(args.connections),
                      args.seconds)
    wanted = args.only.split(";") if args.only else list(FLOODS)
    wanted = [name for name in FLOODS if any(part in name for part in wanted)]
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    servers, bad = [], False
    try:
        servers = [Calpe(args.calpe, folder)] if args.calpe else []
        servers += [Nbdkit(folder)] if args.nbdkit else []
        for server in servers:
            ready(server)
            fill(server.target)
        if not args.json:
            print(f"{'server':7} {'flood':22} {'conn':>4} {'sent':>10} {'reads':>6} {'p50 ms':>8} {'p99 ms':>8} {'longest':>9}")
        for name in wanted:
            for connections in [int(text) for text in args.connections.split(",")][: 1 if name in ("none", "connects") else None]:
                for server in servers:
                    if "health" in name and server.name == "nbdkit":
                        continue
                    server.revive()
                    row = {"server": server.name, **measure(server.target, name, connections, args.seconds, args.settle)}
                    row["rss"] = server.memory()
                    bad |= bool(args.bound) and server.name == "calpe" and row["p99"] > args.bound
                    if args.json:
                        print(json.dumps(row), flush=True)
                    else:
                        print(f"{server.name:7} {name:22} {row['connections']:4} {row['bytes']:10} {row['reads']:6}"
                              f" {row['p50']:8.2f} {row['p99']:8.2f} {row['longest']:9.1f}  {row['rss'] >> 20} MiB", flush=True)
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
