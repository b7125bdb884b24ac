"""Everything that is to be run on every card, as one command: see ``__main__``. What touches the card runs in processes
of its own: whatever a kernel does to them, the command goes on."""
