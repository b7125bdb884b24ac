"""Masks and scores that are functions, not tensors: evaluated tile by tile, so that no L*S tensor exists."""
