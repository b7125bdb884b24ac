"""The kernels as text and as machine code, and the layout of their parameters."""
