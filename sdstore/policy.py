"""What a policy is written with (docs/security.md, "A policy of your own"). Needs the extra `server`."""

from sdstore.errors import extra

with extra("server"):
    from app.ingest.policy import ACCEPT, Candidate, Policy, Verdict, Way, quarantine, refuse

__all__ = ["ACCEPT", "Candidate", "Policy", "Verdict", "Way", "quarantine", "refuse"]
