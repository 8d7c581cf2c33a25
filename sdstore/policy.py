"""What a policy is written with (docs/security.md, "A policy of your own"). Needs the extra `server`."""

from sdstore.errors import extra

with extra("server"):
    from app.access.callers import Binding
    from app.ingest.policy import ACCEPT, Candidate, Policy, Verdict, Way, quarantine, refuse

__all__ = ["ACCEPT", "Binding", "Candidate", "Policy", "Verdict", "Way", "quarantine", "refuse"]
