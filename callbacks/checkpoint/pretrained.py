"""The files that Hugging Face models need besides weights, so that an export is a folder for ``from_pretrained``.

``genlight-pretrained/PATH/`` beside the checkpoints of a run has ``config.json`` and ``generation_config.json`` of the
model at PATH in the trained module, and the files of the tokenizer. They are written where training starts, by the
objects that the class made: an export then needs neither the class nor transformers, and unpickles nothing. Checkpoints
share them, because they follow from the class, and a tokenizer can be larger than the weights that are trained.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...adapter.plumbing.durable import fsync_directory, temporary_name, write_bytes_durably

__all__ = ["CONFIG_FILE", "keep_configurations", "kept_configurations"]

log = logging.getLogger(__name__)

FOLDER = "genlight-pretrained"
"""No name that a folder of the user's has, as it is replaced."""
CONFIG_FILE = "config.json"
_GENERATION_FILE = "generation_config.json"


def keep_configurations(directory: Path, module: nn.Module) -> None:
    """Write what the Hugging Face models in `module` need besides weights, in place of what was there; rank zero only.

    A failure is logged: training does not depend on it.

    Args:
        directory: That of the checkpoints.
        module: The trained module, which may host a trainer class.
    """
    models: dict[str, Any] = {path: each for path, each in _outermost(module) if not hasattr(each, "peft_config")}
    if not models:
        return
    temporary = directory / temporary_name(FOLDER)
    try:
        for path, model in models.items():
            folder = temporary / path
            folder.mkdir(parents=True)
            config = json.loads(model.config.to_json_string())
            config["architectures"] = config.get("architectures") or [type(model).__name__]
            write_bytes_durably(folder / CONFIG_FILE, json.dumps(config, indent=2).encode())
            generation: Any = getattr(model, "generation_config", None)
            if generation is not None:
                write_bytes_durably(folder / _GENERATION_FILE, generation.to_json_string().encode())
            if len(models) == 1:  # of several nothing tells whose tokenizer it is
                for tokenizer in _tokenizers(module):
                    tokenizer.save_pretrained(str(folder))
        shutil.rmtree(directory / FOLDER, ignore_errors=True)
        os.rename(temporary, directory / FOLDER)
        fsync_directory(directory)
    except Exception as error:  # noqa: BLE001 - it comes from classes of others
        shutil.rmtree(temporary, ignore_errors=True)
        log.warning("the configuration of the model was not kept, so that an export to a folder has none: %s", error)


def kept_configurations(directory: Path) -> dict[str, Path]:
    """The folders that `keep_configurations` wrote beside the checkpoints of `directory`, by path of the model."""
    root = directory / FOLDER
    return {".".join(found.parent.relative_to(root).parts): found.parent for found in sorted(root.rglob(CONFIG_FILE))}


def _outermost(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The models in `module` that are in no other one: a language model consists of models itself."""
    inside: tuple[str, ...] = ()
    for path, each in module.named_modules():
        is_model = hasattr(getattr(each, "config", None), "to_json_string") and hasattr(each, "save_pretrained")
        if is_model and not path.startswith(inside or "\0"):
            inside = (*inside, f"{path}.")
            yield path, each


def _tokenizers(module: nn.Module) -> list[Any]:
    """Tokenizers and processors that the module, its trainer class or what that built holds."""
    state = getattr(module, "contract_state", None)
    held = [*vars(module).values(), *vars(getattr(module, "plugin", module)).values()]
    held += state.values() if isinstance(state, Mapping) else vars(state).values() if hasattr(state, "__dict__") else ()
    return list({id(each): each for each in held if _is_tokenizer(each)}.values())


def _is_tokenizer(value: Any) -> bool:
    """Whether it can be called and saves itself, and is neither a class nor what holds weights, such as a pipeline."""
    saves = callable(value) and hasattr(value, "save_pretrained")
    return saves and not isinstance(value, type) and not hasattr(value, "to")
