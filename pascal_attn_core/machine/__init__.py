"""The machine that a process runs on: its devices, its files, its threads."""
