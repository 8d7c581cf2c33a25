"""The Autobase order of a channel: a confirmed prefix that never changes, and a tentative tail."""
