"""SDS messages: the model, the wire dialects, identity. Sans-I/O: no clock, no network, no disk."""
