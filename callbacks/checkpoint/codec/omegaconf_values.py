"""Configurations of OmegaConf in a state tree, which Lightning's ``save_hyperparameters`` keeps as they are.

They are stored as plain containers with their interpolations unresolved, so that a value of the environment that one
of them would bring in does not get into a checkpoint.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .named_types import UnknownTypeError

__all__ = ["build_config", "config_type", "config_type_name", "take_config_apart"]

_TYPES = ("DictConfig", "ListConfig")
_FLAGS = ("readonly", "struct")


def config_type_name(kind: Any) -> str | None:
    """Which of OmegaConf's two containers a type is; None for any other."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None:
        return None
    return next((name for name in _TYPES if kind is getattr(omegaconf, name, None)), None)


def take_config_apart(value: Any) -> list[Any]:
    """Its type's name, its content as plain containers (None where it is None), and its flags."""
    config = sys.modules["omegaconf"].OmegaConf
    flags = {"readonly": bool(config.is_readonly(value)), "struct": bool(config.is_struct(value))}
    return [type(value).__name__, config.to_container(value, resolve=False), flags]


def config_type(name: str) -> Any:
    """The type of that name.

    Raises:
        UnknownTypeError: There is none, or OmegaConf is not installed.
    """
    if name not in _TYPES:
        raise UnknownTypeError(f"OmegaConf has no container {name!r}")
    try:
        return getattr(importlib.import_module("omegaconf"), name)
    except ImportError:
        raise UnknownTypeError("it holds a configuration of OmegaConf; pip install omegaconf") from None


def build_config(parts: list[Any]) -> Any:
    """The configuration that was taken apart; nothing in it is resolved here.

    Raises:
        UnknownTypeError: OmegaConf is not installed, or has no such container.
    """
    name, content, flags = parts
    # A flag that is not set is left open: it would otherwise hide that of a configuration into which this one is put.
    return config_type(name)(content, flags={flag: True for flag in _FLAGS if flags.get(flag) is True} or None)
