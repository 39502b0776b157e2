"""What a word names: asked of the daemon's picture where there is one, else of the recipes."""

from __future__ import annotations

from collections.abc import Iterable

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
