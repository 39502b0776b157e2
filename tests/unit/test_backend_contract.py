"""What holds of every engine's settings, also of one that comes later."""

from __future__ import annotations

import pytest

from flexlab import backends


@pytest.mark.parametrize("name", backends.names())
def test_other_names_lead_to_settings_that_exist(name: str) -> None:
    settings = backends.get(name).settings_type
    assert set(settings.other_names.values()) <= set(settings.model_fields)
    assert not set(settings.other_names) & set(settings.model_fields)
