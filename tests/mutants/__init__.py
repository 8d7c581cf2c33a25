"""Planted faults: each replaces one behaviour of the product, and a test must notice."""
