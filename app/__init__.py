"""The store node: settings, ingest door, SQL store, HTTP API, federation, command line."""
