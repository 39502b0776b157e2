"""`flexlab version`."""

from __future__ import annotations

import platform
from importlib import metadata

from flexlab import __version__
from flexlab.cli import output
from flexlab.cli.common import JsonOption, verb_app
from flexlab.daemons import running_version

app = verb_app()


@app.command()
def version(
    as_json: JsonOption = False,
) -> None:
    """Show the versions of FlexLab, its engine, Python, and the running daemon."""
    versions = {
        "flexlab": __version__,
        "daemon": running_version(),
        "xllamacpp": _installed("xllamacpp"),
        "python": platform.python_version(),
    }
    if as_json:
        output.answer_json(versions)
        return
    for name, found in versions.items():
        output.answer(f"{name:10} {found or ('not running' if name == 'daemon' else 'missing')}")


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
