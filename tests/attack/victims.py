"""The victims of floods.py, and what it and they speak: a small NBD client, the control socket of calpe.

A victim is measured for some seconds, or until what it does has ended, and returns its waits in ms.
The bytes of each block tell its place, so that a victim notices wrong ones.
"""
import json, os, random, shutil, signal, socket, struct, subprocess, time

OPT_GO, OPT_LIST, OPT_STRUCTURED, OPT_SET_META = 7, 3, 8, 10
READ, WRITE, DISC, FLUSH, TRIM, CACHE, ZEROES, STATUS = range(8)
FUA = 1
BLOCK = 4096
# What victims read and write: all of it holds data, so that members are read, too.
WRITTEN = 64 << 20
# What a rebuild copies and an import finds, in bytes of user data.
REBUILT = 512 << 20
LOGGED = 48 << 20


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


def block(offset):
    """What is written at this place."""
    return struct.pack(">Q", offset // BLOCK + 1) * (BLOCK // 8)


def succeed(sock):
    """Takes a simple reply, which may not be an error."""
    error = struct.unpack(">I", recv_all(sock, 16)[4:8])[0]
    if error:
        raise SystemExit(f"a request of a victim failed: error {error}")


def fill(target, export, length):
    """Writes all blocks up to there."""
    sock = connect(target, export)
    for offset in range(0, length, 1 << 20):
        data = b"".join(block(offset + at) for at in range(0, 1 << 20, BLOCK))
        sock.sendall(request(WRITE, offset, 1 << 20) + data)
        succeed(sock)
    sock.sendall(request(FLUSH, 0, 0))
    succeed(sock)
    sock.close()


def read_one(sock, offset):
    sock.sendall(request(READ, offset, BLOCK))
    succeed(sock)
    if recv_all(sock, BLOCK) != block(offset):
        raise SystemExit(f"wrong bytes at {offset}")


def write_one(sock, offset):
    sock.sendall(request(WRITE, offset, BLOCK) + block(offset))
    succeed(sock)


def flush_one(sock, offset):
    write_one(sock, offset)
    sock.sendall(request(FLUSH, 0, 0))
    succeed(sock)


def client(one):
    """A victim that sends one request after the other, at random places, for so many seconds. It
    connects anew for every hundredth, which counts as one, too."""

    def waits(server, seconds, _limit):
        waits, deadline = [], time.monotonic() + seconds
        sock, turn, refused = None, 0, 0
        while time.monotonic() < deadline:
            begun = time.monotonic()
            while True:
                try:
                    if turn % 100 == 0:
                        if sock:
                            sock.close()
                        sock = connect(server.target, "b")
                    else:
                        one(sock, random.randrange(WRITTEN // BLOCK) * BLOCK)
                    break
                except OSError:
                    # It comes again, and goes on waiting.
                    sock, turn, refused = None, 0, refused + 1
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.001)
            waits.append((time.monotonic() - begun) * 1000)
            turn += 1
            time.sleep(0.0005)
        if refused > len(waits):
            raise SystemExit(f"{server.name} has refused its victim {refused} times, and served it {len(waits)} times at most")
        return waits

    return waits


def ask(server, **request):
    """A request on the control socket, as the commands make it: the reply."""
    sock = dial(server.control)
    sock.sendall(json.dumps(request).encode() + b"\n")
    reply = b""
    while not reply.endswith(b"\n"):
        more = sock.recv(1 << 20)
        if not more:
            raise ConnectionError("the daemon closed the control socket")
        reply += more
    sock.close()
    reply = json.loads(reply)
    if reply["reply"] == "error":
        raise SystemExit(f"{request}: {reply}")
    return reply


def array(server, name):
    """The status of an array."""
    return ask(server, request="status", array=name)["arrays"][0]


def status(server, seconds, _limit):
    """Status of all arrays, as an administrator asks for it."""
    waits, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        begun = time.monotonic()
        ask(server, request="status", array=None)
        waits.append((time.monotonic() - begun) * 1000)
        time.sleep(0.01)
    return waits


def until(done, limit):
    """Waits until something is over: the one wait in ms. Without an end it is the limit."""
    begun = time.monotonic()
    while not done():
        if time.monotonic() - begun > limit:
            break
        time.sleep(0.02)
    return [(time.monotonic() - begun) * 1000]


def rebuild(server, _seconds, limit):
    """A member of an array is replaced by a new file, onto which it is rebuilt."""
    old = array(server, "r")["members"][2]["name"]
    new = f"{server.folder}/r-new{time.monotonic_ns()}.img"
    ask(server, request="replace", array="r", old={"index": 2}, new=new, force=False, dry_run=False)

    def is_built():
        member = array(server, "r")["members"][2]
        return member["name"] == new and member["state"] == "ONLINE" and not member["replacement"]

    waits = until(is_built, limit)
    if waits[0] > limit * 1000:
        ask(server, request="cancel_replace", array="r", member={"index": 2}, dry_run=False)
        old = new
    os.unlink(old)
    return waits


def import_(server, _seconds, limit):
    """An array is imported whose daemon was killed: its log is replayed before it is served."""
    folder = f"{server.folder}/imported"
    subprocess.run(["cp", "-r", "--sparse=always", f"{server.folder}/killed", folder], check=True)
    begun = time.monotonic()
    ask(server, request="import", array="i", all=False, dirs=[folder], force=False, once=True, dry_run=False)

    def is_served():
        status = array(server, "i")
        return status["state"] == "ONLINE" and status["log"]["state"] == "serving"

    until(is_served, limit)
    waits = [(time.monotonic() - begun) * 1000]
    if waits[0] <= limit * 1000:
        sock = connect(server.target, "i")
        for _ in range(100):
            read_one(sock, random.randrange(LOGGED // BLOCK) * BLOCK)
        sock.close()
    replays = [event for event in ask(server, request="history", array="i")["events"]
               if event["kind"] == "log_replayed"]
    if len(replays) <= server.replays:
        raise SystemExit("there was no log to replay")
    server.replays = len(replays)
    ask(server, request="export", array="i", force=True, dry_run=False)
    shutil.rmtree(folder)
    return waits


def leave_a_log(server):
    """Writes into an array of another daemon, and kills that: its log holds all that was written."""
    folder = f"{server.folder}/killed"
    os.mkdir(folder)
    other = type(server)(server.binary, folder, "i")
    ready(other)
    sock = connect(other.target, "i")
    places = list(range(0, LOGGED, BLOCK))
    random.shuffle(places)
    for at in range(0, len(places), 64):
        for offset in places[at : at + 64]:
            sock.sendall(request(WRITE, offset, BLOCK) + block(offset))
        for _ in places[at : at + 64]:
            succeed(sock)
    other.process.send_signal(signal.SIGKILL)
    other.process.wait()
    for name in os.listdir(folder):
        if not name.endswith(".img"):
            path = f"{folder}/{name}"
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


# name: what is measured. All but the first three need calpe.
VICTIMS = {
    "read": client(read_one),
    "write": client(write_one),
    "flush": client(flush_one),
    "status": status,
    "rebuild": rebuild,
    "import": import_,
}
QUICK = ["read", "write", "flush", "status"]
ANY_SERVER = ["read", "write", "flush"]


class Calpe:
    """A daemon with these arrays, in a folder of its own."""

    name = "calpe"

    def __init__(self, binary, folder, arrays, size=8 << 30):
        self.binary, self.folder = os.path.abspath(binary), folder
        config = f'[daemon]\nruntime_dir = "{folder}"\nreclaim_safe = false\n[listen]\nunix = "{folder}/nbd.sock"\nmax_connections = 110\n'
        for name in arrays:
            members = [f"{folder}/{name}{index}.img" for index in range(3)]
            subprocess.run([self.binary, "create", name, "--data", "2", "--parity", "1", "--size", str(size),
                            *members], check=True, stdout=subprocess.DEVNULL)
            config += f'[[array]]\nname = "{name}"\nsearch = ["{folder}"]\n'
        with open(f"{folder}/calpe.toml", "w") as file:
            file.write(config)
        self.exports, self.replays = arrays, 0
        self.log = open(f"{folder}/log", "w")
        self.process = subprocess.Popen([self.binary, "serve", "--config", f"{folder}/calpe.toml"],
                                        stdout=self.log, stderr=self.log)
        self.target, self.control = f"{folder}/nbd.sock", f"{folder}/control.sock"

    def revive(self):
        pass

    def memory(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("VmHWM")), 0) << 10

    def cpu(self):
        """Seconds of a core that it has had, and for each thread seconds for which it could run and had none.
        """
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        waited = {}
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            try:
                with open(f"/proc/{self.process.pid}/task/{task}/schedstat") as file:
                    waited[task] = int(file.read().split()[1]) / 1e9
            except OSError:
                pass
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), waited

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Nbdkit(Calpe):
    name = "nbdkit"

    def __init__(self, folder, arrays, size=8 << 30):
        os.mkdir(f"{folder}/files")
        for name in arrays:
            with open(f"{folder}/files/{name}", "wb") as file:
                file.truncate(size)
        self.exports = arrays
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
            for name in server.exports:
                connect(server.target, name).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{server.name} does not answer")
