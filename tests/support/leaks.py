"""No log of a test run has an access token: a pytest plugin that searches what is logged.

It reads each record of this process, from the level "debug" for our own loggers and "info" for `httpx`,
which logs the URL of each request, and what the processes that tests start write to stderr, a file or a
pipe. A token is recognised by its form, and the secrets that this process made also without the rest of it.
The test in which one appears fails. Where several processes share the tests, each has this plugin, and the
one that shows the results hears from the others what they find after their last test.
"""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TOKEN = re.compile(r"sds_[0-9a-f]{12}_[0-9a-f]{64}|[0-9a-f]{64}")
OURS = ("app", "sdstore", "recon", "pipeline")
_REQUESTS = logging.getLogger("httpx")
_TOLD = "leaks"


class Leaks(logging.Handler):
    """The tokens that this session made, and where one of them was logged."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self.secrets: set[str] = set()
        self.found: list[str] = []
        self._noted: set[tuple[str, str]] = set()
        self._files: dict[Path, int] = {}
        self._patch = pytest.MonkeyPatch()

    def search(self, text: str, where: str) -> None:
        """Note where a text has a token or the secret of one. The note does not repeat it."""
        for match in TOKEN.finditer(text):
            is_token = match[0].startswith("sds_") or match[0] in self.secrets
            if is_token and (match[0], where) not in self._noted:
                self._noted.add((match[0], where))
                shown = TOKEN.sub("***", text[max(0, match.start() - 200) : match.end()])
                self.found.append(f"an access token in {where}: {shown}")

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.search(self.format(record), f"a log record of {record.name}")

    def search_files(self) -> None:
        """Read what processes have written to their log files since the last call."""
        for path, read_bytes in list(self._files.items()):
            try:
                with path.open("rb") as file:
                    file.seek(read_bytes)
                    lines = file.read()
            except OSError:
                self._files.pop(path, None)
                continue
            # The rest of a line comes later.
            self._files[path] = read_bytes + lines.rfind(b"\n") + 1
            self.search(lines.decode(errors="replace"), path.name)

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        """Watch from here on. The product is imported already."""
        from app.access.tokens import TokenFile  # noqa: PLC0415

        logging.getLogger().addHandler(self)
        for name in OURS:
            logging.getLogger(name).setLevel(logging.DEBUG)
        # It logs the URL of each request. Only this handler gets these records, not the logs of tests.
        self._patch.setattr(_REQUESTS, "propagate", False)
        _REQUESTS.setLevel(logging.INFO)
        _REQUESTS.addHandler(self)
        popen: Any = subprocess.Popen
        create, start, communicate, wait = (
            TokenFile.create,
            popen.__init__,
            popen.communicate,
            popen.wait,
        )

        def creating(file: TokenFile, **options: Any) -> Any:
            token, text = create(file, **options)
            self.secrets.add(text.rpartition("_")[2])
            return token, text

        def starting(process: Any, *arguments: Any, **options: Any) -> None:
            name = getattr(options.get("stderr"), "name", None)
            if isinstance(name, str | Path):
                self._files.setdefault(Path(name).absolute(), 0)
            start(process, *arguments, **options)

        def communicating(process: Any, *arguments: Any, **options: Any) -> Any:
            out, err = communicate(process, *arguments, **options)
            if err:
                text = err if isinstance(err, str) else err.decode(errors="replace")
                self.search(text, "stderr of a process")
            return out, err

        def waiting(process: Any, *arguments: Any, **options: Any) -> Any:
            code = wait(process, *arguments, **options)
            self.search_files()  # before the test deletes them
            return code

        self._patch.setattr(TokenFile, "create", creating)
        self._patch.setattr(popen, "__init__", starting)
        self._patch.setattr(popen, "communicate", communicating)
        self._patch.setattr(popen, "wait", waiting)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail the test in which a token was logged."""
        report = yield
        for name, text in report.sections:
            if name.endswith(f"stderr {call.when}"):
                self.search(text, "stderr")
        if call.when != "setup":
            self.search_files()
        if self.found and not report.failed:
            report.outcome, report.longrepr = "failed", "\n".join(self.found)
            self.found.clear()
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Read once more the logs of processes that outlived a test."""
        self.search_files()
        told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if told is not None:
            told[_TOLD] = self.found
        elif self.found:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            session.config.get_terminal_writer().line("\n" + "\n".join(self.found))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Hear what another process of this run found."""
        self.found += getattr(node, "workeroutput", {}).get(_TOLD, [])

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        """Leave the process as it was."""
        self._patch.undo()
        _REQUESTS.removeHandler(self)
        logging.getLogger().removeHandler(self)
