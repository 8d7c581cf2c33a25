"""Range set reconciliation, sans-I/O: elements in, messages and events out.

Two nodes hold overlapping sets of elements. The initiator sends summaries (hash, count) of ranges;
the responder answers each range by one table: equal, fetch it, here is my list, here are summaries of
parts. So both find the elements that each side lacks, at a cost proportional to the difference.

Read in this order: `elements` (elements, bounds, ranges), `responder` (the table, and the stateless
side), `initiator` (the side with the work list), `learning` (how it reads an answer), `fetch`. Below
them: `session` (interests, nonces, the key), `hashing`, `view` (one interest under one key), `index`
and `store` (the set itself), `cuts`, `codec` (the wire format), `worklist` (which ranges to ask
about), `events`, `limits`, `errors`, `checkpoint` (the index on disk). `negentropy` is another
protocol. docs/recon-protocol.md specifies the messages.
"""
