#!/usr/bin/env python3
"""Gets the content of a volume out of the devices of a Calpe array, without Calpe. Reads them only.

    scripts/recover.py DEVICE... --output FILE [--force]     devices or files of the array's members, in any order; up to m may be missing

What cannot be recovered is left as zeroes in FILE and listed. --force goes on where what is left of log,
stripe map or checksums may be older than what was last written, and so may be what FILE gets; it takes pages
of the map that are nowhere else from members that are not current, and uses members that were rolled back
where the others are too few. Exit status: 0 when everything is there, 1 when blocks are lost, 2 when the
array cannot be read at all.

Needs Python 3.8 and nothing else. Written from docs/on-disk-format.md alone, section by section: where this
program and Calpe disagree, one of the three is wrong. Little is kept in memory; a gigabyte takes some two
minutes.
"""

import argparse
import array
import itertools
import os
import struct
import sys
from collections import defaultdict, namedtuple

BLOCK, COPY = 4096, 16384
MAGIC = b"\x43\x41\x4c\x50\x45\x0d\x0a\x1a"
ENTRIES = 252
NOWHERE = 0xFFFFFFFF
UNWRITTEN, LOST, SET_ASIDE = bytes(16), b"\xff" * 16, b"setaside"
CHECKSUM_PAGES, UPDATE_COUNT, LANES_CUT, KNOWN_FEATURES = 1 << 1, 1 << 4, 1 << 5, 0b110111
# A hash that no block has.
UNKNOWN = b"unknown"
# Hashes are computed side by side; this many blocks are kept in memory.
BLOCKS_AT_ONCE = 2048
CRC_MARK = bytes.fromhex("6372632d3332630000000001")
KEY_CONTEXT = b"calpe redo log and pages 2026"


class Unreadable(Exception):
    """The array cannot be recovered as a whole."""


# BLAKE3 of many inputs side by side: each 32-bit word of the state is one long integer with a lane of 64 bits
# for every input.

IV = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]
CHUNK_START, CHUNK_END, PARENT, ROOT, KEYED, CONTEXT, MATERIAL = 1, 2, 4, 8, 16, 32, 64
ORDER = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
MIXES = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15), (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
# Lanes at once: integers of this many words stay in the processor's cache.
LANES = 2048


def lanes_of(words):
    """An integer with these 32-bit words in its lanes."""
    wide = array.array("Q", words)
    if sys.byteorder == "big":
        wide.byteswap()
    return int.from_bytes(wide.tobytes(), "little")


def words_of(lanes, count):
    wide = array.array("Q", lanes.to_bytes(8 * count, "little"))
    if sys.byteorder == "big":
        wide.byteswap()
    return wide


def compress(chaining, message, counters, length, flags, count):
    """The first eight words of the compression function in every lane; `counters` and `flags` are one number
    a lane.
    """
    ones = lanes_of([1] * count)
    mask = ones * 0xFFFFFFFF
    v = chaining + [ones * word for word in IV[:4]]
    v += [lanes_of(c & 0xFFFFFFFF for c in counters), lanes_of(c >> 32 for c in counters), ones * length, lanes_of(flags)]
    for turn in range(7):
        for at, (a, b, c, d) in enumerate(MIXES):
            va, vb, vc, vd = v[a], v[b], v[c], v[d]
            va = (va + vb + message[2 * at]) & mask
            vd ^= va
            vd = (vd >> 16 | vd << 16) & mask
            vc = (vc + vd) & mask
            vb ^= vc
            vb = (vb >> 12 | vb << 20) & mask
            va = (va + vb + message[2 * at + 1]) & mask
            vd ^= va
            vd = (vd >> 8 | vd << 24) & mask
            vc = (vc + vd) & mask
            vb ^= vc
            v[a], v[b], v[c], v[d] = va, (vb >> 7 | vb << 25) & mask, vc, vd
        message = [message[at] for at in ORDER]
    return [low ^ high for low, high in zip(v[:8], v[8:])]


def chunks_hashed(chunks, key, mode):
    """Chaining values of chunks of one length: (bytes, counter, whether it is its input's only one) each."""
    count, length = len(chunks), len(chunks[0][0])
    blocks = max(1, -(-length // 64))
    padded = b"".join(data.ljust(64 * blocks, b"\0") for data, _, _ in chunks)
    words = array.array("I", padded)
    if sys.byteorder == "big":
        words.byteswap()
    chaining = [lanes_of([word] * count) for word in key]
    for block in range(blocks):
        message = [lanes_of(words[16 * block + at :: 16 * blocks]) for at in range(16)]
        flags = mode | (CHUNK_START if block == 0 else 0) | (CHUNK_END if block == blocks - 1 else 0)
        last = block == blocks - 1
        each = [flags | (ROOT if last and only else 0) for _, _, only in chunks]
        size = min(64, length - 64 * block)
        chaining = compress(chaining, message, [counter for _, counter, _ in chunks], size, each, count)
    return zip(*[words_of(lanes, count) for lanes in chaining])


def blake3_many(inputs, key=IV, mode=0):
    """The 32-byte BLAKE3 hashes of some inputs; `key` is eight words."""
    trees, by_length = [[] for _ in inputs], defaultdict(list)
    for nth, data in enumerate(inputs):
        count = max(1, -(-len(data) // 1024))
        trees[nth] = [None] * count
        for at in range(count):
            chunk = data[1024 * at : 1024 * (at + 1)]
            by_length[len(chunk)].append((nth, at, (bytes(chunk), at, count == 1)))
    for chunks in by_length.values():
        for start in range(0, len(chunks), LANES):
            part = chunks[start : start + LANES]
            hashed = chunks_hashed([chunk for _, _, chunk in part], key, mode)
            for (nth, at, _), value in zip(part, hashed):
                trees[nth][at] = value
    while any(len(tree) > 1 for tree in trees):
        pairs = []
        for nth, tree in enumerate(trees):
            only = len(tree) == 2
            pairs += [(nth, at, tree[at] + tree[at + 1], only) for at in range(0, len(tree) - 1, 2)]
        for start in range(0, len(pairs), LANES):
            part = pairs[start : start + LANES]
            chaining = [lanes_of([word] * len(part)) for word in key]
            message = [lanes_of(pair[at] for _, _, pair, _ in part) for at in range(16)]
            flags = [mode | PARENT | (ROOT if only else 0) for _, _, _, only in part]
            values = compress(chaining, message, [0] * len(part), 64, flags, len(part))
            for (nth, at, _, _), value in zip(part, zip(*[words_of(lanes, len(part)) for lanes in values])):
                trees[nth][at] = value
        trees = [tree[::2] if len(tree) > 1 else tree for tree in trees]
    return [struct.pack("<8I", *tree[0]) for tree in trees]


def blake3(data):
    return blake3_many([data])[0]


def derived_key(context, material):
    """Words of the key that BLAKE3 derives from `material`."""
    words = struct.unpack("<8I", blake3_many([context], mode=CONTEXT)[0])
    return struct.unpack("<8I", blake3_many([material], words, MATERIAL)[0])


def keyed(key, data):
    return blake3_many([data], key, KEYED)[0]


def crc_tables():
    """The table of CRC-32C, each byte of its entries as a table for bytes.translate."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return [bytes(value >> 8 * nth & 255 for value in table) for nth in range(4)]


CRC = crc_tables()


def crc32c_many(blocks):
    """CRC-32C of blocks side by side: each byte of the state is one long integer with a byte for every block.
    """
    count, data = len(blocks), b"".join(blocks)
    number = lambda string: int.from_bytes(string, "little")
    state = [number(b"\xff" * count)] * 4
    for at in range(BLOCK):
        index = (state[0] ^ number(data[at::BLOCK])).to_bytes(count, "little")
        looked_up = [number(index.translate(table)) for table in CRC]
        state = [looked_up[nth] ^ state[nth + 1] for nth in range(3)] + [looked_up[3]]
    rows = [(word ^ number(b"\xff" * count)).to_bytes(count, "little") for word in state]
    return [bytes(word) for word in zip(*rows)]


def block_hashes(kind, blocks):
    """Hashes of blocks as the format has them: kind 2 is BLAKE3, others CRC-32C."""
    if kind == 2:
        hashes = [value[:16] for value in blake3_many(blocks)]
    else:
        hashes = [value + CRC_MARK for value in crc32c_many(blocks)]
    return [value if is_stored(value) else b"\x5a" * 16 for value in hashes]


def is_stored(value):
    """Whether a hash stands for content; other blocks enter decoding as zeroes."""
    return value not in (UNWRITTEN, LOST) and value[8:] != SET_ASIDE


# "Parity": GF(2^8) with 0x11D.


def field():
    exp, log, value = [0] * 255, [0] * 256, 1
    for power in range(255):
        exp[power], log[value] = value, power
        value <<= 1
        if value & 0x100:
            value ^= 0x11D
    return exp, log


EXP, LOG = field()


def times(factor):
    """The products of all bytes with a factor, as a table for bytes.translate."""
    return bytes(EXP[(LOG[factor] + LOG[byte]) % 255] if factor and byte else 0 for byte in range(256))


def decode(present, wanted):
    """The block of column `wanted` from k blocks by column."""
    total = 0
    for p, block in present.items():
        power = sum(LOG[wanted ^ q] - LOG[p ^ q] for q in present if q != p)
        total ^= int.from_bytes(block.translate(times(EXP[power % 255])), "little")
    return total.to_bytes(BLOCK, "little")


# "Superblock".

Superblock = namedtuple(
    "Superblock",
    "sequence array device name member role clean checksum_kind volume data parity chunk slots volume_bytes epoch regions members "
    "log_start secret update update_complete map_pages part",
)
# "Lanes": which of how many, stripes at a time, bytes from one window to the next, bytes of the whole volume.
Part = namedtuple("Part", "lane count group stride volume_bytes")
Epoch = namedtuple("Epoch", "number id parent live")


def decode_superblock(copy):
    """A copy that is valid; None for one that is not whole. Raises when this program must not go by it."""
    if copy is None or copy[: len(MAGIC)] != MAGIC:
        return None
    if blake3(copy[:0x10] + bytes(32) + copy[0x30:]) != copy[0x10:0x30]:
        return None
    number = lambda at, size: int.from_bytes(copy[at : at + size], "little")
    incompat = number(0x48, 8)
    if number(8, 2) != 1 or incompat & ~KNOWN_FEATURES or not incompat & 1:
        raise Unreadable(f"version {number(8, 2)} with the features {incompat:#x} is not known here")
    check_fields(number, incompat)
    regions = {}
    for nth in range(number(0x158, 2)):
        at = 0x200 + 32 * nth
        if copy[at] in regions:
            raise Unreadable(f"its superblock has two regions of kind {copy[at]}")
        regions[copy[at]] = (number(at + 8, 8), number(at + 16, 8))
    members = [(copy[at : at + 16], copy[at + 0x18]) for at in range(0x400, 0x400 + 32 * number(0x15A, 2), 32)]
    live = {at for at in range(255) if copy[0xF8 + at // 8] >> at % 8 & 1}
    part = Part(number(0x1FE, 2), number(0x1FC, 2), number(0xCC, 4), number(0x3E0, 8), number(0x3E8, 8))
    return Superblock(
        sequence=number(0x30, 8), array=copy[0x50:0x60], device=copy[0x60:0x70], name=copy[0x70:0xB0].rstrip(b"\0").decode(errors="replace"),
        member=number(0xB8, 2), role=copy[0xBA], clean=copy[0xBB] == 1, volume=copy[0xBE],
        checksum_kind=copy[0xBD] if incompat & CHECKSUM_PAGES else 0, data=number(0xC0, 2), parity=number(0xC2, 2),
        chunk=number(0xC4, 4), slots=number(0xD0, 8), volume_bytes=number(0xD8, 8),
        epoch=Epoch(number(0xE0, 8), number(0xE8, 8), number(0xF0, 8), live), regions=regions, members=members,
        log_start=(number(0x168, 8), number(0x160, 8)), secret=copy[0x170:0x180],
        update=number(0x180, 8) if incompat & UPDATE_COUNT else 0,
        update_complete=number(0x188, 8) if incompat & UPDATE_COUNT else 0,
        map_pages=number(0x190, 8), part=part if incompat & LANES_CUT else Part(0, 1, 1, 0, number(0xD8, 8)),
    )


def check_fields(number, incompat):
    """Refuses a whole copy with an impossible field, "Bytes of a copy". What depends on the device: check_regions."""
    k, m, chunk, slots, volume_bytes = number(0xC0, 2), number(0xC2, 2), number(0xC4, 4), number(0xD0, 8), number(0xD8, 8)
    is_power = lambda value: value > 0 and value & value - 1 == 0
    stripe = k * chunk
    checks = [
        ("data", k, k >= 1), ("parity", m, k + m <= 255), ("member", number(0xB8, 2), number(0xB8, 2) < k + m),
        ("role", number(0xBA, 1), 1 <= number(0xBA, 1) <= 3), ("matrix", number(0xBC, 1), number(0xBC, 1) == 1),
        ("checksum_kind", number(0xBD, 1), not incompat & CHECKSUM_PAGES or number(0xBD, 1) in (1, 2)),
        ("chunk", chunk, is_power(chunk) and BLOCK <= chunk <= 4 << 20), ("slots", slots, slots >= 1),
        ("volume_bytes", volume_bytes, volume_bytes % BLOCK == 0 and volume_bytes <= slots * stripe),
        ("region_count", number(0x158, 2), number(0x158, 2) <= 15),
        ("member_count", number(0x15A, 2), number(0x15A, 2) == k + m),
    ]
    if incompat & LANES_CUT:
        lane, count, group = number(0x1FE, 2), number(0x1FC, 2), number(0xCC, 4)
        stride, whole = number(0x3E0, 8), number(0x3E8, 8)
        checks += [
            ("lane_count", count, 2 <= count <= 32), ("lane", lane, lane < count),
            ("lane_group", group, is_power(group) and group <= 65536),
            ("lane_stride", stride, stride > 0 and stride % (1 << 20) == 0),
            ("whole_volume_bytes", whole, whole > 0 and whole % BLOCK == 0),
        ]
    refuse_impossible(checks)
    if incompat & LANES_CUT:
        share = share_of_lane(whole, stripe, lane, count, group)
        refuse_impossible([(f"whole_volume_bytes (of which lane {lane} has {share}, and says {volume_bytes})", whole, share == volume_bytes)])


def refuse_impossible(checks):
    for name, value, is_possible in checks:
        if not is_possible:
            raise Unreadable(f"its superblock has an impossible {name}: {value}")


def share_of_lane(whole, stripe, lane, count, group):
    """Bytes of the whole stripes that a lane has of a volume, "Lanes"."""
    rounds, left = divmod(-(-whole // stripe), group * count)
    return (rounds * group + min(max(left - lane * group, 0), group)) * stripe


def check_regions(superblock, size):
    """Refuses regions that do not fit a device, or window, of this size."""
    names = {1: "log region", 2: "pages region", 3: "data region"}
    for kind in (1, 3):
        if kind not in superblock.regions:
            raise Unreadable(f"its superblock has no {names[kind]}")
    end = 2 * COPY
    for start, length, kind in sorted((offset, length, kind) for kind, (offset, length) in superblock.regions.items()):
        if length == 0 or start % BLOCK or length % BLOCK or start < end or start + length > size - 2 * COPY:
            what = names.get(kind, f"region of kind {kind}")
            raise Unreadable(f"its superblock has an impossible {what}: {length} bytes at {start} of {size}")
        end = start + length
    if superblock.regions[3][1] < superblock.slots * superblock.chunk:
        raise Unreadable(f"its superblock has impossible slots: {superblock.slots} do not fit the data region")


def is_blank(copy):
    """Whether a place, as it was read, never had a superblock."""
    return copy is not None and copy[: len(MAGIC)] != MAGIC and not was_cut_off(copy)


def was_cut_off(copy):
    """Whether an update was cut off there: a sector still has what fills the place before an update."""
    return copy is not None and any(copy[at : at + 512] == b"\xa5" * 512 for at in range(0, COPY, 512))


class Device:
    """A member's device, or the window of a lane in it: its current superblock, and reads that say None where
    it cannot be read.
    """

    def __init__(self, path, file, start, end):
        self.path, self.file, self.start = path, file, start
        size = (end - start) // BLOCK * BLOCK
        self.slots = slots = self.read_slots(size)
        if any(set(slot) == {None} for slot in slots):
            raise Unreadable("its superblock cannot be read: the newest may be where both copies give read errors")
        decoded = [[decode_superblock(copy) for copy in slot] for slot in slots]
        copies = [copy for slot in decoded for copy in slot if copy]
        if not copies:
            raise Unreadable("no superblock")
        if len({(copy.array, copy.device) for copy in copies}) > 1:
            raise Unreadable("its superblocks are of different devices")
        newest = max(copies, key=lambda copy: copy.sequence)
        check_regions(newest, size)
        # Where neither copy of a slot is whole or was cut off, the newest may have been there, and not clean.
        is_gone = any(not any(slot) and not any(map(was_cut_off, read)) for slot, read in zip(decoded, slots))
        was_updated = newest.sequence > 1 or not any(all(map(is_blank, slot)) for slot in slots)
        self.superblock = newest._replace(clean=newest.clean and not (is_gone and was_updated))

    def read_slots(self, size):
        """The copies as they are read: head and tail of slot A, of slot B."""
        return [[self.read(at, COPY) for at in places if at >= 0] for places in ([0, size - 2 * COPY], [COPY, size - COPY])]

    def read(self, offset, length):
        try:
            data = os.pread(self.file, length, self.start + offset)
        except OSError:
            return None
        return data if len(data) == length else None

    def region(self, kind):
        return self.superblock.regions[kind]


class Ends(Device):
    """All of a device, for the copies at its ends alone, whatever they are."""

    def __init__(self, path, file, size):
        self.path, self.file, self.start = path, file, 0
        copies = [copy for slot in self.read_slots(size) for copy in slot]
        decoded = [copy for copy in map(decode_superblock, copies) if copy]
        self.cuts = {copy.part._replace(lane=0) for copy in decoded if copy.part.count > 1}
        self.is_one = len({(copy.array, copy.device) for copy in decoded}) == 1


def lanes_of_device(path):
    """The windows of the lanes of a device, None for one whose superblock cannot be used; one window where it
    is not cut.
    """
    file = os.open(path, os.O_RDONLY)
    size = os.lseek(file, 0, os.SEEK_END) // BLOCK * BLOCK
    ends = Ends(path, file, size)
    if not ends.cuts or not ends.is_one:
        return [Device(path, file, 0, size)]
    cut, lanes = min(ends.cuts), []
    if cut.stride * (cut.count - 1) >= size:
        raise Unreadable(f"its superblock has an impossible lane_stride: {cut.stride}, for {cut.count} lanes on {size} bytes")
    for lane in range(cut.count):
        start = lane * cut.stride
        end = start + cut.stride if lane + 1 < cut.count else size
        try:
            device = Device(path, file, start, end)
            if device.superblock.part != cut._replace(lane=lane):
                raise Unreadable("its superblock is of another lane")
        except Unreadable as reason:
            print(f"{path}: lane {lane} left out: {reason}", file=sys.stderr)
            device = None
        lanes.append(device)
    if not any(lanes):
        raise Unreadable("no lane of it can be used")
    if len({(lane.superblock.array, lane.superblock.device) for lane in lanes if lane}) != 1:
        raise Unreadable("its superblocks are of different devices")
    return lanes


def groups(items, size):
    """Lists of so many items, one after the other."""
    items = iter(items)
    return iter(lambda: list(itertools.islice(items, size)), [])


# "Which devices count".


def assemble(devices, force=False):
    """The record of the epoch that counts, and its usable devices by member."""
    superblocks = [device.superblock for device in devices]
    records = {}
    for superblock in sorted(superblocks, key=lambda s: s.sequence):
        records[superblock.epoch.id] = superblock

    def is_named(superblock, epoch):
        return superblock.member in epoch.live and records[epoch.id].members[superblock.member][0] == superblock.device

    def had(held):
        """What all devices named there had, as those that hold an epoch say."""
        return max((s.update_complete for s in superblocks if s.epoch.id == held.id), default=0)

    def may_be_complete(epoch):
        lacking = [s for s in superblocks if is_named(s, epoch) and s.epoch.number < epoch.number]
        return all(s.update < had(epoch) for s in lacking)

    epochs = [record.epoch for record in records.values()]
    oldest = max([epoch.number for epoch in epochs if may_be_complete(epoch)], default=0)
    choices = []
    for epoch in epochs:
        named = [d for d in devices if is_named(d.superblock, epoch) and d.superblock.role != 3]
        holders = [d for d in named if d.superblock.epoch.id == epoch.id]
        parents = [d for d in named if epoch.parent != 0 and d.superblock.epoch.id == epoch.parent]
        usable = {device.superblock.member: device for device in holders + parents}
        complete = len(holders) == len(epoch.live)
        if epoch.number >= oldest and len(usable) >= records[epoch.id].data:
            choices.append(((epoch.number, complete, len(usable)), epoch, usable))
    if not choices:
        found = ", ".join(f"{d.path}: member {d.superblock.member}, epoch {d.superblock.epoch.number}" for d in devices)
        raise Unreadable(f"too few current members ({found})")
    choices.sort(key=lambda choice: choice[0])
    (number, complete, _), epoch, usable = choices[-1]
    if complete and sum(choice[0][:2] == (number, True) for choice in choices) > 1:
        raise Unreadable("two histories: the array was forced to start twice; leave the devices of one of them out")
    in_line = [s for s in superblocks if s.role != 3 and s.epoch.id in (epoch.id, epoch.parent or epoch.id)]
    newest_complete = max(s.update_complete for s in in_line)
    children = [child for child in epochs if child.parent == epoch.id]
    rolled_back = {}
    for member, device in list(usable.items()):
        of_children = [had(child) for child in children if is_named(device.superblock, child)]
        needed = max([newest_complete, *of_children])
        if device.superblock.update < needed:
            print(f"member {member} was rolled back: update {device.superblock.update} of {needed}", file=sys.stderr)
            rolled_back[member] = usable.pop(member)
    if force and len(usable) < records[epoch.id].data:
        usable.update(rolled_back)
    if len(usable) < records[epoch.id].data:
        raise Unreadable(f"too few members that were not rolled back: {sorted(usable)}")
    clean = all(device.superblock.clean for device in usable.values())
    return records[epoch.id]._replace(clean=clean), usable


# "Redo log".

Batch = namedtuple("Batch", "sequence epoch durable_upto tail previous places records hash header_blocks")
Shown = namedtuple("Shown", "tail durable_upto")
InPlace = namedtuple("InPlace", "stripe slot first columns row rows hashes")
Fresh = namedtuple("Fresh", "stripe slot old_slot hashes")
Discard = namedtuple("Discard", "stripe slot")


def decode_records(data, count):
    records, at = [], 0
    for _ in range(count):
        kind, flags, columns, row, rows = struct.unpack_from("<BBHII", data, at)
        stripe, slot, old_slot = struct.unpack_from("<QQQ", data, at + 0x10)
        at += 40
        hashes = lambda start, number: [data[start + 16 * nth : start + 16 * (nth + 1)] for nth in range(number)]
        if kind == 1:
            named = struct.unpack_from(f"<{columns}H", data, at)
            at += 2 * columns
            records.append(InPlace(stripe, slot, flags & 1, named, row, rows, hashes(at, columns * rows)))
            at += 16 * columns * rows
        elif kind == 2:
            records.append(Fresh(stripe, slot, old_slot, hashes(at, columns * rows)))
            at += 16 * columns * rows
        elif kind == 3:
            records.append(Discard(stripe, slot))
        else:
            raise Unreadable(f"a record of kind {kind} in the log")
    return records


class Array:
    """The devices that count, and everything that is derived from their superblocks."""

    def __init__(self, devices, force=False):
        self.record, self.usable = assemble(devices, force)
        record, self.force = self.record, force
        self.left_out = {
            device.superblock.member: device for device in devices
            if device not in self.usable.values() and record.members[device.superblock.member][0] == device.superblock.device
        }
        self.k, self.m, self.width = record.data, record.parity, record.data + record.parity
        self.rows = record.chunk // BLOCK
        self.key = derived_key(KEY_CONTEXT, record.array + record.secret)
        self.hash_pages, self.unwritten_pages = {}, set()
        self.good_images, self.batch_hashes = {}, {}
        self.map_pages = -(-record.slots // ENTRIES)
        # The rotation of a lane goes on where that of the lane before it stops.
        self.ahead = record.part.lane * record.part.group % self.width
        self.chain, self.committed = [], 0
        self.tails, self.noted, self.first = {}, {}, 0
        while not record.clean and self.read_log():
            pass
        self.named_pages = {page for batch in self.chain for record in batch.records for page in self.pages_of(record)}
        self.read_map()
        self.apply(self.longest_prefix())

    def member_of(self, slot, column):
        return (column + (slot + self.ahead) * self.k) % self.width

    def block_in_place(self, slot, row, column):
        device = self.usable.get(self.member_of(slot, column))
        if device is None:
            return None
        return device.read(device.region(3)[0] + slot * self.record.chunk + row * BLOCK, BLOCK)

    def hashes(self, blocks):
        """Hashes of blocks, None for those that are None."""
        there = [block for block in blocks if block is not None]
        hashed = iter(block_hashes(self.record.checksum_kind, there))
        return [None if block is None else next(hashed) for block in blocks]

    # "Reading the log".

    def read_log(self):
        """Whether it has to be read again, without members that were rolled back."""
        start_epoch, start = max(device.superblock.log_start for device in self.usable.values())
        committed, found, self.chain = start, {}, []
        shown = {member: Shown(start, start) for member in self.usable}
        for member, device in self.usable.items():
            offset, length = device.region(1)
            for place in range(length // BLOCK):
                block = device.read(offset + place * BLOCK, BLOCK)
                if block is None or block[:8] != b"CALPELOG":
                    continue
                batch = self.decode_header(device, member, place, block)
                if batch is None or batch.epoch < start_epoch:
                    continue
                committed = max(committed, batch.durable_upto)
                if not block[0x3A] & 1:
                    of_member = shown[member]
                    shown[member] = Shown(max(of_member.tail, batch.tail), max(of_member.durable_upto, batch.durable_upto))
                found[batch.hash] = batch
        by_sequence = defaultdict(list)
        for batch in found.values():
            by_sequence[batch.sequence].append(batch)
        sequence = tail = max(of_member.tail for of_member in shown.values())
        while True:
            fitting = [b for b in by_sequence[sequence] if not self.chain or b.previous == self.chain[-1].hash]
            if not fitting:
                break
            self.chain.append(max(fitting, key=lambda batch: batch.epoch))
            sequence += 1
        first, lowest = tail, min(of_member.tail for of_member in shown.values())
        while first > lowest:
            fitting = [b for b in by_sequence[first - 1] if not self.chain or b.hash == self.chain[0].previous]
            if not fitting:
                break
            self.chain.insert(0, max(fitting, key=lambda batch: batch.epoch))
            first -= 1
        rolled_back = [member for member, of_member in shown.items() if of_member.tail < first]
        for member in rolled_back:
            print(f"member {member} was rolled back: the space of batch {shown[member].tail} was used again", file=sys.stderr)
        if self.force and len(self.usable) - len(rolled_back) < self.k:
            # Old blocks among them do not match the newest checksums; without checksums they cannot be told.
            rolled_back = []
        for member in rolled_back:
            del self.usable[member]
        if len(self.usable) < self.k:
            raise Unreadable(f"too few members that were not rolled back: {sorted(self.usable)}")
        if rolled_back:
            return True
        self.tails = {member: of_member.tail for member, of_member in shown.items()}
        self.noted = {member: of_member.durable_upto for member, of_member in shown.items()}
        self.first = first
        if sequence < committed and not self.force:
            raise Unreadable(f"the log ends before batch {sequence}, and the batches below {committed} were durable")
        self.committed = committed - first
        self.check_payloads()
        return False

    def decode_header(self, device, member, place, block):
        header_blocks, payload_blocks = struct.unpack_from("<II", block, 0x40)
        offset, length = device.region(1)
        if not 1 <= header_blocks <= 4096 or place + header_blocks + payload_blocks > length // BLOCK:
            return None
        data = device.read(offset + place * BLOCK, header_blocks * BLOCK)
        if data is None:
            return None
        place_count, record_count, body_bytes = struct.unpack_from("<HII", data, 0x92)
        if 0xA0 + body_bytes > len(data):
            return None
        common = data[0x48 : 0xA0 + body_bytes]
        batch_hash = self.batch_hashes.get(common) or keyed(self.key, b"CALPEBAT" + common)
        if keyed(self.key, data[:8] + bytes(32) + data[0x28:0x48] + batch_hash) != data[8:0x28]:
            return None
        if data[0x28:0x38] != self.record.array or struct.unpack_from("<HHI", data, 0x38)[::2] != (member, place):
            return None
        self.batch_hashes[common] = batch_hash
        sequence, epoch, _, durable_upto, tail = struct.unpack_from("<QQQQQ", data, 0x48)
        places = struct.unpack_from(f"<{place_count}I", data, 0xA0)
        records = decode_records(data[0xA0 + 4 * place_count : 0xA0 + body_bytes], record_count)
        return Batch(sequence, epoch, durable_upto, tail, data[0x70:0x90], places, records, batch_hash, header_blocks)

    def images(self, batch):
        """Every image of a batch in the order of its payload: member, its block of the ring, record, row,
        column, hash.
        """
        ordinals = defaultdict(int)
        for nth, record in enumerate(batch.records):
            if not isinstance(record, InPlace):
                continue
            for at, column in enumerate(record.columns):
                member = self.member_of(record.slot, column)
                for row in range(record.rows):
                    value = record.hashes[at * record.rows + row]
                    if not is_stored(value):
                        continue
                    place = batch.places[member]
                    if place != NOWHERE:
                        yield member, place + batch.header_blocks + ordinals[member], nth, record.row + row, column, value
                    ordinals[member] += 1

    def check_payloads(self):
        """Finds the images that usable members hold."""
        images = ((number, *image) for number, batch in enumerate(self.chain) for image in self.images(batch))
        for part in groups(images, BLOCKS_AT_ONCE):
            blocks = []
            for _, member, place, *_ in part:
                device = self.usable.get(member)
                blocks.append(device and device.read(device.region(1)[0] + place * BLOCK, BLOCK))
            for (number, member, place, record, row, column, value), is_value in zip(part, self.hashes(blocks)):
                if is_value == value:
                    self.good_images[number, record, row, column] = (member, place)

    # "Reading the log", the end.

    def cells_after(self, prefix):
        """What a prefix of the chain makes of slots: whether they hold data, and ("image"|"fresh"|"zero",
        hash, place) of blocks.
        """
        holds, cells = {}, defaultdict(dict)
        for number, batch in enumerate(self.chain[:prefix]):
            for nth, record in enumerate(batch.records):
                if isinstance(record, Discard):
                    holds[record.slot], cells[record.slot] = False, {}
                    continue
                if isinstance(record, Fresh):
                    if record.old_slot != record.slot:
                        holds[record.old_slot], cells[record.old_slot] = False, {}
                    cells[record.slot] = {}
                    for column in range(self.width):
                        for row in range(self.rows):
                            value = record.hashes[column * self.rows + row]
                            kind = "fresh" if is_stored(value) else "zero"
                            cells[record.slot][row, column] = (kind, value, number)
                else:
                    if record.first:
                        cells[record.slot] = {
                            (row, column): ("zero", UNWRITTEN, None) for row in range(self.rows) for column in range(self.width)
                        }
                    for at, column in enumerate(record.columns):
                        for row in range(record.row, record.row + record.rows):
                            value = record.hashes[at * record.rows + row - record.row]
                            kind = "image" if is_stored(value) else "zero"
                            place = self.good_images.get((number, nth, row, column))
                            if kind == "image" and self.is_in_place(record.slot, column, batch):
                                kind, place = "placed", None
                            cells[record.slot][row, column] = (kind, value, place)
                holds[record.slot] = True
        return holds, cells

    def is_in_place(self, slot, column, batch):
        """Whether the batch is below the own tail of the member with a column."""
        return batch.sequence < self.tails.get(self.member_of(slot, column), 0)

    def is_durable(self, slot, column, number):
        """Whether what a batch wrote afresh is known to be durable on the member with a column."""
        noted = self.noted.get(self.member_of(slot, column), 0)
        return number < self.committed and self.first + number < noted

    def missing_after(self, prefix):
        """The blocks that are missing in rows that miss more than m, as (slot, row, column)."""
        holds, cells = self.cells_after(prefix)
        missing = set()
        for slot, named in cells.items():
            if not holds[slot]:
                continue
            for row in {row for row, _ in named}:
                row_cells = [named.get((row, column)) for column in range(self.width)]
                doubtful = any(
                    cell and self.member_of(slot, column) in self.usable and (
                        cell[0] == "image" and cell[2] is None or cell[0] == "fresh" and not self.is_durable(slot, column, cell[2]))
                    for column, cell in enumerate(row_cells)
                )
                if not doubtful:
                    continue
                homes = [self.block_in_place(slot, row, column) for column in range(self.width)]
                hashes = self.hashes(homes)
                lost = []
                for column, cell in enumerate(row_cells):
                    if cell is None:
                        cell = ("untouched", self.page_hash(slot, row, column), None)
                        if cell[1] is not None and not is_stored(cell[1]):
                            cell = ("zero", None, None)
                    kind, value, place = cell
                    unchecked = kind == "untouched" and not self.record.checksum_kind
                    good = (
                        kind == "zero"
                        or kind == "image" and place is not None
                        or homes[column] is not None and (unchecked or hashes[column] == value)
                    )
                    if not good:
                        lost.append((slot, row, column))
                if len(lost) > self.m:
                    missing.update(lost)
        return missing

    def longest_prefix(self):
        least = min(self.committed, len(self.chain))
        missing = {}
        for prefix in range(len(self.chain), least - 1, -1):
            missing[prefix] = self.missing_after(prefix)
            if not missing[prefix]:
                return prefix
        return next(prefix for prefix in missing if missing[prefix] <= missing[least])

    # "Pages".

    def pages_of(self, record):
        """The pages that a record changes."""
        yield record.stripe // ENTRIES
        if not self.record.checksum_kind or isinstance(record, Discard):
            return
        named = isinstance(record, InPlace) and not record.first
        for row in range(record.row, record.row + record.rows) if named else range(self.rows):
            for column in range(self.width):
                yield self.hash_place(record.slot, row, column)[0]

    def hash_place(self, slot, row, column):
        """The page and the entry of a block's hash."""
        number = slot * self.rows + row
        if self.width > ENTRIES:
            return self.map_pages + 2 * number + column // ENTRIES, column % ENTRIES
        per_page = ENTRIES // self.width
        return self.map_pages + number // per_page, number % per_page * self.width + column

    def page(self, index):
        """Entries of the newest version that is there, None when none is, and what is known of it: "known",
        "old" when a newer one is gone, "unknown" when what cannot be read may be newer.
        """
        copies, unread = [], False
        named = index in self.named_pages
        for copy in range(self.m + 1):
            g = index * (self.m + 1) + copy
            device = self.usable.get(g % self.width)
            offset = device and device.region(2)[0] + 8192 * (g // self.width)
            places = [self.decode_page(index, device and device.read(offset + BLOCK * half, BLOCK)) for half in range(2)]
            if "unreadable" in places:
                unread = True
            copies.append(places)
        valid = [place for places in copies for place in places if isinstance(place, tuple)]
        newest = max(valid, default=None)

        def is_witness(places):
            versions = [place for place in places if isinstance(place, tuple)]
            if "unreadable" in places:
                return False
            if named:
                return bool(versions) or "blank" in places
            if "damaged" in places or len(versions) == 1 and versions[0][1] & 1:
                return False
            return max(versions, default=(None,))[0] == (newest and newest[0])

        state = "known" if any(map(is_witness, copies)) else "unknown" if unread else "old"
        if newest is None and self.force and index < self.map_pages:
            newest = max(self.places_left_out(index), default=None)
            state = "old" if newest else state
        if newest is None:
            self.unwritten_pages.add(index)
            return ([UNWRITTEN] * ENTRIES if state == "known" else None), state
        return [newest[2][at : at + 16] for at in range(0x40, BLOCK, 16)], state

    def places_left_out(self, index):
        """The valid places of a page on members that are not current: better than nothing."""
        for copy in range(self.m + 1):
            g = index * (self.m + 1) + copy
            device = self.left_out.get(g % self.width)
            for half in range(2 if device else 0):
                place = self.decode_page(index, device.read(device.region(2)[0] + 8192 * (g // self.width) + BLOCK * half, BLOCK))
                if isinstance(place, tuple):
                    yield place

    def decode_page(self, index, data):
        """((sequence, epoch), flags, bytes) of a valid place, or why it is none."""
        if data is None:
            return "unreadable"
        if data[0x10:0x20] != self.record.array:
            return "blank"
        number, sequence, epoch, flags = struct.unpack_from("<QQQQ", data, 0x20)
        if number != index or keyed(self.key, bytes(16) + data[16:])[:16] != data[:16]:
            return "damaged"
        return (sequence, epoch), flags, data

    def read_map(self):
        """The stripe map of the stripes of the volume: (slot, whether it holds data) each."""
        stripes = -(-self.record.volume_bytes // (self.k * self.record.chunk))
        self.stripes, self.doubtful_map = [], []
        for index in range(-(-stripes // ENTRIES)):
            entries, state = self.page(index)
            if entries is None or not self.force and (state == "unknown" or state == "old" and self.record.clean):
                raise Unreadable(f"page {index} of the stripe map is {'lost' if entries is None else state}")
            if state != "known":
                self.doubtful_map.append(index)
            for entry in entries:
                known, holds = entry[7] & 2, bool(entry[7] & 1)
                self.stripes.append((int.from_bytes(entry[:7], "little"), holds) if known else (len(self.stripes), False))
        self.stripes = self.stripes[:stripes]
        written = sum(index not in self.unwritten_pages for index in range(-(-stripes // ENTRIES)))
        self.map_pages_gone = max(0, self.record.map_pages - written)
        if self.map_pages_gone and not self.force:
            raise Unreadable(
                f"{self.map_pages_gone} of {self.record.map_pages} pages of the stripe map that were written look as if they never were: "
                "stripes would be zeroes that hold data; give more of the members, or --force")

    def page_hash(self, slot, row, column):
        """The hash that the pages give a block; None where there are no checksums, UNKNOWN where nobody
        knows.
        """
        if not self.record.checksum_kind:
            return None
        index, entry = self.hash_place(slot, row, column)
        if index not in self.hash_pages:
            if len(self.hash_pages) > 4096:
                self.hash_pages.clear()
            entries, state = self.page(index)
            if state == "unknown" and not (self.force and entries):
                entries = [UNKNOWN] * ENTRIES
            elif entries is None:
                entries = [LOST] * ENTRIES
            elif state == "old":
                entries = [LOST if value == UNWRITTEN else value for value in entries]
            self.hash_pages[index] = entries
        return self.hash_pages[index][entry]

    # "Recovering data by hand", steps 6 to 8.

    def apply(self, prefix):
        self.prefix = prefix
        _, self.cells = self.cells_after(prefix)
        for batch in self.chain[:prefix]:
            for record in batch.records:
                if record.stripe < len(self.stripes):
                    self.stripes[record.stripe] = (record.slot, not isinstance(record, Discard))

    def hash_of(self, slot, row, column):
        """The hash of a block, None where nothing says what it is."""
        cell = self.cells[slot].get((row, column)) if slot in self.cells else None
        return cell[1] if cell else self.page_hash(slot, row, column)

    def block(self, slot, row, column):
        """The block from the log, or in place; None where it cannot be read."""
        cell = self.cells[slot].get((row, column)) if slot in self.cells else None
        if cell and cell[0] == "image" and cell[2] is not None:
            device = self.usable[cell[2][0]]
            return device.read(device.region(1)[0] + cell[2][1] * BLOCK, BLOCK)
        return self.block_in_place(slot, row, column)

    def good_blocks(self, wanted):
        """The content of blocks, (slot, row, column) each, that are zeroes or have their hash; others are
        left out.
        """
        good, asked, blocks = {}, [], []
        for at in wanted:
            value = self.hash_of(*at)
            if value is not None and not is_stored(value):
                good[at] = bytes(BLOCK)
                continue
            block = self.block(*at)
            if block is not None and value is None:
                good[at] = block
            elif block is not None:
                asked.append((at, value))
                blocks.append(block)
        for (at, value), block, is_value in zip(asked, blocks, self.hashes(blocks)):
            if is_value == value:
                good[at] = block
        return good

    def data_blocks(self, slots):
        """The data blocks of slots, by (slot, row, column); those that are gone are left out."""
        wanted = [(slot, row, column) for slot in slots for row in range(self.rows) for column in range(self.k)]
        good = self.good_blocks(wanted)
        torn = sorted({at[:2] for at in wanted if at not in good})
        good.update(self.good_blocks([row + (column,) for row in torn for column in range(self.k, self.width)]))
        decoded = []
        for row in torn:
            present = {column: good[row + (column,)] for column in range(self.width) if row + (column,) in good}
            if len(present) >= self.k:
                present = dict(list(present.items())[: self.k])
                missing = [column for column in range(self.k) if row + (column,) not in good]
                decoded += [(row + (column,), decode(present, column)) for column in missing]
        for (at, block), is_value in zip(decoded, self.hashes([block for _, block in decoded])):
            if self.hash_of(*at) in (None, is_value):
                good[at] = block
        gone = {at for at in wanted if self.hash_of(*at) == LOST}
        aside = [at for at in wanted if self.hash_of(*at) is not None and self.hash_of(*at)[8:] == SET_ASIDE]
        blocks = [self.block_in_place(*at) for at in aside]
        for at, block, is_value in zip(aside, blocks, self.hashes(blocks)):
            good[at] = block
            if is_value is None or is_value[:8] != self.hash_of(*at)[:8]:
                gone.add(at)
        return {at: good[at] for at in wanted if at in good and at not in gone}


def recover(volume, output):
    """Writes the volume of a lane to the places of its stripes in a file; returns the offsets of the blocks that
    are gone.
    """
    record, gone = volume.record, []
    lane, count, group, _, volume_bytes = record.part
    full = ((stripe, slot) for stripe, (slot, holds) in enumerate(volume.stripes) if holds)
    for part in groups(full, max(1, BLOCKS_AT_ONCE // (volume.k * volume.rows))):
        blocks = volume.data_blocks([slot for _, slot in part])
        for (stripe, slot), column, row in itertools.product(part, range(volume.k), range(volume.rows)):
            whole = (stripe // group * count + lane) * group + stripe % group
            offset = (whole * volume.k + column) * record.chunk + row * BLOCK
            block = blocks.get((slot, row, column))
            if offset < volume_bytes and block is None:
                gone.append(offset)
            elif offset < volume_bytes and block != bytes(BLOCK):
                output.seek(offset)
                output.write(block)
    return gone


def ranges(offsets):
    """Runs of neighbouring blocks, as first and last byte."""
    runs = []
    for offset in offsets:
        if runs and runs[-1][1] + 1 == offset:
            runs[-1][1] = offset + BLOCK - 1
        else:
            runs.append([offset, offset + BLOCK - 1])
    return runs


def open_devices(paths):
    """The devices of each lane."""
    opened = []
    for path in paths:
        try:
            opened.append(lanes_of_device(path))
        except (OSError, Unreadable) as reason:
            print(f"{path}: left out: {reason}", file=sys.stderr)
    if not opened:
        raise Unreadable("no device of an array")
    if len({len(lanes) for lanes in opened}) > 1:
        raise Unreadable("the devices are not of one array")
    if len({lane.superblock.part._replace(lane=0) for lanes in opened for lane in lanes if lane}) > 1:
        raise Unreadable("the devices are cut into lanes in different ways")
    if len({lane.superblock.array for lanes in opened for lane in lanes if lane}) > 1:
        raise Unreadable("the devices are not of one array")
    return [check_devices([device for device in of_lane if device]) for of_lane in zip(*opened)]


def check_devices(devices):
    if not devices:
        raise Unreadable("a lane has no device with a superblock")
    shapes = {(d.superblock.array, d.superblock.data, d.superblock.parity, d.superblock.chunk, d.superblock.slots,
               d.superblock.checksum_kind) for d in devices}
    if len(shapes) > 1:
        raise Unreadable("the devices are not of one array")
    if len({d.superblock.device for d in devices}) < len(devices):
        raise Unreadable("two devices are copies of one: leave one of them out")
    if devices[0].superblock.volume != 1:
        raise Unreadable("not a plain volume")
    return devices


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="+", metavar="DEVICE")
    parser.add_argument("--output", "-o", required=True, metavar="FILE")
    parser.add_argument("--force", action="store_true", help="go on where what is there may be older than what was last written")
    options = parser.parse_args()
    where = ""
    try:
        lanes = open_devices(options.devices)
        volumes = []
        for lane, devices in enumerate(lanes):
            where = f"lane {lane}: " if len(lanes) > 1 else ""
            volumes.append(Array(devices, options.force))
            describe(where, volumes[-1])
    except Unreadable as reason:
        print(f"cannot be recovered: {where}{reason}", file=sys.stderr)
        sys.exit(2)
    volume_bytes, gone = volumes[0].record.part.volume_bytes, []
    with open(options.output, "wb") as output:
        output.truncate(volume_bytes)
        for volume in volumes:
            gone += recover(volume, output)
    for first, last in ranges(sorted(gone)):
        print(f"lost: bytes {first} to {last} of the volume")
    print(f"{volume_bytes} bytes written, {len(gone)} blocks of 4 KiB lost")
    sys.exit(1 if gone else 0)


def describe(where, volume):
    """Tells what was found of an array, or of one of its lanes."""
    record = volume.record
    members = ", ".join(str(member) for member in sorted(volume.usable))
    print(f"{where}array '{record.name}', {volume.k}+{volume.m}, epoch {record.epoch.number}, "
          f"{'clean' if record.clean else 'not clean'}; members used: {members}")
    if not record.clean:
        print(f"{where}log: {volume.prefix} of {len(volume.chain)} batches count, {volume.committed} were noted as durable")
    if volume.map_pages_gone:
        print(f"{where}{volume.map_pages_gone} of {record.map_pages} pages of the stripe map look as if they were never written: "
              "what was in their stripes is zeroes in the file")
    for page in volume.doubtful_map:
        print(f"{where}page {page} of the stripe map may be an old one: stripes {page * ENTRIES} to {page * ENTRIES + ENTRIES - 1} "
              "may be as they were before")


if __name__ == "__main__":
    main()
