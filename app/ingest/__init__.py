"""The one door: every message enters here, whichever way it came."""
