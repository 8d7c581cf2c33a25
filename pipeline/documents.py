"""The README and .proto files of a snapshot, which make its tables readable without this software."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

import sdstore.wire
from pipeline.columns import CHANNELS, CLAIMS, ENTRIES
from pipeline.layout import PROTO_FILES, README_FILE
from pipeline.manifest import FileRecord
from pipeline.publish import write_file

_README = """# A snapshot of SDS messages

Everything in this folder can be read with any Parquet reader. `manifest.json` lists every file with
its length and its BLAKE3, and proves the rows by their roots.

- `entries/day=YYYY-MM-DD/FIRST-LAST.parquet`: the messages that arrived on that UTC day, in ranges of
  the exporting store's arrival order. Inside a file rows are sorted by channel, Lamport timestamp,
  message ID (as UTF-8 bytes) and digest, so the row groups of one channel are adjacent.
- `claims/FIRST-LAST.parquet`: claims that a retrieval hint leads to an entry. Hints in the causal
  history of a message are not repeated here.
- `channels.parquet`: one row per channel.
- `proto/`: the schemas of the frames. `sds.proto` is the latest dialect; `sds_raw.proto` has the
  numbering of the others. The column `dialect` says which one a frame is written in.
- `manifest.json`: `entry_ranges` and `claim_ranges` name the files, with (count, root) of each.

## Proofs

A root is BLAKE3 over the sorted 32-byte elements of a set, concatenated without separators: the
digests of entries, the claim IDs of claims. The same set has the same root wherever it is computed; a
store returns the root of a channel at `GET /v1/channels/CHANNEL`.
`manifest_digest`, the last member of the manifest, is BLAKE3 of the file's bytes before the
comma in front of it.

A row's `digest` is BLAKE3 in derive-key mode (context "sdstore entry digest v1") of what the author
wrote: message ID, channel ID and sender ID, each as UTF-8 after its length; the byte 1 and the Lamport
timestamp as a signed 64-bit integer; the number of history entries and for each its message ID,
retrieval hint and sender ID; the content. Lengths and numbers are 32 bits; all integers are
big-endian. `claim_id` is BLAKE3 in derive-key mode (context "sdstore hint claim v1") of digest and
hint. `frame_hash` is BLAKE3 of the frame.
"""


def write_documents(folder: Path) -> tuple[FileRecord, ...]:
    """Write README.md and proto/ into `folder`."""
    protos = _proto_folder()
    texts = {README_FILE: readme().encode()}
    texts |= {path: (protos / Path(path).name).read_bytes() for path in PROTO_FILES}
    return tuple(write_file(folder, path, text) for path, text in texts.items())


def readme() -> str:
    """The README of a snapshot, with the columns of every table."""
    tables = (("entries", ENTRIES), ("claims", CLAIMS), ("channels", CHANNELS))
    return _README + "".join(_described(name, schema) for name, schema in tables)


def _described(name: str, schema: pa.Schema) -> str:
    lines = [f"\n## Columns of `{name}`\n", "| column | type | meaning |", "|---|---|---|"]
    for field in schema:
        meaning = field.metadata[b"description"].decode()
        lines.append(f"| `{field.name}` | {_type_name(field.type)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _type_name(type_: pa.DataType) -> str:
    if pa.types.is_list(type_):
        members = ", ".join(f"{each.name} {each.type}" for each in type_.value_type)
        return f"list of ({members})"
    return str(type_)


def _proto_folder() -> Path:
    """`proto/` beside the checkout, or inside the installed package."""
    [package] = sdstore.wire.__path__
    installed = Path(package) / "proto"
    return installed if installed.is_dir() else Path(package).parents[1] / "proto"
