"""Every number of the scheduling rules is a setting, and reaches the scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_lab import Start, write_recipe

from flexlab.core.settings import Settings
from flexlab.daemon.service import policy_of
from flexlab.scheduler.policy import Policy

NO_SETTING_YET = {"max_in_flight_per_key"}
NUMBERS = sorted(set(Policy.__struct_fields__) - NO_SETTING_YET)


@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_that_is_set_is_the_one_that_counts(field: str) -> None:
    told = getattr(Settings(), field) + 7
    policy = policy_of(Settings.model_validate({field: told}))
    assert getattr(policy, field) == told
    others = [name for name in NUMBERS if getattr(policy, name) != getattr(Policy(), name)]
    assert others == [field], "nothing else changes with it, and the defaults are the rules'"


async def test_replicas_and_the_limit_of_a_recipe_reach_the_scheduler(
    home: Path, start: Start
) -> None:
    recipe = write_recipe(home, "many")
    recipe.write_text(recipe.read_text() + "replicas: 3\nmax_in_flight: 8\n")
    write_recipe(home, "plain")
    lab = await start()
    many, plain = (lab.service.scheduler.models[name] for name in ("many", "plain"))
    assert (many.replicas, many.max_in_flight) == (3, 8)
    assert (plain.replicas, plain.max_in_flight) == (1, None)
