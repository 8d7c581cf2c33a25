"""sdstore: SDS messages, participants and store clients as a library."""
