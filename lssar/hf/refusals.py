"""How what a mechanism cannot do inside a model of transformers is refused."""

from typing import NoReturn

from lssar.errors import UserError
from lssar.mechanisms import Mechanism


def family_of(config) -> str:
    """Name the kind of model that a config is of."""
    return f"a model of type {config.model_type!r}" if config is not None else "a model"


def refuse(mechanism: Mechanism, config, what: str) -> NoReturn:
    """Raise a `UserError` for what a layer or its model asks of a mechanism."""
    raise UserError(f"attention {mechanism.name!r} in {family_of(config)} cannot take {what}")
