"""Images with wrong headers, decompression bombs, and other formats disguised as images."""

from __future__ import annotations

import functools
import random
import re
import struct
import zlib

SIDES = (0, 1, 7, 300, 4_000, 11_000, 11_586, 16_384, 60_000, 65_500, 65_535)
LARGE = (*SIDES, 1 << 20, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
BOMB_BYTES = 300 << 20
_JPEG_SOF = re.compile(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]\0.\x08", re.DOTALL)
_EXIF = b"Exif\0\0MM\0*\0\0\0\x08"


@functools.cache
def zeros(length: int = BOMB_BYTES) -> bytes:
    """Return `length` zeros, compressed with zlib to about a thousandth of their size."""
    packer, block = zlib.compressobj(9), bytes(1 << 20)
    return b"".join(packer.compress(block) for _ in range(length >> 20)) + packer.flush()


@functools.cache
def gzip_zeros() -> bytes:
    """Return BOMB_BYTES zeros as one member of a gzip file; more members may follow."""
    crc = 0
    for _ in range(BOMB_BYTES >> 20):
        crc = zlib.crc32(bytes(1 << 20), crc)
    return b"\x1f\x8b\x08\0\0\0\0\0\2\xff" + zeros()[2:-4] + struct.pack("<II", crc, BOMB_BYTES)


def attack(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Change the headers of an image; return the bytes and a description."""
    kinds = {b"\xff\xd8": _jpeg, b"\x89P": _png, b"GI": _gif, b"BM": _bmp, b"II": _tiff, b"MM": _tiff, b"RI": _webp}
    return kinds.get(data[:2], disguised)(draw, data)


def _put(data: bytes, place: int, packed: bytes) -> bytes:
    return data[:place] + packed + data[place + len(packed) :]


def _jpeg(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    frame = _JPEG_SOF.search(data)
    kind = draw.choice(("size", "size", "size", "scans", "exif", "exif", "sampling", "segment", "thumbnails"))
    if kind == "size" and frame:
        return _put(data, frame.start() + 5, struct.pack(">HH", draw.choice(SIDES), draw.choice(SIDES))), "its size"
    if kind == "scans" and frame:
        scan, times = data.rfind(b"\xff\xda"), draw.choice((2, 50, 2_000))
        if draw.random() < 0.7:
            data = _put(data, frame.start() + 5, struct.pack(">HH", *draw.choices(SIDES[3:], k=2)))
        return data[:scan] + data[scan:-2] * times + data[-2:], f"its last scan {times} times"
    if kind == "exif":
        value = draw.choice((0, 2, 3, 6, 8, 9, 0xFFFF))
        entry = struct.pack(
            ">HHHIHH", 1, 0x0112, draw.choice((3, 3, 4, 2, 13)), draw.choice((1, 1, 0, 2**31)), value, 0
        )
        exif = _EXIF + draw.choice((entry, entry[:7], entry + struct.pack(">I", 8), entry * 100))
        segment = b"\xff\xe1" + struct.pack(">H", draw.choice((len(exif) + 2, 0, 2, 0xFFFF))) + exif
        return data[:2] + segment + data[2:], "Exif"
    if kind == "sampling" and frame:
        place = frame.start() + 11 + 3 * draw.randrange(data[frame.start() + 9] or 1)
        return _put(data, place, bytes([draw.choice((0, 0x11, 0x14, 0x41, 0x44, 0xFF))])), "its sampling"
    if kind == "thumbnails":
        return data[:2] + (b"\xff\xe2" + struct.pack(">H", 65_535) + bytes(65_533)) * 16 + data[2:], "a MiB of segments"
    marker = draw.choice((0xC4, 0xDB, 0xDD, 0xDA, 0xE2, 0xEE, 0xFE, 0xC2, 0xC9))
    segment = bytes([0xFF, marker]) + struct.pack(">H", draw.choice((0, 1, 2, 3, 40, 0xFFFF))) + draw.randbytes(40)
    return data[:2] + segment + data[2:], f"a segment {marker:#x}"


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """Return a PNG chunk with its length and checksum."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _png(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    header, rest = data[16:29], data[33:]
    kind = draw.choice(("size", "size", "form", "bomb", "text bomb", "text bomb", "animation", "exif", "chunk"))
    if kind == "size":
        header = struct.pack(">II", draw.choice(LARGE), draw.choice(LARGE)) + header[8:]
    elif kind == "form":
        values = draw.choice((0, 1, 2, 4, 8, 16, 255)), draw.choice((0, 2, 3, 4, 6, 7)), 0, 0, draw.choice((0, 1, 2))
        header = header[:8] + bytes(values)
    elif kind == "bomb":
        header = struct.pack(">II", draw.choice(SIDES), draw.choice(SIDES)) + header[8:]
        rest = png_chunk(b"IDAT", zeros()) + png_chunk(b"IEND", b"")
    elif kind == "text bomb":
        name, begin = draw.choice(((b"zTXt", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0"), (b"iCCP", b"a\0\0")))
        rest = png_chunk(name, begin + zeros(draw.choice((1 << 20, BOMB_BYTES)))) * draw.choice((1, 3)) + rest
    elif kind == "animation":
        frame = struct.pack(">IIIIIHHBB", 0, *draw.choices(LARGE, k=2), *draw.choices(LARGE, k=2), 1, 1, 0, 0)
        rest = png_chunk(b"acTL", struct.pack(">II", draw.choice(LARGE), 0)) + png_chunk(b"fcTL", frame) + rest
    elif kind == "exif":
        rest = png_chunk(b"eXIf", _EXIF[6:] + draw.randbytes(30)) + rest
    else:
        name = draw.choice((b"PLTE", b"tRNS", b"sRGB", b"gAMA", b"pHYs", b"IHDR", b"fdAT", b"IDAT", b"IEND", b"CgBI"))
        rest = png_chunk(name, draw.randbytes(draw.choice((0, 1, 4, 767, 5_000)))) * draw.choice((1, 1, 3_000)) + rest
    return data[:8] + png_chunk(b"IHDR", header) + rest, f"PNG {kind}"


def _gif(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    sizes = struct.pack("<HH", draw.choice(SIDES), draw.choice(SIDES))
    frame = data.find(b",")
    kind = draw.choice(("screen", "frame", "frames", "code size", "comment"))
    if kind == "screen":
        return _put(data, 6, sizes), "its screen"
    if kind == "frame" and frame > 0:
        return _put(_put(data, frame + 5, sizes), 6, sizes), "a frame"
    if kind == "frames" and frame > 0:
        return data[:frame] + data[frame:-1] * draw.choice((2, 3_000)) + b";", "its frames again"
    if kind == "code size" and frame > 0:
        return _put(data, frame + 10, bytes([draw.randrange(256)])), "its code size"
    return data[:13] + b"!\xfe" + b"\xff" + b"x" * 255 + data[13:], "a comment without end"


def _bmp(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    fields = {"offset": 10, "header": 14, "width": 18, "height": 22, "depth": 28, "compression": 30, "colours": 46}
    name = draw.choice((*fields, "width", "height"))
    value = draw.choice((*LARGE, 2, 3, 4, 8, 12, 40, 64, 108, 124))
    return _put(data, fields[name], struct.pack("<I", value)), f"BMP {name} {value}"


def _tiff(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    end = "<" if data[:2] == b"II" else ">"
    if draw.random() < 0.05:
        return data[:2] + struct.pack(end + "HHHQ", 43, 8, 0, 16) + data[4:], "BigTIFF"
    directory = struct.unpack_from(end + "I", data, 4)[0]
    if directory + 2 > len(data):
        return disguised(draw, data)
    entries = struct.unpack_from(end + "H", data, directory)[0]
    place = directory + 2 + 12 * draw.randrange(max(1, entries))
    kind = draw.choice(("value", "value", "count", "type", "tag", "loop", "entries"))
    match kind:
        case "value":
            data = _put(
                data, place + 8, struct.pack(end + "I", draw.choice((*LARGE, 2, 5, 6, 8, 32_773, 34_712, 50_000)))
            )
        case "count":
            data = _put(data, place + 4, struct.pack(end + "I", draw.choice(LARGE)))
        case "type":
            data = _put(data, place + 2, struct.pack(end + "H", draw.randrange(20)))
        case "tag":
            tags = 256, 257, 258, 259, 262, 273, 277, 278, 279, 317, 320, 322, 323, 324, 338, 339, 347, 34_665, 34_675
            data = _put(data, place, struct.pack(end + "H", draw.choice(tags)))
        case "loop":
            data = _put(data, directory + 2 + 12 * entries, struct.pack(end + "I", directory))
        case _:
            data = _put(data, directory, struct.pack(end + "H", draw.choice((0, 1, 200, 0xFFFF))))
    return data, f"TIFF {kind}"


def _webp(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    kind = draw.choice(("canvas", "chunk", "sizes", "lossless"))
    if kind == "canvas":
        side = [struct.pack("<I", draw.choice(LARGE) & 0xFFFFFF)[:3] for _ in range(2)]
        canvas = b"VP8X" + struct.pack("<IB3x", 10, draw.choice((0, 2, 0x10, 0x3E))) + side[0] + side[1]
        body = b"WEBP" + canvas + data[12:]
        return b"RIFF" + struct.pack("<I", len(body)) + body, "a canvas"
    if kind == "lossless" and data[12:16] == b"VP8L":
        return _put(data, 21, struct.pack("<I", draw.getrandbits(32))), "its lossless header"
    if kind == "sizes":
        return _put(data, draw.choice((4, 16)), struct.pack("<I", draw.choice(LARGE))), "a length"
    chunk = draw.choice((b"ANIM", b"ANMF", b"EXIF", b"ICCP", b"ALPH", b"VP8 "))
    content = draw.randbytes(draw.choice((0, 6, 16, 300)))
    return data[:12] + chunk + struct.pack("<I", draw.choice((len(content), 0xFFFFFFFE))) + content + data[
        12:
    ], "a chunk"


_EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(%pipe%touch /tmp/x) (w) file\nshowpage\n"
DISGUISES: dict[str, bytes] = {
    "EPS": _EPS,
    "EPS in DOS": b"\xc5\xd0\xd3\xc6" + struct.pack("<IIIIIIH", 30, len(_EPS), 0, 0, 0, 0, 0xFFFF) + _EPS,
    "PS": b"%!PS-Adobe-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
    "PDF": b"%PDF-1.4\n1 0 obj<</Type/Catalog/OpenAction<</S/Launch/F(sh)>>>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF",
    "ICO": b"\0\0\1\0\1\0\0\0\0\0\1\0\x20\0\x28\x01\0\0\x16\0\0\0" + bytes(300),
    "CUR": b"\0\0\2\0\1\0\x10\x10\0\0\1\0\1\0\x28\x01\0\0\x16\0\0\0" + bytes(300),
    "PSD": b"8BPS\0\1\0\0\0\0\0\0\0\3\0\0\xff\xff\0\0\xff\xff\0\x08\0\3" + bytes(60),
    "FPX": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504),
    "PPM": b"P6 60000 60000 255\n" + bytes(100),
    "plain PPM": b"P3 4 4 255\n" + b"9" * 100_000,
    "PFM": b"Pf 30000 30000 -1.0\n" + bytes(100),
    "PCX": b"\n\5\1\x08\0\0\0\0\xff\xff\xff\xff" + bytes(53) + b"\3\xff\xff" + bytes(100),
    "ICNS": b"icns\0\0\0\x20ic09\0\0\0\x18" + bytes(16),
    "JPEG 2000": b"\xff\x4f\xff\x51\0\x29\0\0\0\0\xff\xff\0\0\xff\xff" + bytes(60),
    "AVIF": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + bytes(60),
    "DDS": b"DDS |\0\0\0\7\x10\0\0\xff\xff\0\0\xff\xff\0\0" + bytes(108),
    "FITS": b"SIMPLE  =                    T".ljust(80) + b"END".ljust(80),
    "FLI": b"\0\1\0\0\x12\xaf\xff\xff\xff\xff\xff\xff\x08\0\0\0" + bytes(120),
    "WMF": b"\xd7\xcd\xc6\x9a\0\0" + bytes(40),
    "EMF": b"\1\0\0\0" + bytes(36) + b" EMF" + bytes(60),
    "SGI": b"\1\xda\1\1\0\3\xff\xff\xff\xff\0\3" + bytes(500),
    "TGA": b"\0\0\x0a\0\0\0\0\0\0\0\0\0\xff\xff\xff\xff\x20\0" + b"\xff" * 100,
    "XBM": b"#define a_width 60000\n#define a_height 60000\nstatic char a_bits[] = {\n0x00};\n",
    "XPM": b'/* XPM */\nstatic char *a[] = {\n"60000 60000 1 1",\n"a c #000",\n"a"};\n',
    "QOI": b"qoif\0\0\xff\xff\0\0\xff\xff\4\0" + b"\xfd" * 100,
    "IM": b"Image type: RGB image\r\nFile size (no of images): 1\r\nImage size (x*y): 60000*60000\r\n".ljust(511)
    + b"\x1a",
    "SPIDER": struct.pack(">27f", 1, 9, *[1.0] * 25) + bytes(1000),
    "MPEG": b"\0\0\1\xb3\xff\xff\xff" + bytes(50),
    "BLP": b"BLP2\1\0\0\0\1\x08\0\0\xff\xff\0\0\xff\xff\0\0" + bytes(1200),
    "GD": b"\xff\xfe\xff\xff\xff\xff\1" + bytes(1100),
    "GBR": b"\0\0\0\x1c\0\0\0\2\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\4GIMP" + bytes(50),
    "MSP": b"DanM\xff\x7f\xff\x7f" + bytes(24),
    "Sun": b"\x59\xa6\x6a\x95\0\0\xff\xff\0\0\xff\xff\0\0\0\x18" + bytes(100),
    "FTEX": b"FTC\0\0\0\0\0\1\0\0\0" + bytes(60),
    "MIC": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\xff" * 1000,
    "IPTC": b"\x1c\x03\x3c\0\2\0\0\x1c\x03\x14\0\4\xff\xff\xff\xff\x1c\x08\x0a\x7f\xff",
    "SVG": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><svg>&b;</svg>',
    "HTML": b"<html><script>1</script></html>",
    "nothing": b"",
}


def disguised(draw: random.Random, data: bytes = b"") -> tuple[bytes, str]:
    """Return a file of another format, in some cases behind the first bytes of an image, and a description."""
    name = draw.choice(sorted(DISGUISES))
    content, begin = DISGUISES[name], draw.choice((0, 0, 0, 2, 8, 12))
    return data[:begin] + content, f"{name} behind {min(begin, len(data))} bytes of an image"
