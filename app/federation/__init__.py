"""Keeping this store equal to its peers."""
