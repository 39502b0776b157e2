"""With this folder on PYTHONPATH, `flexlab serve` becomes the fake daemon of the tests."""

import sys
import types

_module = types.ModuleType("flexlab.daemon.main")


def _run(*args, **kwargs):  # type: ignore[no-untyped-def]
    import fake_daemon

    return fake_daemon.run(*args, **kwargs)


_module.run = _run  # type: ignore[attr-defined]
sys.modules["flexlab.daemon.main"] = _module
