"""`flexlab doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexlab.cli import output
from flexlab.cli.common import JsonOption, SysrootOption, machine_root, verb_app
from flexlab.core.errors import EXIT_FAILED
from flexlab.core.text import counted

app = verb_app()


@app.command()
def doctor(
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not ask whether the package index answers.")
    ] = False,
    sysroot: SysrootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: ok, warn or fail, each finding with its mend. Exit 1 on a fail."""
    root = machine_root(sysroot)
    # The checks read settings, recipes and hardware: nothing that other verbs should import.
    from flexlab.cli.checks import examine, examine_recorded

    findings = examine(offline=offline) if root == Path("/") else examine_recorded(root)
    failed = [finding for finding in findings if finding.level == "fail"]
    if as_json:
        output.answer_json({"ok": not failed, "findings": findings})
    else:
        for finding in findings:
            output.answer(f"{finding.level:4}  {finding.subject}: {finding.text}")
            if finding.mend:
                output.answer(f"      -> {finding.mend}")
        warned = sum(finding.level == "warn" for finding in findings)
        counts = (counted(len(findings), "check"), counted(warned, "warning"))
        output.answer(f"\n{', '.join(counts)}, {counted(len(failed), 'failure')}")
    if failed:
        raise typer.Exit(EXIT_FAILED)
