"""Malformed and unusual requests against a real daemon, each case named after the obligation that it checks.

Driven by tests/daemon/malformed.rs:  python3 malformed.py SOCKET READ_ONLY_SOCKET The first export is 64 MiB,
2+1, with a redo log and checksums, writable, new; the second is the same, read-only. libnbd sends what it can
be made to send (strict mode off); a plain socket sends the rest. Every case ends in "ok", or the whole run
fails.
"""

import errno
import os
import socket
import struct
import sys
import time

import nbd

SOCKET, READ_ONLY = sys.argv[1:3]
MIB = 1 << 20
SIZE = 64 * MIB

READ, WRITE, DISC, FLUSH, TRIM, CACHE, ZEROES, STATUS = range(8)
FUA, NO_HOLE, DF, REQ_ONE, FAST_ZERO, PAYLOAD_LEN = (1 << bit for bit in range(6))
EXPORT_NAME, ABORT, LIST, STARTTLS, INFO, GO, STRUCTURED, LIST_META, SET_META, EXTENDED = 1, 2, 3, 5, 6, 7, 8, 9, 10, 11
ACK, SERVER, REP_INFO, META = 1, 2, 3, 4
UNSUP, POLICY, INVALID, TLS_REQD, UNKNOWN, SHUTDOWN, BLOCK_SIZE_REQD, TOO_BIG, EXT_REQD = (
    1 << 31 | code for code in (1, 2, 3, 5, 6, 7, 8, 9, 10)
)
NONE, DATA, HOLE, BLOCK_STATUS, BLOCK_STATUS_EXT, ERROR = 0, 1, 2, 5, 6, 1 << 15 | 1
EPERM, EIO, EINVAL, ENOSPC, EOVERFLOW, ENOTSUP = 1, 5, 22, 28, 75, 95
CLOSED = "closed"
CASES = []


def case(obligation):
    def keep(function):
        CASES.append((obligation, function))
        return function

    return keep


def same(got, want, what=""):
    if got != want:
        raise AssertionError(f"{what}: got {got!r}, want {want!r}")


class Closed(Exception):
    pass


class Raw:
    """A client that says exactly what it is told to say."""

    def __init__(self, path=SOCKET, flags=3):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(path)
        self.greeting = self.take(18)
        self.mode = "simple"
        if flags is not None:
            self.say(struct.pack(">I", flags))

    def say(self, data):
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed() from error

    def take(self, count):
        data = bytearray()
        while len(data) < count:
            try:
                piece = self.socket.recv(count - len(data))
            except ConnectionResetError as error:
                raise Closed() from error
            if not piece:
                raise Closed()
            data += piece
        return bytes(data)

    def option(self, code, data=b"", length=None):
        self.say(b"IHAVEOPT" + struct.pack(">II", code, len(data) if length is None else length) + data)

    def reply(self):
        magic, option, kind, length = struct.unpack(">QIII", self.take(20))
        same(magic, 0x3E889045565A9, "magic of an option reply")
        return option, kind, self.take(length)

    def ask(self, code, data=b""):
        """The kinds of all replies to an option."""
        self.option(code, data)
        kinds = []
        while True:
            option, kind, _ = self.reply()
            same(option, code, "the option answered")
            kinds.append(kind)
            if kind == ACK or kind >> 31:
                return kinds

    def agree(self, mode="structured", contexts=(), export=b""):
        if mode != "simple":
            self.agree_headers(STRUCTURED if mode == "structured" else EXTENDED)
        if contexts:
            same(self.ask(SET_META, meta(export, contexts))[-1], ACK, "contexts")
        return self.go(mode, export)

    def agree_headers(self, option):
        same(self.ask(option), [ACK], "headers")
        return self

    def go(self, mode, export=b""):
        same(self.ask(GO, go(export, [3]))[-1], ACK, "GO")
        self.mode = mode
        return self

    def request(self, command, offset=0, length=0, flags=0, cookie=7, payload=b"", magic=None):
        if self.mode == "extended":
            head = struct.pack(">IHHQQQ", magic or 0x21E41C71, flags, command, cookie, offset, length)
        else:
            head = struct.pack(">IHHQQI", magic or 0x25609513, flags, command, cookie, offset, length)
        self.say(head + payload)

    def chunk(self):
        """(done, type, cookie, payload) of the next chunk; a simple reply is (True, None, cookie, error)."""
        magic = struct.unpack(">I", self.take(4))[0]
        if magic == 0x67446698:
            same(self.mode != "extended", True, "simple replies are forbidden with extended headers")
            error, cookie = struct.unpack(">IQ", self.take(12))
            return True, None, cookie, error
        if magic == 0x6E8A278C:
            same(self.mode, "extended", "extended reply")
            flags, kind, cookie, self.offset, length = struct.unpack(">HHQQQ", self.take(28))
        else:
            same((magic, self.mode), (0x668E33EF, "structured"), "magic of a reply")
            flags, kind, cookie, length = struct.unpack(">HHQI", self.take(16))
        return bool(flags & 1), kind, cookie, self.take(length)

    def error(self, *arguments, **named):
        """Sends a request and returns its errno, 0 for success."""
        self.request(*arguments, **named)
        return self.outcome(arguments[0], arguments[2] if len(arguments) > 2 else named.get("length", 0))

    def outcome(self, command, length):
        while True:
            done, kind, cookie, payload = self.chunk()
            same(cookie, 7, "cookie")
            if kind is None:
                if command == READ and payload == 0:
                    same(self.mode, "simple", "a structured READ never gets a simple reply")
                    self.take(length)
                return payload
            if kind & 1 << 15:
                number, count = struct.unpack(">IH", payload[:6])
                payload[6 : 6 + count].decode()
                return number
            if done:
                return 0

    def alive(self):
        same(self.error(READ, 0, 512, cookie=7), 0, "the connection is in step afterwards")

    def closed(self):
        """The server closes, whatever it said before."""
        try:
            while True:
                self.take(1)
        except Closed:
            return


def counted(text):
    return struct.pack(">I", len(text)) + text


def go(name=b"", infos=()):
    return counted(name) + struct.pack(">H", len(infos)) + b"".join(struct.pack(">H", info) for info in infos)


def meta(name=b"", queries=()):
    return counted(name) + struct.pack(">I", len(queries)) + b"".join(counted(query) for query in queries)


def library(contexts=(), path=SOCKET):
    handle = nbd.NBD()
    handle.set_strict_mode(0)
    for context in contexts:
        handle.add_meta_context(context)
    handle.connect_unix(path)
    return handle


def refused(wanted, call):
    try:
        call()
        got = 0
    except nbd.Error as error:
        got = error.errnum
    same(errno.errorcode.get(got, got), errno.errorcode.get(wanted, wanted))


# Greeting and client flags


@case("the greeting offers fixed newstyle and no zeroes, nothing else")
def _():
    same(Raw(flags=None).greeting, b"NBDMAGICIHAVEOPT\0\3")


@case("unknown client flags: close")
def _():
    for flags in (4, 0x80000000, 0xFFFFFFFF):
        Raw(flags=flags).closed()


@case("without fixed newstyle nothing but EXPORT_NAME: close")
def _():
    raw = Raw(flags=0)
    raw.option(LIST)
    raw.closed()


@case("without NO_ZEROES an EXPORT_NAME reply ends in 124 zeroes")
def _():
    raw = Raw(flags=1)
    raw.option(EXPORT_NAME)
    reply = raw.take(134)
    same((reply[:8], reply[10:]), (struct.pack(">Q", SIZE), bytes(124)))
    raw.alive()


@case("with NO_ZEROES it ends after the flags")
def _():
    raw = Raw()
    raw.option(EXPORT_NAME)
    raw.take(10)
    raw.alive()


@case("something else than an option: close")
def _():
    raw = Raw()
    raw.say(b"GET / HTTP/1.1\r\n\r\n")
    raw.closed()


# Options


@case("unknown option: drain its data, ERR_UNSUP")
def _():
    raw = Raw()
    for code in (0, 4, 12, 4711, 0xFFFFFFFF):
        for length in (0, 1, 4096, 60000):
            same(raw.ask(code, b"\xee" * length), [UNSUP])
    raw.agree().alive()


@case("an option with more data than is drained: close")
def _():
    raw = Raw()
    raw.option(77, length=0xFFFFFFFF)
    raw.closed()


@case("more options than any client needs: close")
def _():
    raw = Raw()
    try:
        for _ in range(2000):
            raw.option(77)
    except Closed:
        pass
    raw.closed()


@case("options without data refuse data")
def _():
    raw = Raw()
    for code in (LIST, STRUCTURED, EXTENDED):
        same(raw.ask(code, b"x"), [INVALID], code)
    raw.agree("simple").alive()


@case("names of 4096 bytes are looked up")
def _():
    same(Raw().ask(GO, go(b"x" * 4096)), [UNKNOWN])


@case("names longer than 4096 bytes are refused before they are looked at")
def _():
    raw = Raw()
    same(raw.ask(GO, go(b"x" * 4097)), [TOO_BIG])
    same(raw.ask(INFO, go(b"x" * 9000)), [TOO_BIG])
    raw.agree().alive()


@case("names hold no NUL")
def _():
    same(Raw().ask(GO, go(b"vo\0l")), [INVALID])


@case("names are UTF-8")
def _():
    same(Raw().ask(GO, go(b"\xff\xfe")), [INVALID])


@case("a length inside an option that exceeds it is refused")
def _():
    raw = Raw()
    for data in (b"", b"\0\0\0", struct.pack(">I", 4000) + b"x\0\0", struct.pack(">I", 0xFFFFFFFF) + b"vol\0\0"):
        same(raw.ask(GO, data), [INVALID], data)
    same(raw.ask(GO, go() + b"\0"), [INVALID], "one byte too many")
    same(raw.ask(GO, counted(b"") + b"\xff\xff"), [INVALID], "65535 informations, none there")
    raw.agree().alive()


@case("EXPORT_NAME of an unknown export: close without a byte")
def _():
    raw = Raw()
    raw.option(EXPORT_NAME, b"nobody")
    raw.closed()


@case("EXPORT_NAME with a name of 4 GiB: close before its first byte")
def _():
    raw = Raw()
    raw.option(EXPORT_NAME, length=0xFFFFFFFF)
    raw.closed()


@case("unknown kinds of information are ignored")
def _():
    same(Raw().ask(INFO, go(b"", [0, 77, 65535])), [REP_INFO, ACK])


@case("INFO_BLOCK_SIZE: min = member sector, preferred = chunk, max 32 MiB")
def _():
    raw = Raw()
    raw.option(GO, go(b"", [3]))
    sizes = None
    while True:
        _, kind, data = raw.reply()
        if kind == ACK:
            break
        if data[:2] == b"\0\3":
            sizes = struct.unpack(">III", data[2:])
    same(sizes, (512, 65536, 32 * MIB))


@case("an INFO leaves the handshake where it is")
def _():
    raw = Raw()
    for _ in range(3):
        same(raw.ask(INFO, go()), [REP_INFO, ACK])
    raw.agree().alive()


@case("ABORT is acknowledged, then the connection ends")
def _():
    raw = Raw()
    same(raw.ask(ABORT), [ACK])
    raw.closed()


@case("LIST names every export")
def _():
    raw = Raw()
    same(raw.ask(LIST), [SERVER, ACK])


@case("STARTTLS is answered, and changes nothing where it is not served")
def _():
    raw = Raw()
    same(raw.ask(STRUCTURED), [ACK])
    same(raw.ask(STARTTLS)[0] in (UNSUP, POLICY), True)
    same(raw.ask(SET_META, meta(b"", [b"base:allocation"])), [META, ACK], "still structured")


# Metadata contexts and header forms


@case("metadata contexts need structured replies")
def _():
    raw = Raw()
    same(raw.ask(SET_META, meta(b"", [b"base:allocation"])), [INVALID])
    same(raw.ask(LIST_META, meta()), [INVALID])


@case("contexts are listed by namespace and selected by name")
def _():
    raw = Raw()
    same(raw.ask(STRUCTURED), [ACK])
    for queries, listed in (((), 2), ((b"base:",), 1), ((b"calpe:",), 1), ((b"calpe:", b"base:"), 2), ((b"x:",), 0)):
        same(raw.ask(LIST_META, meta(b"", queries)), [META] * listed + [ACK], queries)
    same(raw.ask(SET_META, meta(b"", [b"base:", b"calpe:"])), [ACK], "a namespace selects nothing")
    same(raw.ask(SET_META, meta(b"", [b"calpe:health", b"base:allocation"])), [META, META, ACK])
    same(raw.ask(SET_META, meta(b"", [b"calpe:health"] * 3)), [META, ACK], "each once")


@case("a query that is half said, too long or no string is refused")
def _():
    raw = Raw()
    same(raw.ask(STRUCTURED), [ACK])
    half = counted(b"") + struct.pack(">I", 2) + counted(b"base:allocation")
    same(raw.ask(SET_META, half), [INVALID])
    same(raw.ask(SET_META, meta(b"", [b"q" * 4097])), [TOO_BIG])
    same(raw.ask(SET_META, meta(b"", [b"base:\0"])), [INVALID])
    same(raw.ask(SET_META, counted(b"") + b"\xff\xff\xff\xff"), [INVALID], "4 Gi queries")
    same(raw.ask(SET_META, meta(b"nobody", [b"base:allocation"])), [UNKNOWN])


@case("contexts of a failed or replaced SET are forgotten: BLOCK_STATUS is EINVAL")
def _():
    for then in (meta(), b"bad", meta(b"nobody", [b"base:allocation"])):
        raw = Raw()
        same(raw.ask(STRUCTURED), [ACK])
        same(raw.ask(SET_META, meta(b"", [b"base:allocation"]))[-1], ACK)
        raw.ask(SET_META, then)
        raw.ask(GO, go(b"", [3]))
        raw.mode = "structured"
        same(raw.error(STATUS, 0, 4096), EINVAL)
        raw.alive()


@case("extended headers imply structured replies and may follow them")
def _():
    raw = Raw()
    same(raw.ask(STRUCTURED), [ACK])
    raw.agree("extended", [b"base:allocation"])
    raw.alive()


@case("STRUCTURED_REPLY after extended headers: ERR_EXT_HEADER_REQD")
def _():
    raw = Raw().agree_headers(EXTENDED)
    same(raw.ask(STRUCTURED), [EXT_REQD])
    raw.go("extended").alive()


@case("structured replies agreed twice are agreed; extended headers a second time: ERR_INVALID, and they stay")
def _():
    raw = Raw()
    same(raw.ask(STRUCTURED) + raw.ask(STRUCTURED) + raw.ask(EXTENDED), [ACK] * 3)
    same(raw.ask(EXTENDED), [INVALID])
    raw.go("extended").alive()


@case("EXPORT_NAME after extended headers: close")
def _():
    raw = Raw()
    same(raw.ask(EXTENDED), [ACK])
    raw.option(EXPORT_NAME)
    raw.closed()


@case("a compact request after extended headers: close")
def _():
    raw = Raw().agree("extended")
    raw.request(READ, 0, 512, magic=0x25609513)
    raw.closed()


@case("an extended request without having agreed: close")
def _():
    raw = Raw().agree("structured")
    raw.request(READ, 0, 512, magic=0x21E41C71)
    raw.closed()


@case("a request without its magic: close")
def _():
    raw = Raw().agree("simple")
    raw.say(bytes(28))
    raw.closed()


# Requests, with each form of headers

FORMS = ("simple", "structured", "extended")


def each(body):
    for form in FORMS:
        raw = Raw().agree(form, [b"base:allocation"] if form != "simple" else ())
        body(raw)
        raw.alive()


def write(raw, offset, data, flags=0):
    if raw.mode == "extended" and data:
        flags |= PAYLOAD_LEN
    return raw.error(WRITE, offset, len(data), flags, payload=data)


@case("unaligned: EINVAL")
def _():
    def body(raw):
        for command in (READ, TRIM, ZEROES, CACHE):
            for offset, length in ((1, 512), (0, 511), (511, 1), (256, 4096)):
                same(raw.error(command, offset, length), EINVAL, (command, offset, length))

    each(body)


@case("an unaligned WRITE: EINVAL, its payload drained")
def _():
    def body(raw):
        for offset, length in ((1, 512), (0, 100), (256, 4096)):
            same(write(raw, offset, b"\1" * length), EINVAL, (offset, length))

    each(body)


@case("a client that did not ask for the block size: any alignment, payloads to 64 MiB")
def _():
    for options in (lambda raw: same(raw.ask(GO, go(b"", []))[-1], ACK), None):
        raw = Raw()
        if options:
            options(raw)
        else:
            raw.option(EXPORT_NAME)
            raw.take(10)
        same(write(raw, 1 * MIB, b"\1" * 4096), 0)
        same(write(raw, 1 * MIB + 7, b"\2" * 1000), 0)
        same(raw.error(ZEROES, 1 * MIB + 1, 2), 0)
        raw.request(READ, 1 * MIB, 1100)
        same(raw.take(16)[4:8], bytes(4))
        same(raw.take(1100), b"\1\0\0" + b"\1" * 4 + b"\2" * 1000 + b"\1" * 93)
        for command in (TRIM, CACHE):
            same(raw.error(command, 1, 77777), 0, command)
        same(write(raw, 0, bytes(64 * MIB)), 0)
        same(raw.error(READ, 3, 1 + 64 * MIB), EINVAL)


@case("unknown commands: EINVAL")
def _():
    each(lambda raw: [same(raw.error(command, 0, 512), EINVAL) for command in (8, 9, 99, 65535)])


@case("unknown flags: EINVAL")
def _():
    each(lambda raw: [same(raw.error(READ, 0, 512, 1 << bit), EINVAL) for bit in (6, 7, 14, 15)])


@case("a flag of another command: EINVAL")
def _():
    def body(raw):
        for command, flag in ((READ, NO_HOLE), (READ, REQ_ONE), (TRIM, FAST_ZERO), (ZEROES, DF), (CACHE, NO_HOLE)):
            same(raw.error(command, 0, 512, flag), EINVAL, (command, flag))
        for flag in (NO_HOLE, DF, REQ_ONE, FAST_ZERO):
            same(write(raw, 0, bytes(512), flag), EINVAL, flag)

    each(body)


@case("reads, trims and hints past the end: EINVAL")
def _():
    def body(raw):
        for command in (READ, TRIM, CACHE):
            for offset, length in ((SIZE, 512), (SIZE - 512, 1024), (2**64 - 512, 512), (2**64 - 512, 1024)):
                same(raw.error(command, offset, length), EINVAL, (command, offset, length))

    each(body)


@case("writes and zeroes past the end: ENOSPC")
def _():
    def body(raw):
        for offset, length in ((SIZE, 512), (SIZE - 512, 1024), (2**64 - 512, 512), (2**64 - 512, 1024)):
            same(raw.error(ZEROES, offset, length), ENOSPC, (offset, length))
            same(write(raw, offset, b"\2" * length), ENOSPC, (offset, length))

    each(body)


@case("zero length is not an error of the connection")
def _():
    def body(raw):
        for command in (READ, TRIM, ZEROES, CACHE):
            for offset in (0, SIZE):
                same(raw.error(command, offset, 0), 0, (command, offset))
        same(write(raw, 0, b""), 0)

    each(body)


@case("FUA is tolerated on every command")
def _():
    def body(raw):
        for command in (READ, TRIM, ZEROES, CACHE):
            same(raw.error(command, 0, 4096, FUA), 0, command)
        same(raw.error(FLUSH, 0, 0, FUA), 0)
        same(write(raw, 0, bytes(4096), FUA), 0)

    each(body)


@case("a FLUSH has no range: EINVAL")
def _():
    each(lambda raw: [same(raw.error(FLUSH, *range_), EINVAL) for range_ in ((512, 0), (0, 512), (512, 512))])


@case("TRIM and WRITE_ZEROES may exceed the payload limit")
def _():
    def body(raw):
        for command in (TRIM, ZEROES, CACHE):
            same(raw.error(command, 0, SIZE), 0, command)

    each(body)


@case("TRIM and WRITE_ZEROES of 4 GiB past the end keep their errors")
def _():
    def body(raw):
        same(raw.error(TRIM, 0, 0xFFFFFE00), EINVAL)
        same(raw.error(ZEROES, 0, 0xFFFFFE00), ENOSPC)

    each(body)


@case("a READ above the maximum: EINVAL; with DF: EOVERFLOW")
def _():
    def body(raw):
        same(raw.error(READ, 0, 32 * MIB + 512), EINVAL)
        if raw.mode != "simple":
            same(raw.error(READ, 0, 32 * MIB + 512, DF), EOVERFLOW)
        same(raw.error(READ, 0, 32 * MIB), 0)

    each(body)


@case("a WRITE above the maximum: EINVAL, drained, the connection lives")
def _():
    for form in ("simple", "structured"):
        raw = Raw().agree(form)
        same(write(raw, 0, bytes(32 * MIB + 512)), EINVAL)
        raw.alive()


@case("a WRITE of more than is drained for anybody: close")
def _():
    raw = Raw().agree("simple")
    raw.request(WRITE, 0, 0xFFFFFFFF)
    raw.closed()


@case("DF without structured replies: EINVAL")
def _():
    same(Raw().agree("simple").error(READ, 0, 512, DF), EINVAL)


@case("DF works up to 64 KiB and beyond: one chunk of data")
def _():
    for form in FORMS[1:]:
        raw = Raw().agree(form)
        for length in (512, 65536, MIB):
            raw.request(READ, 0, length, DF)
            done, kind, _, payload = raw.chunk()
            same((done, kind, len(payload)), (True, DATA, 8 + length))


@case("BLOCK_STATUS that was not negotiated: EINVAL")
def _():
    for form in FORMS:
        same(Raw().agree(form).error(STATUS, 0, 4096), EINVAL)


@case("BLOCK_STATUS of no bytes, off the sectors or past the end: EINVAL")
def _():
    for form in FORMS[1:]:
        raw = Raw().agree(form, [b"base:allocation"])
        for offset, length in ((0, 0), (0, 100), (1, 512), (SIZE, 512), (SIZE - 512, 1024)):
            same(raw.error(STATUS, offset, length), EINVAL, (offset, length))
        raw.alive()


@case("a structured READ never gets a simple reply, not even for an error")
def _():
    raw = Raw().agree("structured")
    for flags, offset, length in ((0, 1, 512), (1 << 9, 0, 512), (0, SIZE, 512), (0, 0, 0), (0, 0, 64 * MIB), (0, 0, 512)):
        raw.request(READ, offset, length, flags)
        same(raw.chunk()[1] is not None, True)


@case("error messages are strings of the protocol")
def _():
    raw = Raw().agree("structured")
    raw.request(READ, 1, 512)
    done, kind, _, payload = raw.chunk()
    number, count = struct.unpack(">IH", payload[:6])
    same((done, kind, number, len(payload)), (True, ERROR, EINVAL, 6 + count))
    same("\0" in payload[6:].decode(), False)


@case("FAST_ZERO: done at once for whole stripes, ENOTSUP for what would be written")
def _():
    raw = Raw().agree("structured")
    same(raw.error(ZEROES, 0, MIB, FAST_ZERO), 0)
    same(raw.error(ZEROES, 0, MIB, FAST_ZERO | NO_HOLE), ENOTSUP)
    same(raw.error(ZEROES, 512, 512, FAST_ZERO), ENOTSUP)
    raw.alive()


@case("cookies come back as they were sent, many at once")
def _():
    raw = Raw().agree("structured")
    cookies = [0, 1, 2**64 - 1, 0x0123456789ABCDEF, 5, 5]
    for cookie in cookies:
        raw.request(FLUSH, cookie=cookie)
    same(sorted(raw.chunk()[2] for _ in cookies), sorted(cookies))


@case("a DISC is not answered, what was asked before it is")
def _():
    for form in FORMS:
        raw = Raw().agree(form)
        raw.request(FLUSH)
        raw.request(DISC)
        same(raw.outcome(FLUSH, 0), 0)
        raw.closed()


# Extended headers


@case("a WRITE has its payload, also without PAYLOAD_LEN, as qemu sends it")
def _():
    raw = Raw().agree("extended")
    for flags in (0, PAYLOAD_LEN):
        same(raw.error(WRITE, 0, 4096, flags, payload=b"\3" * 4096), 0)
        same(raw.error(WRITE, 3, 4096, flags, payload=b"\3" * 4096), EINVAL)
    raw.alive()


@case("PAYLOAD_LEN on a command that takes none: drained, EINVAL")
def _():
    raw = Raw().agree("extended")
    for command in (READ, FLUSH, TRIM, CACHE, ZEROES, 77):
        same(raw.error(command, 0, 4096, PAYLOAD_LEN, payload=b"\3" * 4096), EINVAL, command)
    raw.alive()


@case("PAYLOAD_LEN above the maximum payload: close")
def _():
    for command in (WRITE, TRIM, STATUS):
        raw = Raw().agree("extended")
        raw.request(command, 0, 32 * MIB + 512, PAYLOAD_LEN)
        raw.closed()


@case("PAYLOAD_LEN with compact headers: EINVAL")
def _():
    raw = Raw().agree("structured")
    same(raw.error(READ, 0, 512, PAYLOAD_LEN), EINVAL)
    same(raw.error(WRITE, 0, 512, PAYLOAD_LEN, payload=bytes(512)), EINVAL)
    raw.alive()


@case("lengths of 64 bits are checked without overflow")
def _():
    raw = Raw().agree("extended", [b"base:allocation"])
    for offset, length in ((512, 2**64 - 512), (2**64 - 512, 2**64 - 512), (0, 2**63), (0, 1 << 40)):
        for command, want in ((READ, EINVAL), (TRIM, EINVAL), (CACHE, EINVAL), (ZEROES, ENOSPC), (STATUS, EINVAL)):
            same(raw.error(command, offset, length), want, (command, offset, length))
    raw.alive()


@case("extended replies name the offset of their request")
def _():
    raw = Raw().agree("extended")
    for offset, length in ((4096, 512), (8192, 1024), (4097, 512)):
        raw.request(READ, offset, length)
        raw.chunk()
        same(raw.offset, offset)


@case("BLOCK_STATUS with a payload answers for the contexts named")
def _():
    raw = Raw().agree("extended", [b"base:allocation", b"calpe:health"])
    for ids in ((1,), (2,), (1, 2), (2, 1)):
        payload = struct.pack(">Q", MIB) + b"".join(struct.pack(">I", id_) for id_ in ids)
        raw.request(STATUS, 0, len(payload), PAYLOAD_LEN, payload=payload)
        got = []
        while True:
            done, kind, _, answer = raw.chunk()
            same(kind, BLOCK_STATUS_EXT)
            id_, count = struct.unpack(">II", answer[:8])
            same(len(answer), 8 + 16 * count, "the count of extents")
            got.append(id_)
            if done:
                break
        same(sorted(got), sorted(ids))


@case("BLOCK_STATUS with a payload of unknown, repeated or no contexts: drained, EINVAL")
def _():
    raw = Raw().agree("extended", [b"base:allocation"])
    effect = struct.pack(">Q", 4096)
    one, two = struct.pack(">I", 1), struct.pack(">I", 2)
    payloads = (effect, effect + two, effect + one + one, effect + one + b"x", effect[:5], effect + one * 9000)
    for payload in payloads + (struct.pack(">Q", SIZE + 512) + one, struct.pack(">Q", 0) + one):
        same(raw.error(STATUS, 0, len(payload), PAYLOAD_LEN, payload=payload), EINVAL, payload[:20])
    raw.alive()


@case("REQ_ONE: one extent for each context, not longer than asked")
def _():
    raw = Raw().agree("extended", [b"base:allocation", b"calpe:health"])
    raw.request(STATUS, 0, 8192, REQ_ONE)
    for last in (False, True):
        done, kind, _, answer = raw.chunk()
        same((done, kind, len(answer)), (last, BLOCK_STATUS_EXT, 24))
        same(struct.unpack(">Q", answer[8:16])[0] <= 8192, True)


@case("without extended headers one compact chunk for each context")
def _():
    raw = Raw().agree("structured", [b"base:allocation", b"calpe:health"])
    raw.request(STATUS, 0, MIB)
    chunks = [raw.chunk(), raw.chunk()]
    same([(done, kind) for done, kind, _, _ in chunks], [(False, BLOCK_STATUS), (True, BLOCK_STATUS)])
    same(chunks[1][3], struct.pack(">III", 2, MIB, 0), "a healthy array is clean")


# Reads of what is known to be zeroes


def parts(raw, offset, length, flags=0):
    raw.request(READ, offset, length, flags)
    found = []
    while True:
        done, kind, _, payload = raw.chunk()
        at = struct.unpack(">Q", payload[:8])[0]
        found.append((kind, at, struct.unpack(">I", payload[8:])[0] if kind == HOLE else len(payload) - 8))
        if done:
            return found


@case("a READ of nothing but zeroes is one hole, without payload")
def _():
    for form in FORMS[1:]:
        raw = Raw().agree(form)
        same(raw.error(TRIM, 8 * MIB, 8 * MIB), 0)
        same(parts(raw, 8 * MIB, 4 * MIB), [(HOLE, 8 * MIB, 4 * MIB)])
        same(parts(raw, 8 * MIB + 512, 1024), [(HOLE, 8 * MIB + 512, 1024)])


@case("holes and data of one READ do not overlap, cover it, and end at blocks")
def _():
    for form in FORMS[1:]:
        raw = Raw().agree(form)
        same(raw.error(TRIM, 8 * MIB, 8 * MIB), 0)
        same(write(raw, 10 * MIB, b"\7" * 4096), 0)
        found = parts(raw, 8 * MIB, 4 * MIB)
        at = 8 * MIB
        for kind, offset, length in sorted(found, key=lambda part: part[1]):
            same((offset, length % 512, length > 0), (at, 0, True))
            at += length
        same(at, 12 * MIB)
        data = [(offset, length) for kind, offset, length in found if kind == DATA]
        same(data, [(10 * MIB, 4096)])


@case("with DF or simple replies zeroes travel as bytes")
def _():
    raw = Raw().agree("structured")
    same(parts(raw, 8 * MIB, 65536, DF), [(DATA, 8 * MIB, 65536)])
    same(Raw().agree("simple").error(READ, 8 * MIB, 65536), 0)


# The same through libnbd with its own checks off


@case("libnbd: an unaligned read and one past the end")
def _():
    handle = library()
    refused(EINVAL, lambda: handle.pread(512, 3))
    refused(EINVAL, lambda: handle.pread(4096, SIZE - 512))
    refused(EINVAL, lambda: handle.pread(512, 1 << 62))
    handle.shutdown()


@case("libnbd: writes past the end, unaligned, too large")
def _():
    handle = library()
    refused(ENOSPC, lambda: handle.pwrite(bytearray(4096), SIZE - 512))
    refused(EINVAL, lambda: handle.pwrite(bytearray(4096), 17))
    refused(EINVAL, lambda: handle.pwrite(bytearray(32 * MIB + 512), 0))
    same(bytes(handle.pread(512, SIZE - 512)), bytes(512), "nothing was written")
    handle.shutdown()


@case("libnbd: unknown flags")
def _():
    handle = library()
    for call in (
        lambda: handle.pread(512, 0, 0x4000),
        lambda: handle.pwrite(bytearray(512), 0, 0x4000),
        lambda: handle.flush(0x4000),
        lambda: handle.trim(512, 0, 0x4000),
        lambda: handle.zero(512, 0, 0x4000),
        lambda: handle.cache(512, 0, 0x4000),
    ):
        refused(EINVAL, call)
    handle.shutdown()


@case("libnbd: block status of several contexts, of nothing, past the end")
def _():
    handle = library(["base:allocation", "calpe:health"])
    seen = {}
    handle.block_status(MIB, 0, lambda context, offset, extents, _: seen.update({context: extents}) or 0)
    same(sorted(seen), ["base:allocation", "calpe:health"])
    same(seen["calpe:health"][1], 0)
    refused(EINVAL, lambda: handle.block_status(0, 0, lambda *_: 0))
    refused(EINVAL, lambda: handle.block_status(MIB, SIZE - 512, lambda *_: 0))
    handle.shutdown()


@case("libnbd: zeroes and trims of all but 4 GiB")
def _():
    handle = library()
    refused(ENOSPC, lambda: handle.zero((4 << 30) - 512, 512))
    refused(EINVAL, lambda: handle.trim((4 << 30) - 512, 512))
    handle.trim(SIZE, 0)
    handle.zero(SIZE, 0)
    handle.shutdown()


@case("libnbd: a command that was sent before the export was known to lack it")
def _():
    handle = library()
    refused(EINVAL, lambda: handle.block_status(4096, 0, lambda *_: 0))
    same(bytes(handle.pread(512, 0)), bytes(512))
    handle.shutdown()


# Read-only exports


@case("read-only: WRITE, TRIM and WRITE_ZEROES are EPERM, payload drained")
def _():
    for form in FORMS:
        raw = Raw(READ_ONLY).agree(form)
        same(write(raw, 0, b"\4" * 4096), EPERM)
        for command in (TRIM, ZEROES):
            for flags in (0, FUA):
                same(raw.error(command, 0, 4096, flags), EPERM)
        raw.alive()


@case("read-only: permission before range, nonsense before permission")
def _():
    raw = Raw(READ_ONLY).agree("structured")
    same(write(raw, SIZE, b"\4" * 512), EPERM)
    same(write(raw, 3, b"\4" * 512), EPERM)
    same(write(raw, 0, b"\4" * 512, 1 << 9), EINVAL)


@case("read-only: reads, flushes, hints and block status are served")
def _():
    raw = Raw(READ_ONLY).agree("structured", [b"base:allocation"])
    for command, length in ((READ, 4096), (FLUSH, 0), (CACHE, 4096), (STATUS, 4096)):
        same(raw.error(command, 0, length), 0, command)


@case("read-only: the flags say so and offer nothing that would be refused")
def _():
    handle = library(path=READ_ONLY)
    same((handle.is_read_only(), handle.can_trim(), handle.can_zero(), handle.can_fast_zero()), (True, False, False, False))
    same((handle.can_flush(), handle.can_df(), handle.can_cache(), handle.can_multi_conn()), (True, True, True, True))
    refused(EPERM, lambda: handle.pwrite(bytearray(512), 0))
    refused(EPERM, lambda: handle.zero(512, 0))
    handle.shutdown()


# Clients that go away or keep quiet


@case("a client that vanishes anywhere costs nothing but its connection")
def _():
    talk = struct.pack(">I", 3)
    talk += b"IHAVEOPT" + struct.pack(">II", EXTENDED, 0) + b"IHAVEOPT" + struct.pack(">II", GO, 6) + bytes(6)
    talk += struct.pack(">IHHQQQ", 0x21E41C71, PAYLOAD_LEN, WRITE, 1, 0, 4096) + b"\5" * 64
    for cut in range(0, len(talk), 3):
        raw = Raw(flags=None)
        raw.say(talk[:cut])
        raw.socket.close()
    Raw().agree().alive()


@case("FLUSH and FUA on one connection cover writes completed on another")
def _():
    one, other = Raw().agree("structured"), Raw().agree("extended")
    same(write(one, 40 * MIB, b"\6" * 4096), 0)
    same(other.error(FLUSH, 0, 0), 0)
    other.request(READ, 40 * MIB, 4096)
    same(other.chunk()[3][8:], b"\6" * 4096)


@case("what it costs to be hostile is paid by nobody else: the export still serves")
def _():
    handle = library()
    handle.pwrite(bytearray(b"\x5a" * 4096), 8192, nbd.CMD_FLAG_FUA)
    same(bytes(handle.pread(4096, 8192)), b"\x5a" * 4096)
    handle.shutdown()


failed = 0
for number, (obligation, check) in enumerate(CASES, 1):
    try:
        check()
        print(f"ok {number} {obligation}", flush=True)
    except Exception as error:  # whatever it was: the case has failed, and says so
        failed += 1
        print(f"FAILED {number} {obligation}: {type(error).__name__} {error}", flush=True)
print(f"{len(CASES)} cases, {failed} failed", flush=True)
sys.exit(1 if failed else 0)
