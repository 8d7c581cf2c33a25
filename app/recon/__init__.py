"""The responding side of reconciliation: answers to sessions, negentropy, the index they read."""
