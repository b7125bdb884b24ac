"""Changes to a host that can be removed, and what they are made of."""
