"""The day-one kit: what can be checked of an artifact of the real checkpoint, in one report."""
