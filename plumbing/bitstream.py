"""
plumbing/bitstream.py (tests/slow/test_video.py): what packets of H.264, HEVC and MPEG say to their
decoder, beside pictures: where it can begin, after a cut or in a film of several clips; and where a
container ends.

Writes nothing. Used by video.py.
"""
import contextlib
import os
import re

# H.264's, HEVC's unit with the message that only later frames are whole, as of a stream that renews
# its picture by columns: its type, its length, a number of frames above 0. Messages of two other
# types may precede, each as long as its second byte says; escapes may make them longer.
SEI = b"|".join(rb"[\0\1]\x%02x(?:(?!\0\0[\0\1]).){%d,%d}?" % (n, n, n + 2) for n in range(1, 64))
RECOVERY = re.compile(rb"(?s)(?:\x06|\x4e\x01)(?:%b){0,3}\x06[\x01-\x0f][\0-\x7f]" % SEI)
# Types of units that hold parameter sets, and a few messages: see parameter_sets.
SETS = {"h264": (6, 7, 8), "hevc": (32, 33, 34, 39), "mpeg4": range(32, 48), "mpeg1video": (179,),
        "mpeg2video": (179, 181)}


def packets(container, *streams):
    """-> iterator of the packets of these streams and of the flush at their end. In a file in which
    another stream begins late PyAV then asks for that one's flush, and fails. Of the first stream
    those in front of the first key frame are left out, see is_delta."""
    first, begun = streams[0], False
    with contextlib.suppress(IndexError):
        for packet in container.demux(*streams):
            own = packet.size and packet.stream.index == first.index
            begun = begun or own and not is_delta(first.codec_context, packet)
            if begun or not own:
                yield packet


def is_delta(codec, packet):
    """Whether a packet of VP8, VP9 or AV1 needs earlier ones. A recorder that joins a call late has
    these in front, and their decoders fail there, where others wait for a key frame."""
    head = bytes(packet)[:3].ljust(3, b"\0")
    if codec.name == "libdav1d":  # maybe after a delimiter: the header of a sequence
        return not packet.is_keyframe and head.removeprefix(b"\x12\0")[0] >> 3 & 15 != 1
    if codec.name == "vp9":  # after profile 3 a bit is reserved
        bits = int.from_bytes(head[:2], "big") << (head[0] & 0x30 == 0x30)
        # A bit each: shows an earlier one; inter; is shown; errors; intra, if it is not shown.
        return bits & 0x800 or bits & 0x400 and bits & 0x280 != 0x80
    return codec.name == "vp8" and head[0] & 1


def read_units(codec, packet):
    """-> [(type, bytes)] of the NAL units of H.264 and HEVC, of the start codes of MPEG-1, -2, -4;
    other codecs: []."""
    head, data, units, hevc = codec.extradata or b"", bytes(packet), [], codec.name == "hevc"
    if codec.name not in SETS:
        return []
    if head[:1] == b"\1":  # avcC, hvcC: in front of each unit stands its length
        size, view = head.ljust(22, b"\3")[21 if hevc else 4] % 4 + 1, memoryview(data)
        while view:
            end = size + int.from_bytes(view[:size], "big")
            units.append(bytes(view[size:end]))
            view = view[end:]
    bits = 31 if codec.name == "h264" else 255
    return [(unit[0] >> 1 & 63 if hevc else unit[0] & bits, unit)
            for unit in units or data.split(b"\0\0\1")[1:] if unit]


def needs_more(codec, units):
    """Whether a key frame is not whole: only later ones are, or it is none: a joined clip of MPEG-4
    may flag all. 00, two bits: intra."""
    first = next((unit for kind, unit in units if kind == 182 and codec.name == "mpeg4"), b"")
    return any(RECOVERY.match(unit) for _, unit in units) or first[1:2] >= b"\x40"


def is_repeat(codec, units):
    """Whether an MPEG-4 packet says that nothing has changed: a decoder makes no frame of it. Its
    picture is so short that not even a bit for each macroblock, 16 x 16 pixels, would fit."""
    return codec.name == "mpeg4" and codec.width * codec.height > 6000 and any(
        kind == 182 and len(unit.rstrip(b"\0")) < 7 for kind, unit in units)


def is_b_frame(codec, units):
    """Whether the type of the picture (of its first slice) is B: most of these are shown before
    one that came before them."""
    kinds = {"h264": (1, 5), "hevc": range(32), "mpeg4": (182,)}.get(codec.name, (0,))
    kind, unit = next((unit for unit in units if unit[0] in kinds), (99, b""))
    _, one, two = unit[:3].ljust(3, b"\0")
    bits = f"{int.from_bytes(unit[2:6].ljust(4), 'big'):032b}"[1:]  # HEVC: the PPS, the type
    return {"h264": kind == 1 and (one >> 4 == 10 or one >> 2 == 39), "mpeg4": one >> 6 == 2,
            "hevc": kind < 16 and bits[2 * bits.find("1") + 1 :][:1] == "1",
            }.get(codec.name, two >> 3 & 7 == 3)


def parameter_sets(codec, packet, units):
    """-> {kind of parameter set that the packet brings: whether the file's header lacks its bytes}.

    A decoder applies the ones that came last: NAL units of H.264 and HEVC, headers of sequences of
    MPEG-1, -2 and -4, a second header (FLV, mp4). A kind is the type and the first number: as many
    bits after a 1 as before. PPS have one. Two messages count: how HEVC's picture is turned (39),
    and that x264 before build 151 wrote 4:4:4 or RGB, which is decoded in another way (6). Of
    JPEG, whose tables (DB, C4) may stand in the first picture alone, the number of each counts.
    """
    if codec.name == "mjpeg":
        data, at, kinds = bytes(packet), 2, []
        while data[at + 1 : at + 2] not in (b"\xda", b""):  # segments in front of the scan
            kinds.append(data[at + 1])
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        return {(kind, n): True for kind in (0xDB, 0xC4) for n in range(kinds.count(kind))}
    sets = {"header": True} if packet.has_sidedata("new_extradata") else {}
    types, head, hevc = SETS.get(codec.name, ()), codec.extradata or b"", codec.name == "hevc"
    # x264's message counts if header or packet holds a set of the profile f4, which 4:4:4 has.
    if 6 in types and b"\x67\xf4" not in head + b" ".join(unit[:2] for _, unit in units):
        types = 7, 8
    for kind, unit in units:
        if kind in types and (kind not in (6, 39) or re.search(
                rb"(?s)^\x4e.\x2f|x264 - core (?:\d\d|1[0-4]\d|150)\b", unit)):
            bits = f"{int.from_bytes(unit[1 + hevc : 5 + hevc], 'big'):032b}"
            kind = kind, bits[: 2 * bits.find("1") + 1]
            sets[kind] = sets.get(kind, False) or unit.rstrip(b"\0") not in head
    return sets


def container_end(file):
    """Open file -> (part of the container, byte at which the header says that it ends, bytes)."""
    head, size = file.read(64), os.fstat(file.fileno()).st_size  # lengths of AVI and Matroska
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        # All ones: written to a pipe. 0: never finished.
        return "RIFF", 8 + int.from_bytes(head[4:8], "little") % 0xFFFFFFFF, size
    at = head.find(b"\x18\x53\x80\x67") + 4  # Matroska: a Segment's length follows this mark
    if head[:4] == b"\x1aE\xdf\xa3" and 4 <= at <= len(head) - 8 and head[at]:
        used = 9 - head[at].bit_length()  # bytes of the number: the zero bits in front, plus one
        unknown = (1 << 7 * used) - 1  # all ones mean: streamed, length unknown
        length = int.from_bytes(head[at : at + used], "big") & unknown
        return "Segment", at + used + length % unknown, size
    boxes = b"ftyp moov mdat moof free skip wide uuid styp sidx mfra udta".split()  # of mp4
    # MPEG-TS and others state no length. A truncated file is just a shorter video.
    part, end, at = "", 0, 0  # at: first byte of a box
    while at < size:
        file.seek(at)
        length, kind = int.from_bytes(file.read(4), "big"), file.read(4)  # with this header
        length = int.from_bytes(file.read(8), "big") if length == 1 else length  # the true size
        if kind not in boxes or length < 8:  # another format; 0: "to the end of the file"
            break
        at += length
        if kind in (b"moov", b"mdat", b"moof"):  # padding may be cut without harm
            part, end = kind.decode(), at
    return part, end, size
