"""Range set reconciliation, sans-I/O: elements in, messages and events out.

Start at `RangeIndex`, `Initiator` and `respond`; the wire format is docs/recon-protocol.md.
"""
