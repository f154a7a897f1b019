"""The oracle: a prefix cache as plain sets, the random state machine that is played against it, and faults."""
