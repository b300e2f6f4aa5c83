"""What the calls of a Ray run report, until it is asked for: metrics, spans, bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridflow.controller.ray_columns import reports_of
from hybridflow.controller.ray_process import Report
from hybridflow.controller.ray_watch import Key
from hybridflow.core.batch import Batch
from hybridflow.core.metrics import Metrics, Span
from hybridflow.core.roles import Drained

__all__ = ["Reports"]


class Reports:
    """By number of the call: means must not depend on who is done first."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[str, bool, Report]] = {}
        self._number = 0
        self._ahead: dict[Any, tuple[Key, int]] = {}
        """of members' calls that no other call has read from: process and number of the report"""
        self.read: list[Any] = []
        """references to the reports of members' calls that others have read from since the last drain"""

    def keeper(self, where: str, counts: bool) -> Callable[[Report], None]:
        """Takes the next report, of ``where``. ``counts``: its metrics do, others report the same."""
        number = self._number
        self._number += 1

        def keep(report: Report) -> None:
            self._kept[number] = where, counts, report

        return keep

    def begin(self, report: Any, process: Key) -> None:
        """The next report is of a member's call in this process."""
        self._ahead[report] = process, self._number

    def reads(self, batch: Batch) -> None:
        """Members' calls are told of in the step in which others read from them, or from later ones of their process: in
        which step they are done is up to the machine."""
        last = {self._ahead[report] for report in reports_of(batch) if report in self._ahead}
        for report, (key, number) in list(self._ahead.items()):
            if any(key == process and number <= until for process, until in last):
                del self._ahead[report]
                self.read.append(report)

    def drain(self, clock_s: float) -> Drained:
        """What has come, but for the metrics of members' calls that nobody has read from. ``clock_s``: of the machine when
        that of the driver's spans was 0."""
        metrics, spans = Metrics(), list[Span]()
        early = {number for _, number in self._ahead.values()}
        for number, (where, counts, report) in sorted(self._kept.items()):
            spans += [replace(span, start_s=span.start_s - clock_s) for span in report.spans]
            report.spans = ()
            if number in early:
                continue
            del self._kept[number]
            if counts:
                metrics.merge(report.metrics)
            for writer, size in report.pulled.items():
                metrics.count(f"moved/{writer}-{where}", size)
            metrics.count("driver/bytes", report.inlined_bytes)
            metrics.maximum("workers/rss_gb_max", report.rss_bytes / 1e9)
            metrics.maximum("memory/grown_gb", report.grown_bytes / 1e9)
        self.read.clear()
        return Drained(metrics, spans)

    def forget(self) -> None:
        """Of calls that were lost."""
        for forgotten in (self._kept, self._ahead, self.read):
            forgotten.clear()
