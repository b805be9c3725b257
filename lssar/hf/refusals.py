"""Refuses what a mechanism cannot do inside a model of transformers."""

from typing import NoReturn

from lssar.errors import UserError
from lssar.mechanisms import Mechanism


def family_of(config) -> str:
    """Name the type of model of a config."""
    return f"a model of type {config.model_type!r}" if config is not None else "a model"


def refuse(mechanism: Mechanism, config, what: str) -> NoReturn:
    """Raise a `UserError` about a request of a layer or its model."""
    raise UserError(f"attention {mechanism.name!r} in {family_of(config)} cannot take {what}")
