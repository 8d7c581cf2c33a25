"""A policy with bad words, for nodes of tests."""

from app.ingest.policy import ACCEPT, Candidate, Verdict, quarantine, refuse


class Words:
    """Refuses what begins with "bad", and holds what begins with "odd"."""

    revision = "1"

    def __call__(self, candidate: Candidate) -> Verdict:
        content = candidate.message.content or b""
        if content.startswith(b"bad"):
            return refuse("bad_word")
        return quarantine("odd") if content.startswith(b"odd") else ACCEPT
