"""Tile shapes of the kernels, per architecture and head_dim."""
