"""Networks from libraries by name, without weights: ``torchvision:resnet18 num_classes=10``.

From ``torchvision`` and ``timm`` a model by its name in the library; from ``transformers`` a class that returns
logits, with the options of its config, or with ``config=FOLDER`` of a model on this disk. Nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from umbel.protocol import builds
from umbel.protocol.errors import ConfigError


def _transformers(library: Any, name: str, config: str = "", **options: Any) -> Any:
    """Build a model from a class with its own config, or from a class for all configs."""
    if "trust_remote_code" in options:
        text = f"{name}: trust_remote_code runs code of a folder; give your own factory instead"
        raise ConfigError(text, code="config.model-options")
    kind = getattr(library, name)
    if config:
        # An explicit False: without it, transformers asks on the terminal.
        settings = library.AutoConfig.from_pretrained(config, local_files_only=True, trust_remote_code=False, **options)
    elif getattr(kind, "config_class", None) is None:
        raise ConfigError(
            f"{name} is for models of all kinds: choose one by config=FOLDER", code="config.model-options"
        )
    else:
        settings = kind.config_class(**options)
    settings.use_cache = False  # a cache is for generating text
    return kind.from_config(settings, trust_remote_code=False) if hasattr(kind, "from_config") else kind(settings)


_BUILDERS: dict[str, Callable[..., Any]] = {
    "torchvision": lambda library, name, **options: library.models.get_model(name, weights=None, **options),
    "timm": lambda library, name, **options: library.create_model(name, pretrained=False, **options),
    "transformers": _transformers,
}


def library_of(name: str) -> Callable[..., nn.Module] | None:
    """Return the function that builds ``library:model`` from its options; None if it is not one of these libraries.

    Raise `ConfigError` if the library is not installed, or would look for the name elsewhere.
    """
    kind, _, model = name.partition(":")
    if kind not in _BUILDERS:
        return None
    try:
        library = import_module(kind)
    except Exception as error:
        if mend := builds.hint(error):
            raise ConfigError(f"model {name!r}: {mend}", code="config.mixed-builds") from error
        wrong = f"model {name!r} needs {kind}: {error}"
        raise ConfigError(f"{wrong}; pip install 'umbel[models]'", code="config.missing-library") from error
    if not re.fullmatch(r"[\w.-]+", model):
        raise ConfigError(f"model {name!r}: {model!r} is not a model of {kind}", code="config.model-name")
    return partial(_BUILDERS[kind], library, model)
