"""The type of sockets that take anything."""

from __future__ import annotations


class AnyType(str):
    """The type ``*``: it differs from no other, where a host compares the names of types."""

    def __ne__(self, other: object) -> bool:
        return False


ANY = AnyType("*")
