"""`flexlab ps --watch`: the table again and again, or a line for each change."""

from __future__ import annotations

import time
from time import sleep

from flexlab.cli import model_rows, output
from flexlab.client import Client
from flexlab.spec.lab import ModelView, Snapshot


class Watch:
    """Shows the models of a daemon as they are at each look."""

    def __init__(self, daemon: Client, interval_s: float, *, show_all: bool) -> None:
        self._daemon = daemon
        self._interval_s = interval_s
        self._show_all = show_all
        self._told: dict[str, str] = {}

    def run(self, *, as_json: bool) -> None:
        """Until Ctrl-C. Raises DaemonUnreachable when the daemon ends."""
        draws = output.can_redraw() and not as_json
        if draws:
            output.begin_drawing()
        while True:
            snapshot = self._daemon.snapshot()
            if as_json:
                models = [model for model in snapshot.models if self._is_shown(model)]
                output.answer_json_line(model_rows.as_json(snapshot, models))
            elif draws:
                output.redraw(self._table(snapshot))
            else:
                self._tell_changes(snapshot)
            sleep(self._interval_s)

    def _is_shown(self, model: ModelView) -> bool:
        return self._show_all or model_rows.is_active(model)

    def _table(self, snapshot: Snapshot) -> list[str]:
        shown = [model for model in snapshot.models if self._is_shown(model)]
        rows = [row for model in shown for row in model_rows.rows(model, snapshot)]
        return output.table_lines(model_rows.COLUMNS, rows) if rows else [model_rows.NONE]

    def _tell_changes(self, snapshot: Snapshot) -> None:
        """A line for each model of which something else is to be told than before.

        One that ran and does not any more is told of once more.
        """
        clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at))
        lines = {
            model.name: model_rows.tell(model, snapshot)
            for model in snapshot.models
            if self._is_shown(model) or model.name in self._told
        }
        for name in [name for name in self._told if name not in lines]:
            del self._told[name]
            output.answer(f"{clock}  {name}: gone")
        for name, line in lines.items():
            if self._told.get(name) != line:
                self._told[name] = line
                output.answer(f"{clock}  {line}")
        output.flush()
