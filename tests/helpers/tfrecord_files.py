"""TFRecord files of tiny images, encoded by hand: length, its checksum, message, its checksum."""

import struct

import google_crc32c

from helpers.tiny_images import CLASSES, encoded


def varint(value):
    found = b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(name, number, content):
    return field(1, field(1, name.encode()) + field(2, field(number, content)))


def example(image, label, synset=None, packed=True):
    number = field(1, varint(label)) if packed else varint(1 << 3) + varint(label)
    features = feature("image/height", 3, field(1, varint(10))) + feature("image/encoded", 1, field(1, image))
    features += feature("image/class/label", 3, number)
    if synset:
        features += feature("image/class/synset", 1, field(1, synset.encode() if isinstance(synset, str) else synset))
    return field(1, features)


def masked_crc(data):
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def record(message):
    """Return `message` framed as a record, as https://www.tensorflow.org/tutorials/load_data/tfrecord describes."""
    length = struct.pack("<Q", len(message))
    return length + masked_crc(length) + message + masked_crc(message)


def write_tfrecords(folder, first=1, packed=True, synsets=True):
    folder.mkdir()
    images = {
        "train": [(i % 3, encoded(i, size=(30, 20))) for i in range(7)],
        "val": [(i, encoded(90 + i)) for i in range(3)],
    }
    for split, word in (("train", "train"), ("val", "validation")):
        for shard in range(2):
            data = b""
            for label, image in images[split][shard::2]:
                message = example(image, label + first, CLASSES[label] if synsets else None, packed)
                data += record(message)
            (folder / f"{word}-{shard:05d}-of-00002").write_bytes(data)
    return {split: sorted(found) for split, found in images.items()}
