"""
plumbing/bitstream.py (tests/slow/test_video.py): what packets of H.264, HEVC and MPEG say to their
decoder, beside pictures: where it can begin, after a cut or in a film of several clips.

Reads and writes nothing. Used by video.py.
"""
import re

# H.264's, HEVC's message that only later frames are whole, as of a stream that renews its picture
# by columns: its type, its length, a number of frames above 0. Messages of two other types may
# precede in its unit, each as long as its second byte says; escapes may make them longer.
SEI = b"|".join(rb"[\0\1]\x%02x(?:(?!\0\0[\0\1]).){%d,%d}?" % (n, n, n + 2) for n in range(1, 64))
RECOVERY = rb"(?s)\0\0(?:\x01|..)(?:\x06|\x4e\x01)(?:%b){0,3}\x06[\x01-\x0f][\0-\x7f]" % SEI


def recovers_later(codec, packet):
    """Whether a key frame is whole only some frames later."""
    return codec.name in ("h264", "hevc") and re.search(RECOVERY, bytes(packet)) is not None


def parameter_sets(codec, packet):
    """Packet -> {kind of parameter set that it brings: whether the file's header lacks its bytes}.

    A decoder applies the ones that came last: NAL units of H.264 and HEVC, headers of sequences of
    MPEG-1, -2 and -4, a second header (FLV, mp4). A kind is the type and the first number: as many
    bits after a 1 as before. PPS have one. Two messages count: how HEVC's picture is turned (39),
    and that x264 before build 151 wrote 4:4:4 or RGB, which is decoded in another way (6).
    """
    sets = {"header": True} if packet.has_sidedata("new_extradata") else {}
    types = {"h264": (6, 7, 8), "hevc": (32, 33, 34, 39), "mpeg4": range(32, 48),
             "mpeg1video": (179,), "mpeg2video": (179, 181)}.get(codec.name)
    if types is None:
        return sets
    head, data, units, hevc = codec.extradata or b"", bytes(packet), [], codec.name == "hevc"
    if head[:1] == b"\1":  # avcC, hvcC: in front of each unit stands its length
        size, view = head.ljust(22, b"\3")[21 if hevc else 4] % 4 + 1, memoryview(data)
        while view:
            end = size + int.from_bytes(view[:size], "big")
            units.append(bytes(view[size:end]))
            view = view[end:]
    units = units or data.split(b"\0\0\1")
    # x264's message counts if header or packet holds a set of the profile f4, which 4:4:4 has.
    if types[0] == 6 and b"\x67\xf4" not in head + b" ".join(unit[:2] for unit in units):
        types = 7, 8
    for unit in units:
        kind = unit and (unit[0] >> 1 & 63 if hevc else unit[0] & (31 if 7 in types else 255))
        if kind in types and (kind not in (6, 39) or re.search(
                rb"(?s)^\x4e.\x2f|x264 - core (?:\d\d|1[0-4]\d|150)\b", unit)):
            bits = f"{int.from_bytes(unit[1 + hevc : 5 + hevc], 'big'):032b}"
            kind = kind, bits[: 2 * bits.find("1") + 1]
            sets[kind] = sets.get(kind, False) or unit.rstrip(b"\0") not in head
    return sets
