"""The one tree of errors that users see.

    FlexLabError                exit 1   message, hint (the next command to type)
    ├── UsageError              exit 2   wrong words on the command line
    │   └── UnknownModel        exit 2   no recipe, alias or source of this name
    ├── SettingsError           exit 2   settings file, FLEXLAB_* variable or option
    ├── RecipeError             exit 2   a recipe file: file, line, key, nearest valid key
    ├── DetectionError          exit 1   the hardware could not be read
    ├── FitError                exit 3   no fitting GPU, backend or memory
    ├── WeightsError            exit 1   source, download, checksum, disk
    ├── RuntimeUnavailable      exit 1   no Docker engine, no cluster, no embedded engine
    ├── LaunchError             exit 1   an engine did not start or did not become ready
    ├── DaemonUnreachable       exit 4   the daemon does not answer
    ├── ProxyError              exit 1   the gateway cannot listen or reach a backend
    ├── VideoJobError           exit 1   a video job failed
    └── Interrupted             exit 130 Ctrl-C

Whoever raises names what, why and the next command; whoever catches at an edge prints
`str(error)` and `error.hint`, never a traceback (except with --debug).
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_FIT = 3
EXIT_NO_DAEMON = 4
EXIT_INTERRUPTED = 130


class FlexLabError(Exception):
    """Something a user can act on. `code` is a stable word for --json and the gateway."""

    exit_code = EXIT_FAILED
    code = "failed"

    def __init__(self, message: str, hint: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code


class UsageError(FlexLabError):
    """Wrong words on the command line."""

    exit_code = EXIT_USAGE
    code = "usage"


class UnknownModel(UsageError):
    """No recipe, alias or source of this name; `near` are the closest known names."""

    code = "model_not_found"

    def __init__(self, name: str, near: tuple[str, ...] = (), hint: str | None = None) -> None:
        message = f"no model named {name!r}"
        if near:
            message += f"; did you mean {' or '.join(near)}?"
        super().__init__(message, hint or "flexlab recipes lists the models with a recipe")
        self.name = name
        self.near = near


class SettingsError(FlexLabError):
    """A setting is wrong: which one, where it was set, what is valid."""

    exit_code = EXIT_USAGE
    code = "settings"


class RecipeError(FlexLabError):
    """One or more problems of one recipe file, all reported in one go."""

    exit_code = EXIT_USAGE
    code = "recipe"


class DetectionError(FlexLabError):
    """The hardware could not be read."""

    code = "detection"


class FitError(FlexLabError):
    """Nothing here can run it: no fitting device, backend or memory."""

    exit_code = EXIT_NO_FIT
    code = "no_fit"


class WeightsError(FlexLabError):
    """Weights cannot be had: source, download, checksum or disk."""

    code = "weights"


class RuntimeUnavailable(FlexLabError):
    """A runtime (process, docker, k3s) cannot be used here, or cannot be reached now."""

    code = "runtime_unavailable"


class LaunchError(FlexLabError):
    """An engine did not start, or did not become ready."""

    code = "launch"


class DaemonUnreachable(FlexLabError):
    """The daemon does not answer on its socket."""

    exit_code = EXIT_NO_DAEMON
    code = "daemon_unreachable"


class ProxyError(FlexLabError):
    """The gateway cannot listen, or a backend cannot be reached."""

    code = "proxy"


class VideoJobError(FlexLabError):
    """A video job failed."""

    code = "video_job"


class Interrupted(FlexLabError):
    """The user pressed Ctrl-C."""

    exit_code = EXIT_INTERRUPTED
    code = "interrupted"
