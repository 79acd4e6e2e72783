"""What the benchmarks of the daemon share: servers, rounds in which every server has its turn, and tables of
the results.

Rounds are interleaved: in each of them every server runs each test once, and the server that goes first
changes from round to round. So a slow minute of the machine hits all of them, and two binaries are compared
within each round: a ratio in a table is the median of the ratios of the rounds, with the lowest and the
highest, and an interval that holds the true median with 95 % confidence.

Where a process lies in memory and on which cores its threads settle moves its figures by ten percent for as
long as it lives: to tell two binaries apart by less, start them several times (`--starts`), with many short
rounds.

It must not know what a test does: that is nbd_load's, and the script's that picks the tests.
"""

import argparse
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import nbd_load

HERE = os.path.dirname(os.path.abspath(__file__))
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
SCALES = {"iops": (1e3, "k IOPS"), "bw": (1e9, "GB/s"), "p50": (1, "us")}
# Figures of which less is better.
TIMES = ["p50", "cpu_us"]
# Of a log and the pages of one member, beside its data: enough for an array of some gigabytes.
MEMBER_EXTRA_BYTES = 64 << 20


def parse_size(text):
    for suffix, factor in UNITS.items():
        if text.endswith(suffix):
            return int(text[: -len(suffix)]) * factor
    return int(text)


def arguments(doc, seconds):
    """The options that every comparison has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=seconds, help="of each test, each server, each round")
    parser.add_argument("--rounds", type=int, default=5, help="of each start")
    parser.add_argument("--starts", type=int, default=1, help="new processes and arrays so many times")
    parser.add_argument("--size", default="1GiB", help="of the volume")
    parser.add_argument("--data", type=int, default=4)
    parser.add_argument("--parity", type=int, default=2)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--calpe", action="append", metavar="[NAME=]BINARY",
                        help="may be given again; others are compared with the first [default: target/release/calpe]")
    parser.add_argument("--tests", default="", metavar="REGEX", help="only the tests whose title matches")
    parser.add_argument("--json", action="store_true", help="every sample, and no tables")
    return parser


def binaries(given):
    """Names and paths of the binaries to compare; the names are distinct."""
    pairs = []
    for text in given or [os.path.join(HERE, "..", "target/release/calpe")]:
        name, separator, path = text.partition("=")
        pairs.append((name, path) if separator else (os.path.basename(text), text))
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        sys.exit(f"several binaries are called {', '.join(sorted(n for n in set(names) if names.count(n) > 1))}: give NAME=BINARY")
    for _, path in pairs:
        if not shutil.which(path):
            sys.exit(f"{path} is missing (cargo build --release)")
    return pairs


class Server:
    """One NBD server process on a unix socket; `cpu_seconds` is what it has used so far."""

    def __init__(self, name, command, socket, work):
        self.name, self.socket = name, socket
        self.log = os.path.join(work, name.replace(" ", "-").replace("/", "-") + ".log")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.time() + 60
        while time.time() < deadline and self.process.poll() is None:
            try:
                nbd_load.size_of(socket)
                return
            except OSError:
                time.sleep(0.1)
        self.stop()
        with open(self.log) as log:
            sys.exit(f"{name} did not start:\n{log.read()}")

    def cpu_seconds(self):
        """Of the process, and of those that it has started: a GPU has one of its own."""
        used, own = 0, str(self.process.pid)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as stat:
                    fields = stat.read().rsplit(")", 1)[1].split()
            except OSError:
                continue  # It has ended meanwhile.
            if pid == own:
                used += sum(map(int, fields[11:15]))
            elif fields[1] == own:
                used += sum(map(int, fields[11:13]))
        return used / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Calpe(Server):
    """A daemon of one binary that serves a new array; `binary` and `variant` say which it is."""

    def __init__(self, binary, variant, path, flags, options, work, gpu="off", page_cache=None):
        self.binary, self.variant = binary, variant
        data = os.path.join(work, f"{binary}-{variant}".replace("/", "-").replace(" ", "-"))
        shape = ["--data", str(options.data), "--parity", str(options.parity), "--size", str(parse_size(options.size)), *flags]
        command = [path, "up", "--dir", data, "--gpu", gpu, *shape]
        if page_cache:
            # Only a configuration says how large it is.
            command = _configured(path, data, shape, gpu, page_cache, options)
        super().__init__(f"{binary} {variant}", command, os.path.join(data, "nbd.sock"), work)


def _configured(path, data, shape, gpu, page_cache, options):
    """Creates an array, and returns the command that serves it with a page cache of this size."""
    os.mkdir(data)
    members = [os.path.join(data, f"member-{at}.img") for at in range(options.data + options.parity)]
    subprocess.run([path, "create", "bench", *shape, *members], check=True, stdout=subprocess.DEVNULL)
    config = os.path.join(data, "calpe.toml")
    with open(config, "w") as file:
        file.write(f'[daemon]\nruntime_dir = "{data}"\nstate_dir = "{data}/state"\n[gpu]\nmode = "{gpu}"\n'
                   f'[[array]]\nname = "bench"\nsearch = ["{data}"]\npage_cache = "{page_cache}"\n')
    return [path, "serve", "--config", config]


def need_space(options, arrays, files=0):
    """Ends the program when so many arrays, and files of the volume's size, do not fit: a full tmpfs fails
    members.
    """
    size, width = parse_size(options.size), options.data + options.parity
    need = arrays * (size * width // options.data * 11 // 10 + width * MEMBER_EXTRA_BYTES) + files * size
    free = shutil.disk_usage(options.dir).free
    if free < need:
        sys.exit(f"{options.dir} has {free >> 20} MiB free, this needs {need >> 20}: fewer --calpe, or a smaller --size")


def measure(start_servers, loads, options):
    """Starts the servers as often as asked, and measures them; `start_servers` appends them to the list that
    it is given, in a folder.

    Returns the servers of the last start, ended, and for each load and server's name the samples of all
    starts, one a round.
    """
    samples = {load.title: {} for load in loads}
    for number in range(options.starts):
        work, servers = tempfile.mkdtemp(prefix="calpe-bench-", dir=options.dir), []
        try:
            start_servers(servers, work)
            for title, of_servers in _measure_start(servers, loads, options).items():
                for name, rounds in of_servers.items():
                    samples[title].setdefault(name, []).extend(rounds)
        finally:
            for server in servers:
                server.stop()
            shutil.rmtree(work, ignore_errors=True)
        if options.starts > 1:
            print(f"start {number + 1} of {options.starts}", file=sys.stderr)
    return servers, samples


def _measure_start(servers, loads, options):
    """Fills every server, then runs the rounds; returns for each load and server's name the samples, one a
    round.
    """
    size = parse_size(options.size)
    for server in servers:
        nbd_load.fill(server.socket, size)
    samples = {load.title: {server.name: [] for server in servers} for load in loads}
    for number in range(options.rounds):
        turn = number % len(servers)
        for load in loads:
            for server in servers[turn:] + servers[:turn]:
                before = server.cpu_seconds()
                try:
                    sample = nbd_load.run(server.socket, load, options.seconds, size)
                except OSError as error:
                    with open(server.log) as log:
                        sys.exit(f"{server.name}: {error}\n{log.read()[-2000:]}")
                # At least one tick, so that a ratio exists.
                sample["cpu"] = max(server.cpu_seconds() - before, 1 / os.sysconf("SC_CLK_TCK"))
                sample["cpu_us"] = sample["cpu"] * 1e6 / max(sample["operations"], 1)
                samples[load.title][server.name].append(sample)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    return samples


def figure(samples, key):
    """Median, lowest and highest of a figure."""
    values = [sample[key] for sample in samples]
    return statistics.median(values), min(values), max(values)


def ratios(samples, base, key):
    """How much better than `base`, in ascending order, one a round. Above 1 is better, for times too."""
    return sorted(old[key] / new[key] if key in TIMES else new[key] / old[key] for new, old in zip(samples, base))


def median_interval(values):
    """Two of the ascending values that have the true median between them with at least 95 % confidence; None
    when there are too few.

    The count of values below the median is binomial (n, 1/2); this is the sign test's interval.
    """
    outside, below = 0.0, 0
    while (tail := outside + math.comb(len(values), below) / 2 ** len(values)) <= 0.025:
        outside, below = tail, below + 1
    return (values[below - 1], values[-below]) if below else None


def cpu_per_operation(samples):
    """Seconds of the server's CPU time an operation, over all rounds: one round has too few ticks of the
    kernel's clock.
    """
    return sum(sample["cpu"] for sample in samples) / max(sum(sample["operations"] for sample in samples), 1)


def cell(samples, key):
    scale, unit = SCALES[key]
    median, low, high = (value / scale for value in figure(samples, key))
    return f"{median:.1f} {unit} ({low:.1f}-{high:.1f})"


def ratio_cell(values):
    interval = median_interval(values)
    within = "; {:.3f}-{:.3f}".format(*interval) if interval else ""
    return f"{statistics.median(values):.3f} ({values[0]:.3f}-{values[-1]:.3f}{within})"


def print_binaries(servers, samples, loads):
    """The closing table: each binary beside the first, for each variant and test. Nothing when there is one
    binary.
    """
    arrays = [server for server in servers if isinstance(server, Calpe)]
    names = list(dict.fromkeys(server.binary for server in arrays))
    variants = list(dict.fromkeys(server.variant for server in arrays))
    if len(names) < 2:
        return
    print(f"\nRatio to {names[0]}, above 1 is faster or less CPU time of the server a request: median of the rounds (lowest-highest; 95 % "
          "interval of the median)\n")
    print("| test | checksum | " + " | ".join(names[1:]) + " |")
    print("|---|---|" + "---|" * len(names[1:]))
    least = {}
    for load in loads:
        for variant in variants:
            of = {server.binary: samples[load.title][server.name] for server in arrays if server.variant == variant}
            row = [ratios(of[name], of[names[0]], load.key) for name in names[1:]]
            for name, values in zip(names[1:], row):
                least[name] = min(least.get(name, (9e9,)), (statistics.median(values), load.title, variant))
            cpu = [cpu_per_operation(of[names[0]]) / cpu_per_operation(of[name]) for name in names[1:]]
            cells = [f"{ratio_cell(values)}, CPU {less:.2f}" for values, less in zip(row, cpu)]
            print(f"| {load.title} | {variant} | " + " | ".join(cells) + " |")
    for name, (ratio, title, variant) in least.items():
        print(f"\n{name}: the lowest median is {ratio:.3f} ({title}, {variant})")
