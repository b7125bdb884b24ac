"""Measured tile sizes, kept in one small file that a person can read, correct and delete."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from ...pascal_attn_core.storage import read_object, write_object

log = logging.getLogger("pascal_attn")
FILE_NAME = "pascal_attn_tile_sizes.json"
_lock = threading.Lock()


class TileStore:
    """``{"<card> | <dtype> | D <head_dim> | ...": {"tile_size": 1024, ...}}`` in a file.

    A file that cannot be read counts as empty; it is renamed to ``<name>.broken`` before a new one is written.
    """

    def __init__(self, path: Path):
        self.path = path

    def get(self, key: str) -> dict[str, Any] | None:
        """What was remembered, None if nothing usable was."""
        entry = self._read().get(key)
        if entry is None:
            return None
        size = entry.get("tile_size") if isinstance(entry, dict) else None
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= 65536:
            log.warning("pascal_attn: %s: %r must hold a tile_size from 0 to 65536, got %r", self.path, key, entry)
            return None
        return entry

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Remember ``entry``; where the file cannot be written, a warning says so."""
        with _lock:
            try:
                known = self._read(set_aside=True)
                write_object(self.path, {**known, key: entry})
            except OSError as error:
                log.warning("pascal_attn: measured tile sizes cannot be kept in %s: %s", self.path, error)

    def _read(self, *, set_aside: bool = False) -> dict[str, Any]:
        try:
            return read_object(self.path)
        except (OSError, ValueError) as error:
            log.warning("pascal_attn: %s cannot be read and counts as empty: %s", self.path, error)
        if set_aside:
            os.replace(self.path, self.path.with_suffix(".broken"))
        return {}
