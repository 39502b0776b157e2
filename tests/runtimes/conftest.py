"""The conformance suite is imported by the test modules, so that its asserts need rewriting too."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("contract")
