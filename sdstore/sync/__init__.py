"""The driver of a reconciliation session: start at `sdstore.sync.session`."""
