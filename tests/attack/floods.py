#!/usr/bin/env python3
"""What one client can do to another: floods of cheap or awkward requests against one array, while a
victim uses another array of the same daemon. nbdkit's file plugin stands beside it in the same run.

    floods.py --calpe BINARY [--nbdkit] [--victims read,write,...] [--connections 20,100]
              [--seconds 3] [--rounds 1] [--only NAME;...] [--json] [--bound MS] [--limit SECONDS]

Victims, each of which every flood is measured against:
    read     4 KiB of what was written, at a random place
    write    4 KiB at a random place
    flush    the same, and a FLUSH after it: the time of both
    status   `calpe status`, by a request on the control socket
    rebuild  a member is replaced: the time until 256 MiB are rebuilt onto the new one
    import   an array whose daemon was killed: the time until its log is replayed and it serves
The default is the first four, which are quick; "all" is all of them. nbdkit has the first three.

For each flood and victim: connections, bytes sent to the server, the victim's median, 99th
percentile and longest wait in ms (of a rebuild or import there is one), the cores that the server
and the flood had, and of how many more the server was kept by other processes. After several rounds
a table follows, as in BENCHMARKS.md: medians of the 99th percentiles (lowest-highest).

With --bound, exit status 1 when a 99th percentile of calpe's is above it. Exit status 1, too, when
a rebuild or import has not ended after --limit seconds. Loopback and unix sockets only; ends by
itself.
"""
import argparse, json, os, random, selectors, shutil, signal, statistics, struct, subprocess, sys, tempfile, time

# Nothing is left in the source folder.
sys.dont_write_bytecode = True

from victims import (ANY_SERVER, CACHE, FLUSH, FUA, OPT_LIST, QUICK, READ, REBUILT, STATUS, TRIM, VICTIMS, WRITE,
                     WRITTEN, ZEROES, Calpe, Nbdkit, connect, dial, fill,
                     leave_a_log, option, ready, recv_all, request)

GIB = 1 << 30
VOLUME = 8 * GIB
# Floods write no farther, so that memory is enough for the members.
WRITES_WITHIN = 2 * GIB
# Of these a flood sends as many as are in 4 MiB, over and over; of shorter ones 1000.
BATCH_BYTES = 4 << 20


def batch(make):
    """Requests that are sent at one go."""
    requests, size = [make()], 0
    while len(requests) < 1000 and size < BATCH_BYTES:
        requests.append(make())
        size += len(requests[-1])
    return b"".join(requests)


def anywhere(length, within=VOLUME):
    return random.randrange(0, (within - length) // 4096 + 1) * 4096


def write(length, flags=0):
    return request(WRITE, anywhere(length, WRITES_WITHIN), length, flags) + b"w" * length


def of_data(length):
    """A read of what holds data."""
    return request(READ, anywhere(length, WRITTEN), length)


def small_or_wide():
    """Writes that wait for each other one by one, and now and then what overlaps many of them."""
    if random.random() < 0.02:
        return request(TRIM, anywhere(256 << 20), 256 << 20)
    return request(WRITE, random.randrange(WRITES_WITHIN), 1) + b"w"


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
    "data, 4 KiB": (None, True, lambda: of_data(4096)),
    "data, 1 MiB": (None, True, lambda: of_data(1 << 20)),
    "writes, 4 KiB": (None, True, lambda: write(4096)),
    "writes with FUA, 4 KiB": (None, True, lambda: write(4096, FUA)),
    "writes, 1 MiB": (None, True, lambda: write(1 << 20)),
    "one byte, wide trims": (None, True, lambda: small_or_wide()),
    "replies never read": (None, False, lambda: request(READ, anywhere(1 << 20), 1 << 20)),
    "status never read": ("base:allocation", False, lambda: request(STATUS, 0, LONG)),
    "payloads never sent": (None, False, "announce"),
    "connects": (None, False, "connects"),
    "silent handshakes": (None, False, "silent"),
    "options": (None, True, "options"),
}


class Sent:
    bytes = 0


def attack(target, name, connections, seconds):
    """Child process: floods until the time is over, or SIGTERM. It prints a line when it is
    connected, and at the end how many bytes it sent."""
    sent = Sent()

    def end(*_):
        print(sent.bytes, flush=True)
        # An exception could be lost in a destructor.
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    flood(target, name, connections, time.monotonic() + seconds, sent)
    end()


def flood(target, name, connections, deadline, sent):
    context, reads, make = FLOODS[name]
    if make == "connects":
        print("begun", flush=True)
        while time.monotonic() < deadline:
            try:
                dial(target).close()
                sent.bytes += 1
            except OSError:
                pass
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
                    sent.bytes += 4096
            socks.append(sock)
        except OSError:
            pass
    if socks:
        print("begun", flush=True)
    if make in ("silent", "announce"):
        time.sleep(max(0, deadline - time.monotonic()))
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
                    sent.bytes += count
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


def measure(server, name, connections, victim, args):
    """One flood against one victim."""
    if name.startswith("data"):
        fill(server.target, "a", WRITTEN)
    child = None
    if FLOODS[name]:
        child = subprocess.Popen(
            [sys.executable, __file__, "--attack", name, "--target", json.dumps(server.target), "--connections",
             str(connections), "--seconds", str(args.seconds + args.limit + 60)], stdout=subprocess.PIPE, text=True)
        if child.stdout.readline() != "begun\n":
            raise SystemExit(f"the flood '{name}' did not begin")
        time.sleep(args.settle)
    begun, (ran, waited), flooding = time.monotonic(), server.cpu(), cpu_of(child)
    waits = sorted(VICTIMS[victim](server, args.seconds, args.limit))
    seconds = time.monotonic() - begun
    ran, flooding = server.cpu()[0] - ran, cpu_of(child) - flooding
    waited = sum(after - waited[task] for task, after in server.cpu()[1].items() if task in waited)
    sent = 0
    if child:
        child.terminate()
        try:
            sent = int(child.communicate(timeout=60)[0])
        except (subprocess.TimeoutExpired, ValueError):
            child.kill()
            raise SystemExit(f"the flood '{name}' failed")
        if not sent and name != "silent handshakes":
            raise SystemExit(f"the flood '{name}' has sent nothing")
    rss = server.memory()
    if "write" in name or name.startswith("one byte"):
        clear(server)
    at = lambda share: waits[min(len(waits) - 1, int(len(waits) * share))]
    return {"flood": name, "connections": connections if child else 0, "victim": victim, "bytes": sent,
            "requests": len(waits), "p50": at(0.5), "p99": at(0.99), "longest": waits[-1], "server": server.name,
            "cores": ran / seconds, "kept": waited / seconds, "flood_cores": flooding / seconds,
            "rss": rss}


def cpu_of(child):
    """Seconds of a core that a child has had."""
    if child is None or child.poll() is not None:
        return 0
    with open(f"/proc/{child.pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def clear(server):
    """Takes away what a flood has written."""
    for _ in range(100):
        try:
            server.revive()
            sock = connect(server.target, "a")
            for offset in range(0, WRITES_WITHIN, GIB):
                sock.sendall(request(TRIM, offset, GIB))
                recv_all(sock, 16)
            sock.close()
            return
        except OSError:
            # nbdkit may still be about to end after a flood.
            time.sleep(0.1)
    raise SystemExit(f"{server.name} does not take trims")


def is_ended(row, limit):
    return row["victim"] not in ("rebuild", "import") or row["longest"] <= limit * 1000


def print_row(row):
    print(f"{row['server']:7} {row['flood']:22} {row['connections']:4} {row['bytes']:11} {row['victim']:8}"
          f" {row['requests']:6} {row['p50']:8.2f} {row['p99']:8.2f} {row['longest']:9.1f} {row['cores']:6.2f}"
          f" {row['kept']:5.2f} {row['flood_cores']:6.2f}  {row['rss'] >> 20} MiB", flush=True)


def print_table(rows, limit):
    """Medians of all rounds (lowest-highest): of the 99th percentiles in ms, of rebuilds and imports in
    seconds.
    """
    columns = [(victim, server) for victim in VICTIMS for server in ("calpe", "nbdkit")
               if any((row["victim"], row["server"]) == (victim, server) for row in rows)]

    def cell(flood, victim, server):
        these = [row for row in rows if (row["flood"], row["connections"], row["victim"], row["server"])
                 == (*flood, victim, server)]
        if not these:
            return "-"
        scale = 1000 if victim in ("rebuild", "import") else 1
        values = sorted(row["p99"] / scale for row in these)
        form = lambda value: f"{value:.1f}" if value < 100 else f"{value:.0f}"
        ended = "" if all(is_ended(row, limit) for row in these) else " not ended"
        return f"{form(statistics.median(values))} ({form(values[0])}-{form(values[-1])}){ended}"

    print("\n| flood | connections | " + " | ".join(
        f"{victim} {server}, {'s' if victim in ('rebuild', 'import') else 'ms'}" for victim, server in columns) + " |")
    print("|---|---:|" + "---:|" * len(columns))
    for flood in dict.fromkeys((row["flood"], row["connections"]) for row in rows):
        print(f"| {flood[0]} | {flood[1]} | " + " | ".join(cell(flood, *column) for column in columns) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calpe")
    parser.add_argument("--nbdkit", action="store_true")
    parser.add_argument("--victims", default=",".join(QUICK))
    parser.add_argument("--connections", default="20,100")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--settle", type=float, default=0.7, help="how long a flood runs before its victim begins")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", help="floods whose names contain one of these, with ; between them")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bound", type=float)
    parser.add_argument("--limit", type=float, default=60, help="how long a rebuild or import may take, in seconds")
    parser.add_argument("--attack")
    parser.add_argument("--target")
    args = parser.parse_args()
    if args.attack:
        target = json.loads(args.target)
        return attack(target if isinstance(target, str) else tuple(target), args.attack, int(args.connections),
                      args.seconds)
    victims = list(VICTIMS) if args.victims == "all" else args.victims.split(",")
    if unknown := [victim for victim in victims if victim not in VICTIMS]:
        parser.error(f"no such victim: {', '.join(unknown)}; there are {', '.join(VICTIMS)}, and all")
    wanted = args.only.split(";") if args.only else list(FLOODS)
    wanted = [name for name in FLOODS if any(part in name for part in wanted)]
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    servers, rows = [], []
    try:
        servers = [Calpe(args.calpe, folder, "abr")] if args.calpe else []
        servers += [Nbdkit(folder, "ab")] if args.nbdkit else []
        for server in servers:
            ready(server)
            fill(server.target, "b", WRITTEN)
            if "rebuild" in victims and server.name == "calpe":
                fill(server.target, "r", REBUILT)
            if "import" in victims and server.name == "calpe":
                leave_a_log(server)
        if not args.json:
            print(f"{'server':7} {'flood':22} {'conn':>4} {'sent':>11} {'victim':8} {'waits':>6} {'p50 ms':>8} {'p99 ms':>8}"
                  f" {'longest':>9} {'cores':>6} {'kept':>5} {'flood':>6}")
        for _ in range(args.rounds):
            for name in wanted:
                once = name in ("none", "connects")
                for connections in [int(text) for text in args.connections.split(",")][: 1 if once else None]:
                    for victim in victims:
                        for server in servers:
                            if server.name == "nbdkit" and ("health" in name or victim not in ANY_SERVER):
                                continue
                            server.revive()
                            rows.append(measure(server, name, connections, victim, args))
                            print(json.dumps(rows[-1]), flush=True) if args.json else print_row(rows[-1])
        if args.rounds > 1 and not args.json:
            print_table(rows, args.limit)
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    ours = [row for row in rows if row["server"] == "calpe"]
    slow = args.bound and any(row["p99"] > args.bound for row in ours if row["victim"] not in ("rebuild", "import"))
    return int(bool(slow) or not all(is_ended(row, args.limit) for row in ours))


if __name__ == "__main__":
    sys.exit(main())
