"""Several ways to compute the same, timed against each other on a device."""
