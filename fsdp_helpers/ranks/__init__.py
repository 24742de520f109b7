"""The processes of a run: how they're started, joined in a group, and stopped with nothing left behind."""
