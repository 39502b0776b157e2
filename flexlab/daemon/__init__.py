"""The daemon: one process per user and machine that owns everything with state."""
