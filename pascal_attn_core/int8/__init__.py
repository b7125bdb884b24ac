"""Linear layers in 8-bit integers: not exact, for those who ask for it by name."""
