"""Two nodes that diverge and heal, for people to watch.

`frames.ldp` holds real frames of js-waku, nim-sds and the specification's versions, length-delimited.
"""
