"""The store node: settings, ingest, SQL store, HTTP API, federation, command line."""
