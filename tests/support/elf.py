"""ELF files, as far as machine code for GPUs lies in them."""

import struct
from typing import NamedTuple

HEAD = struct.Struct("<4s12xHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
NO_BITS = 8  # the kind of a section that is not in the file


class Section(NamedTuple):
    """A section: where it is in memory and in the file, how large it is there, and what its header says of it."""

    name: str
    address: int
    at: int
    size: int
    info: int
    content: bytes


def sections(code: bytes) -> list[Section]:
    """The sections in their order, by which symbols name them."""
    table, size, count, names = struct.unpack_from("<Q", code, 40) + struct.unpack_from("<HHH", code, 58)
    headers = [SECTION.unpack_from(code, table + i * size) for i in range(count)]
    texts, found = headers[names][4], []
    for name, kind, _, address, at, length, _, info, *_ in headers:
        content = b"" if kind == NO_BITS else code[at : at + length]
        word = code[texts + name : code.index(b"\0", texts + name)].decode()
        found.append(Section(word, address, at, length, info, content))
    return found


def attributes(content: bytes) -> dict[int, bytes]:
    """The attributes of NVIDIA's section .nv.info: format, number, and two bytes, which with format 4 are the length of
    what follows."""
    found, at = {}, 0
    while at < len(content):
        form, number, size = struct.unpack_from("<BBH", content, at)
        if form == 4:
            found[number] = content[at + 4 : at + 4 + size]
        at += 4 + size * (form == 4)
    return found
