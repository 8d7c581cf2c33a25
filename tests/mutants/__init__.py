"""Planted faults: each changes one line of the product in a copy, and a test must notice."""
