"""What a word names: asked of the daemon's picture where there is one, else of the recipes."""

from __future__ import annotations

from collections.abc import Iterable

from flexlab import daemons
from flexlab.cli import output
from flexlab.client import Client
from flexlab.core.errors import DaemonUnreachable
from flexlab.spec.lab import ModelView, Snapshot


def view_of(word: str, snapshot: Snapshot | None) -> ModelView | None:
    """The model that the daemon knows by this name or alias."""
    models: Iterable[ModelView] = snapshot.models if snapshot else ()
    return next((model for model in models if word in (model.name, *model.aliases)), None)


def model_name(word: str, snapshot: Snapshot | None = None) -> str:
    """The name of the model that `word` (a name, an alias, a source) leads to.

    Raises UnknownModel, or what is wrong with the source or the recipe.
    """
    if (view := view_of(word, snapshot)) is not None:
        return view.name
    # Recipes need pydantic and YAML: only when the daemon does not know the word.
    from flexlab.recipes.catalogue import Catalogue

    return Catalogue.load().resolve(word).name


def daemon_for(words: Iterable[str]) -> Client:
    """The daemon that is to do something about these models; one that left engines is followed
    by another.

    Raises UnknownModel for a word that leads nowhere, DaemonUnreachable where no daemon runs.
    """
    daemon = daemons.find_or_adopt(output.say)
    if daemon is not None:
        return daemon
    for word in words:
        model_name(word)
    raise DaemonUnreachable(
        "the daemon is not running",
        "flexlab up MODEL starts it with a model, flexlab serve without one",
        code="not_running",
    )
