"""Names of GPU architectures, as compilers and image lists write them."""

from __future__ import annotations

import re

_VERSION_MAX = 999_999
_CAPABILITY = re.compile(r"([0-9]{1,2})\.([0-9])")


def gfx_name(version: int) -> str | None:
    """KFD's `gfx_target_version` (90010) as LLVM's name (`gfx90a`); None for no such version.

    major = v // 10000, minor = v // 100 % 100, stepping = v % 100; in the name minor and stepping
    are one hexadecimal digit each (90012 is gfx90c, not gfx9012).
    """
    major, rest = divmod(version, 10_000)
    minor, stepping = divmod(rest, 100)
    if not 0 < version <= _VERSION_MAX or major == 0 or minor > 15 or stepping > 15:
        return None
    return f"gfx{major}{minor:x}{stepping:x}"


def sm_name(major: int, minor: int) -> str:
    """CUDA compute capability 8.6 as `sm_86`."""
    return f"sm_{major}{minor}"


def sm_of_text(text: str) -> str | None:
    """`8.6`, as nvidia-smi prints a compute capability; None for `[N/A]` and the like."""
    match = _CAPABILITY.fullmatch(text.strip())
    if match is None or match[1].startswith("0"):
        return None
    return sm_name(int(match[1]), int(match[2]))
