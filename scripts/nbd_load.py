"""Load for an NBD server, with the standard library only: scripts/bench-nbd and scripts/bench-log measure
with it.

Every connection is a process of its own that keeps a number of requests of one size in flight. Requests are
packed before the clock starts, and replies are counted by their bytes: simple replies have one length when
nothing fails. So a turn of the loop takes in every reply that has arrived and sends as many requests, and
Python is not what limits 4 KiB requests.

It must not know which servers are compared, nor what is done with the figures.
"""

import dataclasses
import multiprocessing
import random
import socket
import statistics
import struct
import time

MAGIC_REQUEST, MAGIC_REPLY = 0x25609513, 0x67446698
READ, WRITE, DISCONNECT, FLUSH = 0, 1, 2, 3
REQUEST_BYTES, REPLY_BYTES = 28, 16
# Most headers of a connection; then they come round again. A gigabyte in blocks of 4 KiB, which take a third
# of a second to pack.
PACKED_MAX = 1 << 18
# Linux takes no more parts in one call.
IOV_MAX = 1024


@dataclasses.dataclass(frozen=True)
class Load:
    """What one test does: `key` is the figure that counts, "iops", "bw" (bytes a second) or "p50"
    (microseconds).
    """

    title: str
    key: str
    write: bool
    block: int
    depth: int
    connections: int = 1
    sequential: bool = False
    # Each request is followed by a flush, and both are one operation; at a depth of 1 alone.
    flush: bool = False


class Connection:
    """One connection to a unix socket, past the handshake; `size` is that of the export. `path` may end with
    `#` and the name of an export; without, it is the default one.
    """

    def __init__(self, path, timeout=60):
        path, _, name = path.partition("#")
        self.socket = socket.socket(socket.AF_UNIX)
        # The kernel's time limit: Python's own would cost a poll for each call.
        limit = struct.pack("@ll", timeout, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.socket.connect(path)
        magic, option_magic, _ = struct.unpack(">8s8sH", self.receive(18))
        if magic != b"NBDMAGIC" or option_magic != b"IHAVEOPT":
            raise OSError(f"{path}: not a newstyle NBD server")
        # Fixed newstyle, no zeroes; then NBD_OPT_GO, with no information asked for.
        go = struct.pack(">I", len(name.encode())) + name.encode() + struct.pack(">H", 0)
        self.socket.sendall(struct.pack(">I8sII", 3, b"IHAVEOPT", 7, len(go)) + go)
        self.size = None
        while True:
            _, _, kind, length = struct.unpack(">QIII", self.receive(20))
            data = self.receive(length)
            if kind == 1:
                return
            if kind & 1 << 31:
                raise OSError(f"{path}: the server refuses the export '{name}' ({kind:#x})")
            if kind == 3 and data[:2] == b"\0\0":
                self.size = struct.unpack(">Q", data[2:10])[0]

    def receive(self, length):
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view):
        while view:
            got = self.socket.recv_into(view)
            if got == 0:
                raise OSError("the server hung up")
            view = view[got:]

    def close(self):
        self.socket.sendall(request(DISCONNECT, 0, 0))
        self.socket.close()


def request(command, offset, length):
    return struct.pack(">IHHQQI", MAGIC_REQUEST, 0, command, 0, offset, length)


def size_of(path):
    """Size of the default export, once the server answers; raises OSError when it does not."""
    connection = Connection(path, timeout=5)
    connection.close()
    return connection.size


def fill(path, size):
    """Writes the whole volume once, so that reads find data and writes overwrite."""
    run(path, Load("fill", "bw", write=True, block=1 << 20, depth=8, sequential=True), None, size)


def run(path, load, seconds, size):
    """Runs a load for so many seconds (None: once over `size` bytes); returns its figures as a dict."""
    # Fork: a spawned process would load this module by its path, which scripts without an extension do not
    # have.
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(load.connections), context.Queue()
    processes = [context.Process(target=_work, args=(path, load, seconds, size, number, barrier, results))
                 for number in range(load.connections)]
    for process in processes:
        process.start()
    answers = [results.get() for _ in processes]
    for process in processes:
        process.join()
    for answer in answers:
        if isinstance(answer, str):
            raise OSError(f"{load.title}: {answer}")
    operations = sum(answer["operations"] for answer in answers)
    elapsed = max(answer["elapsed"] for answer in answers)
    latencies = [latency for answer in answers for latency in answer["latencies"]]
    return {
        "operations": operations,
        "iops": operations / elapsed,
        "bw": operations * load.block / elapsed,
        "p50": statistics.median(latencies) if latencies else 0.0,
        "p99": sorted(latencies)[len(latencies) * 99 // 100] if latencies else 0.0,
    }


def _work(path, load, seconds, size, number, barrier, results):
    try:
        connection = Connection(path)
        headers = _headers(load, size, number)
        payload = memoryview(random.Random(number).randbytes(load.block)) if load.write else None
        barrier.wait(60)
        loop = _one_by_one if load.depth == 1 else _pipelined
        results.put(loop(connection, load, headers, payload, seconds))
        connection.close()
    except Exception as error:  # Whatever it is, the parent has to hear of it.
        barrier.abort()
        results.put(f"{type(error).__name__}: {error}")


def _headers(load, size, number):
    """Request headers back to back: every block of the volume once in order, or as many at random."""
    blocks = size // load.block
    first = blocks * number // load.connections
    noise = random.Random(number)
    command = WRITE if load.write else READ
    out = bytearray()
    for index in range(min(blocks, PACKED_MAX)):
        block = (first + index) % blocks if load.sequential else noise.randrange(blocks)
        out += request(command, block * load.block, load.block)
    return memoryview(out)


def _pipelined(connection, load, headers, payload, seconds):
    sock, reply = connection.socket, REPLY_BYTES + (0 if load.write else load.block)
    count = len(headers) // REQUEST_BYTES
    buffer = bytearray(reply * max(load.depth, (4 << 20) // reply))
    view = memoryview(buffer)
    sent = answered = have = 0
    begun = time.perf_counter()
    deadline = begun + seconds if seconds else None

    def send(number):
        nonlocal sent
        while number:
            first = sent % count
            now = min(number, count - first)
            packed = headers[first * REQUEST_BYTES : (first + now) * REQUEST_BYTES]
            if payload is None:
                sock.sendall(packed)
            else:
                parts = []
                for at in range(0, len(packed), REQUEST_BYTES):
                    parts += packed[at : at + REQUEST_BYTES], payload
                _send_all(sock, parts)
            sent += now
            number -= now

    send(min(load.depth, count) if seconds is None else load.depth)
    while answered < sent:
        before = have // reply
        got = sock.recv_into(view[have:])
        if got == 0:
            raise OSError("the server hung up")
        have += got
        after = have // reply
        if after == before:
            continue
        _check(buffer, before * reply, after * reply, reply)
        answered += after - before
        if have == len(buffer):
            have = 0
        if deadline is None:
            send(min(after - before, count - sent))
        elif time.perf_counter() < deadline:
            send(after - before)
    return {"operations": answered, "elapsed": time.perf_counter() - begun, "latencies": []}


def _one_by_one(connection, load, headers, payload, seconds):
    sock, reply = connection.socket, REPLY_BYTES + (0 if load.write else load.block)
    count = len(headers) // REQUEST_BYTES
    buffer = bytearray(max(reply, REPLY_BYTES))
    view = memoryview(buffer)
    flush = request(FLUSH, 0, 0)
    latencies = []
    begun = now = time.perf_counter_ns()
    end = begun + int(seconds * 1e9)
    while now < end:
        at = len(latencies) % count * REQUEST_BYTES
        header = headers[at : at + REQUEST_BYTES]
        _send_all(sock, [header] if payload is None else [header, payload])
        connection.receive_into(view[:reply])
        _check(buffer, 0, reply, reply)
        if load.flush:
            sock.sendall(flush)
            connection.receive_into(view[:REPLY_BYTES])
            _check(buffer, 0, REPLY_BYTES, REPLY_BYTES)
        before, now = now, time.perf_counter_ns()
        latencies.append((now - before) / 1e3)
    return {"operations": len(latencies), "elapsed": (now - begun) / 1e9, "latencies": latencies}


def _send_all(sock, parts):
    left = sum(map(len, parts))
    while left:
        sent = sock.sendmsg(parts[:IOV_MAX])
        left -= sent
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = parts[0][sent:]


def _check(buffer, start, end, reply):
    """Raises unless every reply in this range begins as a simple reply without an error."""
    if any(buffer[start + 7 : end : reply]):
        raise OSError(f"the server answered with errno {max(buffer[start + 7 : end : reply])}")
    if buffer[start:end:reply].strip(b"\x67"):
        raise OSError("an answer that is no simple reply")
