"""Snapshots of a store on Spark: export, verify, restore, compare, report."""
